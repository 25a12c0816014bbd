"""L1 as the ledger sees it: radix-tree nodes of one epoch, where they came from, when they left.

Node ids are only followed within an epoch. A split gives the *prefix* a new id and leaves the old id on the
suffix; it is recognised when a later path shows the new node, and the new node inherits the old one's
history. What cannot be explained stays "not known" and lowers the claims that rest on it.

Questions change nothing; whether the events fit what is known here is decided by :mod:`kvwitness.tracer.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvwitness.patches.schema.events import AtAttach, Eviction, PathNode, ResidentNode
from kvwitness.tracer.ledger.beginnings import Beginnings
from kvwitness.tracer.ledger.chains import Chain, same_prefix, shared_prefix
from kvwitness.tracer.ledger.facts import Birth, MatchedNode, Moment, Residency
from kvwitness.tracer.ledger.numbers import Numbers
from kvwitness.tracer.ledger.requests import Computed

Path = Sequence[PathNode]
Odd = tuple[int | None, str]
"""Since which event (None: the one before) something does not fit, and what."""


@dataclass(slots=True)
class Node:
    """History of one node."""

    id: int
    start: int
    end: int
    chain: Chain | None
    resident: Moment | None = None
    resident_by: str | None = None
    load: int | None = None
    """The load-back that made it resident, or that is under way (then ``resident`` is None)."""
    evicted: Moment | None = None
    evicted_how: int | None = None
    evicted_call: int | None = None
    known: bool = True
    doubt: bool = False
    """It was seen with another end or for another prefix: nothing is known of it any more in this epoch."""
    points: dict[int, bytes] = field(default_factory=dict)
    """Digests of prefixes up to its end, of every sequence whose path went through it."""
    was: frozenset[int] = frozenset()
    """The nodes that it was split off from."""
    computed: Moment | None = None
    """The prefill pass that computed it, when that is what made it resident."""
    backing: int = 0
    """Copies of it to the host that are queued or under way."""
    seen: int = 0
    """When an event last showed it to be in the tree, in looks of the view."""
    since: int = 0
    """When an event first showed it, in looks of the view."""

    @property
    def in_l1(self) -> bool:
        """It is in L1, or on its way there."""
        return self.resident is not None or self.load is not None


class TreeView:
    """All nodes of the current epoch."""

    def __init__(self, epoch: int, close: Callable[[Residency], None]) -> None:
        self._epoch = epoch
        self._close = close
        self._nodes: dict[int, Node] = {}
        self._beginnings = Beginnings()
        self._doubtful: set[int] = set()
        self._looks = self._looked = 0
        self._forgotten = Numbers()
        self._loading: dict[int, list[int]] = {}
        """Load-back -> the nodes that it brings, those that were split off from them meanwhile included."""

    # --- structure -----------------------------------------------------------------------------------

    def _place(self, node: Node) -> Node:
        if node.id in self._forgotten:
            node.known = False
            self._doubt(node)
        self._nodes[node.id] = node
        node.since = self._looks
        if node.doubt:
            self._doubtful.add(node.id)
        self._beginnings.put(node.id, node.start, node.chain)
        return node

    def _doubt(self, node: Node) -> None:
        node.doubt = True
        self._doubtful.add(node.id)

    def _move_start(self, node: Node, start: int) -> None:
        node.start = start
        self._beginnings.put(node.id, start, node.chain)

    def _of_chain(self, node: Node, chain: Chain | None) -> None:
        node.chain = chain
        self._beginnings.put(node.id, node.start, chain)

    def misplaced(self, path: Path) -> Odd | None:
        """A node of a path that has other positions than it had. A split takes from a node's start, its end stays."""
        for step in path:
            node = self._nodes.get(step.node)
            if node is not None and (node.end != step.end or node.start > step.start):
                last = node.evicted or node.resident
                return (last.seq if last is not None else None), f"node {node.id} has other positions than it had"
        return None

    def strange(self, path: Path, chain: Chain | None) -> str | None:
        """A node of a path that digests show to be another sequence's."""
        for step in path if chain is not None else ():
            node = self._nodes.get(step.node)
            if node is not None and self._other_prefix(node, chain, step.end):
                return f"node {node.id} is on the path of another prefix than it has"
        return None

    def follow(self, path: Path, chain: Chain | None) -> list[Node]:
        """Take in a path that the tree reported for a sequence; splits since the last look are applied."""
        on_path = {step.node for step in path}
        self._looks += 1
        nodes: list[Node] = []
        for step in path:
            node = self._nodes.get(step.node)
            if node is None:
                node = self._split_off(step, chain, on_path)
            elif node.start < step.start and node.end == step.end:
                # Its prefix was split off; the part that is left keeps the id.
                self._move_start(node, step.start)
            elif (node.start, node.end) != (step.start, step.end):
                node.known = False
                self._doubt(node)
                self._move_start(node, step.start)
                node.end = step.end
            node.seen = self._looks
            if node.chain is None:
                self._of_chain(node, chain)
            if chain is not None:
                if self._other_prefix(node, chain, step.end):
                    self._doubt(node)
                for at, digest in chain.points.items():
                    if at <= step.end:
                        node.points.setdefault(at, digest)
            nodes.append(node)
        return nodes

    def _other_prefix(self, node: Node, chain: Chain | None, end: int) -> bool:
        """Whether digests show that a node on a sequence's path is another sequence's."""
        if chain is None:
            return False
        if any(node.points.get(at, digest) != digest for at, digest in chain.points.items() if at <= end):
            return True
        return shared_prefix(chain, node.chain, end) == -1

    def _split_off(self, step: PathNode, chain: Chain | None, on_path: set[int]) -> Node:
        """A node id that was not seen before: the prefix part of a known node, or new to the ledger."""
        if step.node in self._forgotten:
            return self._place(Node(step.node, step.start, step.end, chain, known=False))
        candidates: list[Node] = []
        # What is in doubt may hold any prefix.
        for number in on_path.union(self._doubtful, self._beginnings.like(step.start, step.end, chain)):
            other = self._nodes.get(number)
            if other is None or other.start != step.start or other.end <= step.end:
                continue
            # Either the path goes on through the rest of it, or the digests show a page of it to be equal: no two
            # children of a node begin with the same page. That it is the only one known to begin here says nothing.
            shared = shared_prefix(chain, other.chain, step.end)
            equal = shared is not None and shared > step.start
            if other.doubt or (shared != -1 and (number in on_path or equal)):
                candidates.append(other)
        # For the same reason they cannot have been in the tree at the same time: it is the one that was seen last.
        last = max((other.seen for other in candidates), default=0)
        candidates = [other for other in candidates if other.seen == last]
        if len(candidates) != 1:
            return self._place(Node(step.node, step.start, step.end, chain, known=False))
        whole = candidates[0]
        points = {at: digest for at, digest in whole.points.items() if at <= step.end}
        part = replace(whole, id=step.node, end=step.end, was=whole.was | {whole.id}, points=points)
        self._move_start(whole, step.end)
        if part.load in self._loading:
            self._loading[part.load].append(part.id)
        return self._place(part)

    # --- residency -----------------------------------------------------------------------------------

    def inserted(
        self, path: Path, chain: Chain | None, computed: Computed | None, existing: int, moment: Moment
    ) -> None:
        """After an insert what the request's own prefill computed of a path that was taken in is in L1, born now.

        What lies before that was there already or is being loaded: it is not born by this request. Neither is what
        was among the ``existing`` tokens, but for what had left L1.
        """
        for step in path if computed is not None else ():
            node = self._nodes[step.node]
            if computed is None or node.start < computed.start or not step.on_device:
                continue
            if computed.end is not None and node.end > computed.end:
                continue
            if node.end <= existing and node.evicted is None:
                continue
            # A node that is being loaded is in the tree already; its residency begins with the load's end.
            if not node.in_l1:
                rid = chain.rid if chain is not None else None
                node.resident, node.resident_by, node.computed = moment, rid, computed.launched(node.end)
                node.evicted = node.evicted_how = node.evicted_call = None
                node.known = True
                if chain is not None:
                    self._of_chain(node, chain)

    # --- what the tree itself says of L1 -------------------------------------------------------------

    def back_again(self, path: Path) -> Odd | None:
        """A node that left L1 and that the tree holds there, although no event brought it back."""
        for step in path:
            node = self._nodes[step.node]
            if step.on_device and not node.in_l1 and node.evicted is not None:
                return node.evicted.seq, f"node {node.id} is in L1 again, and no event brought it back"
        return None

    def left_unseen(self, path: Path) -> Odd | None:
        """A node that is in L1, or on its way, and that the tree holds elsewhere, although no event took it out."""
        for step in path:
            node = self._nodes[step.node]
            if not step.on_device and node.resident is not None:
                return node.resident.seq, f"node {node.id} is not in L1 any more, and no event took it out"
            if not step.on_device and node.load is not None:
                return node.load, f"node {node.id} is not in L1, and a load-back of it was queued"
        return None

    def beside(self, path: Path, chain: Chain | None) -> Odd | None:
        """Two nodes that begin with one page: no two children of a node do."""
        for node, other in self._twins(path, chain):
            since = other.resident.seq if other.resident is not None else other.load
            return since, f"nodes {node.id} and {other.id} begin with the same page"
        return None

    def settle(self, path: Path, chain: Chain | None, moment: Moment) -> None:
        """From here on the tree's own word on a path counts; how it came about is not known where no event says so."""
        for node, other in list(self._twins(path, chain)):
            self._doubt(node)
            self._doubt(other)
        for step in path:
            node = self._nodes[step.node]
            if step.on_device and not node.in_l1 and node.evicted is not None:
                node.evicted = node.evicted_how = node.evicted_call = None
            elif not step.on_device and node.resident is not None:
                self._close_node(node, moment)

    def _twins(self, path: Path, chain: Chain | None) -> Iterator[tuple[Node, Node]]:
        """Nodes of a path, and others that cannot be in L1 while they are in the tree.

        One that was there first may be what a node was split off from, without digests that show it.
        """
        for step in path:
            node = self._nodes[step.node]
            sequence = chain or node.chain
            if sequence is None or not sequence.grid:
                continue
            first_cell = (node.start // sequence.grid + 1) * sequence.grid
            for number in self._beginnings.like(node.start, node.end, sequence):
                other = self._nodes[number]
                if other.since <= node.since or not other.in_l1 or (node.doubt and other.doubt):
                    continue
                shared = shared_prefix(sequence, other.chain, min(first_cell, node.end, other.end))
                if shared is not None and shared > node.start and all(each.node != number for each in path):
                    yield node, other

    # --- attached ------------------------------------------------------------------------------------

    def unfit(self, event: ResidentNode) -> str | None:
        """Why a node cannot have been found as an event says, by what was seen of it since the events began."""
        node = self._nodes.get(event.node)
        if node is None:
            return None
        if node.end != event.end or node.start > event.start:
            return f"node {node.id} was found with other positions than it had"
        if event.l1 == AtAttach.RESIDENT and node.evicted is not None and node.load is None:
            return f"node {node.id} was found in L1, and no event brought it back"
        if event.l1 == AtAttach.ABSENT and node.in_l1:
            return f"node {node.id} was found outside L1, and no event took it out"
        return None

    def seen_at_attach(self, event: ResidentNode, chain: Chain | None, at: Moment) -> None:
        """A node was found in the tree of a running server.

        What the events have said of it since they began stands; without them the tree's own word counts, for a
        node whose prefix is known.
        """
        wrong = self.unfit(event) is not None
        node = self._nodes.get(event.node)
        if node is None:
            node = self._place(Node(event.node, event.start, event.end, chain, known=False))
        elif node.start < event.start and node.end == event.end:
            self._move_start(node, event.start)
        elif (node.start, node.end) != (event.start, event.end):
            node.known = False
            self._doubt(node)
            return
        self._looks += 1
        node.seen = self._looks
        if wrong or chain is None:
            return
        if shared_prefix(chain, node.chain, node.end) == -1:
            self._doubt(node)
        if node.chain is None or not node.known:
            self._of_chain(node, chain)
        node.known = True
        if not node.in_l1:
            if event.l1 == AtAttach.RESIDENT:
                node.resident = at
            elif event.l1 == AtAttach.ABSENT and event.l2 == AtAttach.RESIDENT:
                # Found in L2 alone: however it left L1, its usable copy was in L2.
                node.evicted, node.evicted_how, node.evicted_call = at, Eviction.DEMOTED, None

    # --- load-backs ----------------------------------------------------------------------------------

    def loading(
        self, start: int, end: int, path: Path, load: int, at: Moment, stored: Sequence[tuple[int, int]] = ()
    ) -> None:
        """A load-back of ``[start, end)`` of a matched path was queued.

        The tree loads only what is not in L1: where the ledger holds a node resident, it missed how that ended.
        ``stored``: ranges whose slots a prefetch from storage had filled with this very prefix. A node of them alone
        came with that prefetch: no prefill put it into the tree.
        """
        for node in self._within(start, end, path):
            if any(low <= node.start and node.end <= high for low, high in stored):
                node.known = True
            self._close_node(node, at)
            node.load = load
            self._loading.setdefault(load, []).append(node.id)

    def loaded(self, start: int, end: int, rid: str | None, load: int, at: Moment) -> None:
        """It completed: the nodes are in L1."""
        for node in (self._nodes[number] for number in self._loading.pop(load, ())):
            if start <= node.start and node.end <= end and node.resident is None and node.load == load:
                node.resident, node.resident_by, node.computed = at, rid, None
                node.evicted = node.evicted_how = node.evicted_call = None

    def _within(self, start: int, end: int, path: Path) -> list[Node]:
        nodes = [self._nodes[step.node] for step in path if step.node in self._nodes]
        return [node for node in nodes if start <= node.start and node.end <= end]

    def came_from(self, node: int, start: int, end: int, path: Path) -> bool:
        """Whether the part ``[start, end)`` of a path is ``node``, or was split off from it."""
        position = start
        for step in path:
            if step.start < end and position < step.end:
                known = self._nodes.get(step.node)
                if step.start > position or known is None or known.doubt or node not in (known.id, *known.was):
                    return False
                position = step.end
        return position >= end

    # --- backups -------------------------------------------------------------------------------------

    def _parts(self, number: int, start: int, end: int) -> list[Node]:
        """What has become of a node's ``[start, end)``: itself, and what was split off from it since."""
        whole = self._nodes.get(number)
        if whole is None:
            return []
        if whole.start <= start:
            return [whole]
        parts = [n for n in self._nodes.values() if n.id == number or number in n.was]
        return sorted((n for n in parts if start <= n.start and n.end <= end), key=lambda n: n.start)

    def born(self, number: int, start: int, end: int) -> tuple[Birth, ...] | None:
        """What put ``[start, end)`` of a node into L1, part by part; None unless all of it is there, and it is known.

        Not what is there by a load-back: its tokens were born before.
        """
        found: list[Birth] = []
        position = start
        for part in self._parts(number, start, end):
            if part.start > position or part.resident is None or part.load is not None or part.chain is None:
                return None
            found.append(Birth(part.start, part.end, part.chain.rid, part.computed, part.resident, part.chain.since))
            position = part.end
        return tuple(found) if position >= end else None

    def backing(self, number: int, start: int, end: int, change: int) -> None:
        """One copy more, or one less, of a node's ``[start, end)`` to the host is under way."""
        for part in self._parts(number, start, end):
            part.backing = max(part.backing + change, 0)

    def is_backing(self, number: int) -> bool:
        """Whether a copy of a node to the host is under way: SGLang does not let it leave L1 until it is complete."""
        node = self._nodes.get(number)
        return node is not None and node.backing > 0

    # --- evictions -----------------------------------------------------------------------------------

    def evicted(self, number: int, start: int, end: int, how: int, call: int, moment: Moment) -> str | None:
        """A node left L1. Returns the request whose prefix it held, if known."""
        node = self._nodes.get(number)
        if node is None:
            if number < 0 or start < 0:
                return None
            node = self._place(Node(number, start, end, None, known=False))
        elif node.start != start and node.end == end and start >= 0:
            self._move_start(node, start)
        self._looks += 1
        node.seen = self._looks
        if how in (Eviction.STAGED, Eviction.KEPT):
            return node.chain.rid if node.chain else None
        self._close_node(node, moment)
        node.evicted, node.evicted_how, node.evicted_call = moment, how, call
        return node.chain.rid if node.chain else None

    def _close_node(self, node: Node, until: Moment | None) -> None:
        if node.resident is None:
            node.load = None
            return
        self._close(self._residency(node, node.resident, until))
        node.resident = node.resident_by = node.load = node.computed = None

    def _residency(self, node: Node, since: Moment, until: Moment | None) -> Residency:
        return Residency(
            tier="L1",
            epoch=self._epoch,
            owner=node.chain.rid if node.chain else None,
            node=node.id,
            start=node.start,
            end=node.end,
            since=since,
            until=until,
            computed=node.computed,
            owner_since=node.chain.since if node.chain else 0,
        )

    def open(self) -> list[Residency]:
        """What is in L1 now."""
        return [self._residency(node, node.resident, None) for node in self._nodes.values() if node.resident]

    def finish(self, until: Moment) -> None:
        """The epoch ended with a reset: close what is open."""
        for node in self._nodes.values():
            self._close_node(node, until)
        self._nodes.clear()
        self._beginnings.clear()
        self._doubtful.clear()
        self._loading.clear()

    # --- questions -----------------------------------------------------------------------------------

    def get(self, number: int) -> Node | None:
        """What is known of a node."""
        return self._nodes.get(number)

    def elsewhere(self, number: int, start: int, end: int) -> bool:
        """Whether a known node cannot have these positions: a split takes from its start, its end stays."""
        node = self._nodes.get(number)
        return node is not None and start >= 0 and (end != node.end or start < node.start)

    def owners(self) -> set[str]:
        """Whose prefixes the nodes are known by."""
        return {chain.rid for chain in self.chains()}

    def chains(self) -> Iterable[Chain]:
        """The sequences that the nodes are known by."""
        return (node.chain for node in self._nodes.values() if node.chain is not None)

    def loads(self) -> set[int]:
        """The load-backs that brought what is in L1, or are bringing it."""
        return {node.load for node in self._nodes.values() if node.load is not None}

    def owner(self, number: int) -> Chain | None:
        """The sequence whose prefix a node is known to hold."""
        node = self._nodes.get(number)
        return node.chain if node is not None else None

    def holds(self, number: int) -> tuple[str | None, int, int]:
        """Whose prefix a node holds, and which positions of it; None and -1 for what is not known."""
        node = self._nodes.get(number)
        if node is None:
            return None, -1, -1
        return (node.chain.rid if node.chain is not None else None), node.start, node.end

    def matched(self, path: Path, chain: Chain | None) -> tuple[MatchedNode, ...]:
        """What is known right now of a path that was taken in."""
        grid = chain.grid if chain is not None else 0
        found = []
        for step in path:
            node = self._nodes[step.node]
            shared = shared_prefix(chain, node.chain, step.end)
            found.append(
                MatchedNode(
                    node=step.node,
                    start=step.start,
                    end=step.end,
                    on_device=bool(step.on_device),
                    resident=node.resident,
                    resident_by=node.resident_by,
                    load=node.load,
                    evicted=node.evicted,
                    evicted_how=node.evicted_how,
                    evicted_call=node.evicted_call,
                    owner=node.chain.rid if node.chain else None,
                    same_prefix=same_prefix(shared, step.end, grid),
                    known=node.known and not node.doubt,
                    computed=node.computed,
                    doubt=node.doubt,
                    owner_since=node.chain.since if node.chain else 0,
                )
            )
        return tuple(found)

    # --- records without an end ----------------------------------------------------------------------

    def forget(self, held: set[int]) -> None:
        """Drop the nodes that were not seen since the last call, are not in L1, and of which L2 holds nothing.

        ``held``: the nodes that L2's copies were made of.
        """
        unplaced = -1 in held
        for node in list(self._nodes.values()):
            if node.seen > self._looked or node.in_l1 or node.backing:
                continue
            if unplaced or node.id in held or not node.was.isdisjoint(held):
                continue
            del self._nodes[node.id]
            self._forgotten.add(node.id)
            self._beginnings.drop(node.id)
            self._doubtful.discard(node.id)
        self._looked = self._looks
        self._forgotten.compact()
