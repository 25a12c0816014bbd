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
        self.queued: dict[int, dict[int, int]] = {ev.Direction.D2H: {}, ev.Direction.H2D: {}}
        """Direction -> node -> tokens of its operation, which are given with the first of its nodes."""
        self._backups: dict[int, set[int]] = {}
        """Transfer -> nodes whose acknowledgement is to come."""
        self._loads: set[int] = set()
        self._moving: dict[int, set[int]] = {ev.Direction.D2H: set(), ev.Direction.H2D: set()}
        """Direction -> nodes of which a copy was found under way."""
        self._digests: dict[int, ev.ResidentDigests] = {}
        self._chains: dict[int, Chain] = {}
        self._ends: dict[int, int] = {}
        self.begun = 0
        """The event with which the look at what is there began; 0: there was none yet."""
        self.looking = False
        """Whether it is under way."""
        self.found_tokens = [0, 0]
        """Tokens of the nodes that were found in L1 and in L2."""

    def reset(self) -> None:
        """A new epoch: nothing of what was found is there any more."""
        for queued in self.queued.values():
            queued.clear()
        self._backups.clear()
        self._digests.clear()
        self._chains.clear()
        self._ends.clear()

    # --- copies --------------------------------------------------------------------------------------

    def under_way(self, event: ev.InFlight) -> None:
        """A copy of which nothing but its end, and perhaps its launch, will be seen."""
        self._moving.setdefault(event.direction, set()).update(event.nodes)
        if not event.launched:
            queued = self.queued.get(event.direction, {})
            queued.update(dict.fromkeys(event.nodes, 0))
            if event.nodes:
                queued[event.nodes[0]] = event.tokens
        elif event.direction == ev.Direction.H2D:
            self._loads.add(event.transfer)
        else:
            self._backups.setdefault(event.transfer, set()).update(event.nodes)

    def moves(self, direction: int, node: int) -> bool:
        """Whether a copy of a node that way was found under way."""
        return node in self._moving[direction]

    def launched(self, transfer: int, direction: int, nodes: tuple[int, ...]) -> None:
        """A launch takes what waits; what it leaves out is not waited for."""
        queued = self.queued.get(direction, {})
        taken = [node for node in nodes if node in queued]
        queued.clear()
        if taken and direction == ev.Direction.D2H:
            self._backups.setdefault(transfer, set()).update(taken)

    def is_backup(self, transfer: int, node: int) -> bool:
        """Whether an acknowledgement is of such a copy."""
        return node in self._backups.get(transfer, ())

    def backup_ended(self, transfer: int, node: int) -> None:
        """One is complete."""
        self._backups[transfer].discard(node)
        self._moving[ev.Direction.D2H].discard(node)

    def is_load(self, transfer: int) -> bool:
        """Whether a load's end is of such a copy."""
        return transfer in self._loads

    def load_ended(self, transfer: int, nodes: tuple[int, ...]) -> None:
        """One is complete."""
        self._loads.discard(transfer)
        self._moving[ev.Direction.H2D].difference_update(nodes)

    # --- prefixes ------------------------------------------------------------------------------------

    def digests(self, event: ev.ResidentDigests) -> None:
        """Digests of a node that is about to be found."""
        self._digests[event.node] = event

    def waiting_digests(self) -> int | None:
        """A node whose digests were told and that was not found after them."""
        return next(iter(self._digests), None)

    def unsound(self, node: int) -> None:
        """What was told of a node contradicts itself: nothing is built on it."""
        self._chains.pop(node, None)

    def found_before(self, node: int) -> bool:
        """Whether a node was found already: a look comes to each once."""
        return node in self._ends

    @property
    def nodes(self) -> int:
        """How many nodes were found."""
        return len(self._ends)

    def end_of(self, node: int) -> int | None:
        """Where a node that was found ends; the root, at the start of everything. None: it was not found."""
        return 0 if node < 0 else self._ends.get(node)

    def before(self, parent: int) -> tuple[int, list[bytes]]:
        """The grid and the digests of the prefix that ends with a node that was found (0: not known)."""
        chain = self._chains.get(parent)
        return (chain.grid, chain.cells) if chain is not None else (0, [])

    def chain_of(self, event: ev.ResidentNode) -> Chain | None:
        """The prefix that ends with a node that is found; None where it was not recorded without a hole."""
        own = self._digests.get(event.node)
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
        return Chain(f"at attach, node {event.node}", own.grid, [*before, *own.digests], since=self.begun)

    def found(self, event: ev.ResidentNode, chain: Chain | None) -> None:
        """A node was found, with this prefix."""
        self._digests.pop(event.node, None)
        self._ends[event.node] = event.end
        if chain is not None:
            self._chains[event.node] = chain
        self.found_tokens[0] += (event.end - event.start) * (event.l1 == ev.AtAttach.RESIDENT)
        self.found_tokens[1] += (event.end - event.start) * (event.l2 == ev.AtAttach.RESIDENT)
