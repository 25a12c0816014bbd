"""Copies between L1 and L2 from their queueing to their end: each launch takes what waits, each end is of a launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.facts import Moment
from kvwitness.tracer.ledger.numbers import Numbers
from kvwitness.tracer.ledger.opened import OpenBackup, OpenLoad


class Launched:
    """A transfer that was launched, and what it copies."""

    __slots__ = ("backups", "event", "loads")

    def __init__(self, event: ev.TransferStarted) -> None:
        self.event = event
        self.backups: list[OpenBackup] = []
        """Those that were not acknowledged yet, in the order queued."""
        self.loads: list[OpenLoad] = []


class Transfers:
    """What waits to be copied and what is being copied, but for what was begun before the attaching."""

    def __init__(self) -> None:
        self.queued_backups: dict[int, list[OpenBackup]] = defaultdict(list)
        """Node -> backups that were queued and not launched."""
        self.queued_loads: dict[int, list[OpenLoad]] = defaultdict(list)
        """Node -> loads that were queued and not launched."""
        self.running: dict[int, Launched] = {}
        """By their numbers."""
        self.fitted = False
        """Whether some transfer moved the bytes that its tokens make."""
        self.numbers = Numbers()
        """Of all transfers so far."""
        self.launched = {ev.Direction.D2H: 0, ev.Direction.H2D: 0}
        """The last launch of each direction: what waits for the next one was queued behind it."""
        self._of_node: dict[int, list[OpenBackup]] = defaultdict(list)
        """Node -> backups that were launched and not acknowledged."""

    def reset(self) -> None:
        """The cache was emptied: nothing waits any more, and what is being copied is nobody's."""
        self.queued_backups.clear()
        self.queued_loads.clear()
        self._of_node.clear()

    def compact(self) -> None:
        """Give up memory of long ago."""
        self.numbers.compact()

    # --- questions -----------------------------------------------------------------------------------

    def is_backing(self, node: int) -> bool:
        """Whether a backup of a node is queued or under way."""
        return bool(self.queued_backups.get(node) or self._of_node.get(node))

    def waiting(self, direction: int) -> Iterator[OpenBackup | OpenLoad]:
        """What waits to be launched that way."""
        queued: Sequence[Sequence[OpenBackup | OpenLoad]] = list(
            self.queued_backups.values() if direction == ev.Direction.D2H else self.queued_loads.values()
        )
        return (one for of_node in queued for one in of_node)

    def backup_of(self, node: int) -> OpenBackup | None:
        """The launched backup of a node whose acknowledgement comes next."""
        found = self._of_node.get(node)
        return found[0] if found else None

    def never_launched(self, node: int) -> OpenBackup | None:
        """A backup of a node that is still queued."""
        found = self.queued_backups.get(node)
        return found[0] if found else None

    def copying(self) -> Iterator[OpenLoad]:
        """Loads that were launched and are not done."""
        return (load for transfer in self.running.values() for load in transfer.loads)

    # --- what happens --------------------------------------------------------------------------------

    def backup_queued(self, backup: OpenBackup) -> None:
        """It waits for the next launch to the host."""
        self.queued_backups[backup.queued.node].append(backup)

    def load_queued(self, load: OpenLoad) -> None:
        """It waits for the next launch to the device."""
        self.queued_loads[load.queued.node].append(load)

    def start(self, event: ev.TransferStarted, moment: Moment) -> None:
        """What waits of these nodes is on its way, of each node the first; what is left out is not waited for."""
        transfer = Launched(event)
        if event.direction == ev.Direction.D2H:
            for node in event.nodes:
                for backup in self.queued_backups.pop(node, ()):
                    backup.started, backup.transfer = moment, event.transfer
                    transfer.backups.append(backup)
                    self._of_node[node].append(backup)
            self.queued_backups.clear()
        elif event.direction == ev.Direction.H2D:
            for node in event.nodes:
                queued = self.queued_loads.get(node)
                if queued:
                    load = queued.pop(0)
                    load.started, load.transfer = moment, event.transfer
                    load.transfer_tokens, load.transfer_bytes = event.tokens, event.bytes
                    transfer.loads.append(load)
            self.queued_loads.clear()
        self.numbers.add(event.transfer)
        if event.direction in self.launched:
            self.launched[event.direction] = event.seq
            self.running[event.transfer] = transfer

    def acknowledged(self, node: int) -> OpenBackup | None:
        """A backup's copy is complete; None where none was launched. One that was not is not waited for any more."""
        found = self._of_node.get(node)
        if not found:
            self.queued_backups.pop(node, None)
            return None
        backup = found.pop(0)
        if not found:
            del self._of_node[node]
        transfer = self.running.get(backup.transfer or 0)
        if transfer is not None and backup in transfer.backups:
            transfer.backups.remove(backup)
            if not transfer.backups:
                del self.running[backup.transfer or 0]
        return backup

    def ended(self, number: int) -> Launched | None:
        """A copy to the device is complete; None where it never started."""
        transfer = self.running.get(number)
        if transfer is None or transfer.event.direction != ev.Direction.H2D:
            return None
        return self.running.pop(number)
