"""What a journal that was begun on a running server says of the time before: copies under way, digests of nodes."""

from __future__ import annotations

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.chains import Chain


class Unseen:
    """Copies whose queueing was not recorded, and the prefixes of the nodes that were found.

    Nothing is ever claimed of such a copy. It has to be known so that its launch and its end, which are recorded,
    are not taken for a sign of missing events.
    """

    def __init__(self) -> None:
        self._queued: dict[int, dict[int, int]] = {ev.Direction.D2H: {}, ev.Direction.H2D: {}}
        """Direction -> node -> tokens of its operation, which are given with the first of its nodes."""
        self._backups: dict[int, set[int]] = {}
        """Transfer -> nodes whose acknowledgement is to come."""
        self._loads: set[int] = set()
        self._digests: dict[int, ev.ResidentDigests] = {}
        self._chains: dict[int, Chain] = {}
        self._ends: dict[int, int] = {}
        self._looking: bool | None = None
        """Whether the look at what is there is under way; None before it."""

    def reset(self) -> None:
        """A new epoch: nothing of what was found is there any more."""
        for queued in self._queued.values():
            queued.clear()
        self._backups.clear()
        self._digests.clear()
        self._chains.clear()
        self._ends.clear()

    # --- the look itself -----------------------------------------------------------------------------

    def begin(self) -> bool:
        """Whether it can begin now: a journal has one."""
        before, self._looking = self._looking, True
        return before is None

    def end(self) -> None:
        """All was looked at, or the tree is another one."""
        self._looking = False

    def outside(self, event: ev.Event) -> str | None:
        """Why something cannot have been found now, in words."""
        return None if self._looking else f"event {event.seq} tells what was found, and nobody was looking"

    # --- copies --------------------------------------------------------------------------------------

    def under_way(self, event: ev.InFlight) -> None:
        """A copy of which nothing but its end, and perhaps its launch, will be seen."""
        if not event.launched:
            queued = self._queued.get(event.direction, {})
            queued.update(dict.fromkeys(event.nodes, 0))
            if event.nodes:
                queued[event.nodes[0]] = event.tokens
        elif event.direction == ev.Direction.H2D:
            self._loads.add(event.transfer)
        else:
            self._backups.setdefault(event.transfer, set()).update(event.nodes)

    def launched(self, transfer: int, direction: int, nodes: tuple[int, ...]) -> tuple[int, int, list[int]]:
        """A launch takes what waits: how many nodes of it, with how many tokens, and which it leaves out."""
        queued = self._queued.get(direction, {})
        taken = [node for node in nodes if node in queued]
        tokens = sum(queued.pop(node) for node in taken)
        forgotten = list(queued)
        queued.clear()
        if taken and direction == ev.Direction.D2H:
            self._backups.setdefault(transfer, set()).update(taken)
        return len(taken), tokens, forgotten

    def backup_ended(self, transfer: int, node: int) -> bool:
        """Whether an acknowledgement is of such a copy."""
        waiting = self._backups.get(transfer, set())
        if node not in waiting:
            return False
        waiting.discard(node)
        return True

    def load_ended(self, transfer: int) -> bool:
        """Whether a load's end is of such a copy."""
        if transfer not in self._loads:
            return False
        self._loads.discard(transfer)
        return True

    # --- prefixes ------------------------------------------------------------------------------------

    def digests(self, event: ev.ResidentDigests) -> None:
        """Digests of a node that is about to be found."""
        self._digests[event.node] = event

    def unsound(self, node: int) -> None:
        """What was told of a node contradicts itself: nothing is built on it."""
        self._chains.pop(node, None)

    def found_before(self, node: int) -> bool:
        """Whether a node was found already: a look comes to each once."""
        return node in self._ends

    def chain_of(self, event: ev.ResidentNode) -> Chain | None:
        """The prefix that ends with a node that was found; None where it was not recorded without a hole."""
        own = self._digests.pop(event.node, None)
        self._ends[event.node] = event.end
        if own is None or own.grid < 1:
            return None
        before: list[bytes] = []
        if event.parent >= 0:
            parent = self._chains.get(event.parent)
            if parent is None or parent.grid != own.grid or self._ends.get(event.parent) != event.start:
                return None
            before = parent.cells
        elif event.start:
            return None
        if own.first_cell != event.start // own.grid or len(before) != own.first_cell:
            return None
        if len(own.digests) != event.end // own.grid - own.first_cell:
            return None
        chain = Chain(f"at attach, node {event.node}", own.grid, [*before, *own.digests])
        self._chains[event.node] = chain
        return chain
