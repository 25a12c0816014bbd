"""Copies between L1 and L2 from their queueing to their end: each launch takes what waits, each end is of a launch."""

from __future__ import annotations

from collections import defaultdict

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.attached import Unseen
from kvwitness.tracer.ledger.describing import Describing
from kvwitness.tracer.ledger.gaps import Gaps
from kvwitness.tracer.ledger.numbers import Numbers
from kvwitness.tracer.ledger.opened import OpenBackup, OpenLoad


class Transfers:
    """What waits to be copied and what is being copied, which has to fit to what the instance says of itself."""

    def __init__(self, gaps: Gaps, attached: Unseen, described: Describing) -> None:
        self._gaps = gaps
        self._attached = attached
        self._described = described
        self._backups: dict[int, list[OpenBackup]] = defaultdict(list)
        """Node -> backups that were queued and not acknowledged."""
        self._loads: dict[int, list[OpenLoad]] = defaultdict(list)
        """Node -> loads that were queued and not launched."""
        self._copying: dict[int, tuple[ev.TransferStarted, list[OpenLoad]]] = {}
        """Transfer -> the loads that it copies."""
        self._numbers = Numbers()
        self._launched = {ev.Direction.D2H: 0, ev.Direction.H2D: 0}
        """The last launch of each direction: what waits for the next one was queued behind it."""

    @property
    def any_seen(self) -> bool:
        """Whether any transfer was recorded."""
        return bool(self._numbers)

    def reset(self) -> None:
        """The cache was emptied: nothing waits any more."""
        self._backups.clear()
        self._loads.clear()

    def compact(self) -> None:
        """Give up memory of long ago."""
        self._numbers.compact()

    # --- queued --------------------------------------------------------------------------------------

    def backup_queued(self, backup: OpenBackup) -> None:
        """It waits for the next launch to the host."""
        if self._backups.get(backup.queued.node):
            told = f"node {backup.queued.node} was queued to be backed up while a backup of it was under way"
            self._gaps.here(backup.queued.seq, told)
        self._backups[backup.queued.node].append(backup)

    def load_queued(self, load: OpenLoad) -> None:
        """It waits for the next launch to the device."""
        self._loads[load.queued.node].append(load)

    def in_flight(self, event: ev.InFlight) -> None:
        """A copy was found under way, or waiting, when kvwitness was attached."""
        if event.launched and event.transfer in self._numbers:
            self._gaps.here(event.seq, f"transfer {event.transfer} has the number of an earlier one")
        self._numbers.add(event.transfer)
        self._attached.under_way(event)

    # --- launched ------------------------------------------------------------------------------------

    def started(self, event: ev.TransferStarted, moment: ft.Moment) -> None:
        """A launch takes everything that waits. Where it does not add up, something is missing since the last one."""
        if event.direction not in self._launched:
            told = f"transfer {event.transfer} copies in a direction that this version does not know"
            self._gaps.here(event.seq, told)
            return
        since, self._launched[event.direction] = self._launched[event.direction], event.seq
        wrong = self._launch(event, moment)
        per_token = self._described.now.instance.bytes_per_token
        if event.transfer in self._numbers:
            wrong = "has the number of an earlier one"
        elif len(set(event.nodes)) != len(event.nodes):
            wrong = "names a node twice"
        elif per_token is not None and not self._bytes_fit(event, per_token):
            wrong = f"moves {event.bytes} bytes for {event.tokens} tokens"
        self._numbers.add(event.transfer)
        if wrong is not None:
            self._gaps.since(since, event.seq, f"transfer {event.transfer} {wrong}")

    def _bytes_fit(self, event: ev.TransferStarted, per_token: int) -> bool:
        """Where further pools take part in a transfer there are more bytes."""
        alone = len(self._described.now.instance.pools) <= 1
        expected = event.tokens * per_token
        return event.bytes == expected if alone else event.bytes >= expected

    def _launch(self, event: ev.TransferStarted, moment: ft.Moment) -> str | None:
        """Everything that waits to be copied in this direction is on its way; what does not fit, in words."""
        unseen, unseen_tokens, forgotten = self._attached.launched(event.transfer, event.direction, event.nodes)
        if event.direction == ev.Direction.D2H:
            waiting = [b for queued in self._backups.values() for b in queued if b.started is None]
            count, tokens, left_out = self._launch_backups(event, moment, waiting)
            if len({b.queued.node for b in waiting}) != len(waiting):
                return "copies a node that was queued twice"
        else:
            count, tokens, left_out = self._launch_loads(event, moment)
        left_out += forgotten
        if left_out:
            return f"leaves out node {left_out[0]}, which was queued"
        if unseen + count != len(event.nodes):
            return f"copies {len(event.nodes)} nodes, {unseen + count} were queued"
        tokens += unseen_tokens
        return None if tokens == event.tokens else f"copies {event.tokens} tokens, {tokens} were queued"

    def _launch_backups(
        self, event: ev.TransferStarted, moment: ft.Moment, waiting: list[OpenBackup]
    ) -> tuple[int, int, list[int]]:
        """How many it takes, with how many tokens, and the nodes that it leaves out, which are not waited for."""
        tokens = 0
        for backup in waiting:
            if backup.queued.node in event.nodes:
                backup.started, backup.transfer = moment, event.transfer
                tokens += backup.queued.tokens
        left_out = [b.queued.node for b in waiting if b.started is None]
        for node, queued in list(self._backups.items()):
            started = [b for b in queued if b.started is not None]
            if started:
                self._backups[node] = started
            else:
                del self._backups[node]
        return len(waiting) - len(left_out), tokens, left_out

    def _launch_loads(self, event: ev.TransferStarted, moment: ft.Moment) -> tuple[int, int, list[int]]:
        """The same of loads: of each node the one that was queued first."""
        loads: list[OpenLoad] = []
        for node in event.nodes:
            queued = self._loads.get(node)
            if queued:
                load = queued.pop(0)
                load.started, load.transfer = moment, event.transfer
                load.transfer_tokens, load.transfer_bytes = event.tokens, event.bytes
                loads.append(load)
        self._copying[event.transfer] = (event, loads)
        left_out = [node for node, queued in self._loads.items() if queued]
        self._loads.clear()
        return len(loads), sum(load.queued.tokens for load in loads), left_out

    # --- ended ---------------------------------------------------------------------------------------

    def backup_acked(self, event: ev.BackupAcked, moment: ft.Moment) -> None:
        """A backup's copy is complete: what it wrote is usable."""
        if self._attached.backup_ended(event.transfer, event.node):
            return
        queued = self._backups.get(event.node)
        if not queued:
            self._gaps.here(event.seq, f"a backup of node {event.node} was acknowledged that was never queued")
            return
        backup = queued.pop(0)
        if not queued:
            del self._backups[event.node]
        if backup.started is None:
            self._gaps.since(backup.moment.seq, event.seq, f"the copy of node {event.node} was never launched")
            return
        if backup.transfer != event.transfer:
            self._gaps.here(event.seq, f"the acknowledgement of node {event.node} names another transfer")
            return
        backup.acked = moment
        backup.content.usable = moment
        backup.duration_ns = event.duration_ns if event.duration_ns >= 0 else None

    def load_done(self, event: ev.LoadDone, moment: ft.Moment) -> list[OpenLoad]:
        """A copy to the device is complete; the loads that are done with it."""
        if self._attached.load_ended(event.transfer):
            return []
        started = self._copying.pop(event.transfer, None)
        if started is None:
            self._gaps.here(event.seq, f"transfer {event.transfer} ended that never started")
            return []
        begin, loads = started
        if (begin.tokens, begin.bytes, begin.nodes) != (event.tokens, event.bytes, event.nodes):
            self._gaps.here(event.seq, f"transfer {event.transfer} ended with other figures than it started with")
            if event.tokens < begin.tokens:
                for load in loads:
                    load.ended_short = event.tokens
            return []
        for load in loads:
            load.done = moment
            load.duration_ns = event.duration_ns if event.duration_ns >= 0 else None
        return loads
