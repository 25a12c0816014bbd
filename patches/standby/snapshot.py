"""What is resident when kvwitness is attached: a walk over the tree in slices of bounded time.

The hooks stand before the walk begins, so what changes between two slices is recorded by them. A node is
recorded in the slice in which it was looked at, and what is recorded is true at that moment. A node that is
gone by then is not recorded; one that came since is known by its own events.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator
from typing import Any

from kvwitness.patches.digests import Tip, go_on, grid_for, seed_of
from kvwitness.patches.hooks.nodes import node_number
from kvwitness.patches.schema.events import AtAttach, ResidentDigests, ResidentNode, SnapshotEnd
from kvwitness.patches.standby.trees import Look, Reader
from kvwitness.patches.witness import Witness

_PIECE = 1024
"""Tokens that are digested without a look at the clock."""
_TRIES = 4
"""Looks at a node that changes again and again before it is left out."""
_CHECK_EVERY = 64
"""Numbers without a node between two looks at whether all was found."""


class UnderWay:
    """Nodes of which a copy is under way at this moment: no claim may rest on what the tree says of them."""

    def __init__(self, w: Witness) -> None:
        self._w = w
        self.backups: set[int] = set()
        self.loads: set[int] = set()
        self.any_load = False
        """A load-back whose path is not known: any node may be part of it."""
        for number, entry in w.tree.ongoing_write_through.items():
            self.backups.add(number)
            covered = entry[-1] if isinstance(entry, tuple) and isinstance(entry[-1], list) else None
            # Without a list of what was split off since: that is an ancestor, so all of these are left out.
            self.backups.update(self._above(number, entry) if covered is None else map(node_number, covered))
        # Which part of the path to its anchor a load-back brings is not told.
        for number, entry in w.tree.ongoing_load_back.items():
            path = self._above(number, entry)
            self.any_load = self.any_load or not path
            self.loads.update(path)

    def _above(self, number: int, entry: Any) -> set[int]:
        """A node and its ancestors."""
        node = entry[0] if isinstance(entry, tuple) else entry
        found: set[int] = set()
        while hasattr(node, "parent"):
            found.add(node_number(node))
            node = node.parent
        return found or {step.node for step in self._w.path_of(number)}


class Walk:
    """The snapshot of one tree. :meth:`run` yields wherever a slice may end."""

    def __init__(self, w: Witness, reader: Reader | None) -> None:
        self._w = w
        self._reader = reader
        self._grid = grid_for(w.page_size)
        self._tips: dict[int, Tip] = {}
        self._done: set[int] = set()
        self._under_way: UnderWay | None = None
        self.nodes = self.l1_tokens = self.l2_tokens = 0
        self.slices = 0
        self.complete = False

    def new_slice(self) -> None:
        """Time has passed: what was under way may not be any more."""
        self._under_way = None
        self.slices += 1

    def run(self) -> Iterator[None]:
        if self._reader is not None:
            self.complete = yield from self._all(self._reader)
        self._w.emit(SnapshotEnd, self.nodes, self.l1_tokens, self.l2_tokens, int(self.complete))
        self._tips.clear()

    def _all(self, reader: Reader) -> Generator[None, None, bool]:
        holes = 0
        for handle in reader.nodes():
            if handle is not None:
                yield from self._visit(reader, handle)
            else:
                holes += 1
                if holes % _CHECK_EVERY == 0 and self._all_found(reader):
                    break
            yield
            if not reader.is_current():
                return False
        return True

    def _all_found(self, reader: Reader) -> bool:
        l1, l2 = reader.held()
        return self.l1_tokens >= l1 and self.l2_tokens >= l2

    def _visit(self, reader: Reader, handle: Any) -> Iterator[None]:
        """Record a node and whatever of its path was not recorded yet, from the root on."""
        for _ in range(_TRIES):
            look = reader.look(handle)
            if look is None:
                return
            missing = [i for i, step in enumerate(look.path) if step.node not in self._done]
            if not missing:
                return
            for i in missing:
                recorded = yield from self._record(reader, look.handles[i])
                if not recorded:
                    break  # The path has changed meanwhile: look again.

    def _record(self, reader: Reader, handle: Any) -> Generator[None, None, bool]:
        """Digest a node's tokens, then look at it and record what is seen, without a pause in between."""
        before = reader.look(handle)
        if before is None:
            return False
        tip, first, digests = yield from self._digest(reader, handle, before)
        now = reader.look(handle)
        if now is None or now.path[-1][:3] != before.path[-1][:3] or _parent(now) != _parent(before):
            return False
        step = now.path[-1]
        if digests:
            self._w.emit(ResidentDigests, step.node, self._grid, first, tail=b"".join(digests))
        if tip is not None:
            self._tips[step.node] = tip
        l1, l2, slots = self._where(now)
        self._w.emit(ResidentNode, step.node, _parent(now), step.start, step.end, l1, l2, tail=slots)
        self._done.add(step.node)
        self.nodes += 1
        self.l1_tokens += (step.end - step.start) * bool(step.on_device)
        self.l2_tokens += 0 if now.host is None else len(now.host)
        return True

    def _digest(
        self, reader: Reader, handle: Any, look: Look
    ) -> Generator[None, None, tuple[Tip | None, int, list[bytes]]]:
        """The digests of a node's own cells, continuing its parent's; nothing where either is not known."""
        key, step, parent = reader.key(handle), look.path[-1], _parent(look)
        if key is None or len(key.tokens) != step.end - step.start:
            return None, 0, []
        secret, grid = self._w.digest_key, self._grid
        tip = self._tips.get(parent) if parent >= 0 else Tip(seed_of(secret, key.namespace), 0, array("q"))
        if tip is None or tip.cells * grid + len(tip.rest) != step.start:
            return None, 0, []
        first, digests = tip.cells, list[bytes]()
        for start in range(0, len(key.tokens), _PIECE):
            tip, new = go_on(secret, grid, tip, key.tokens[start : start + _PIECE])
            digests += new
            yield
        return tip, first, digests

    def _where(self, look: Look) -> tuple[int, int, bytes]:
        """In which tiers the node is, and its host slots."""
        under_way = self._under_way
        if under_way is None:
            under_way = self._under_way = UnderWay(self._w)
        step = look.path[-1]
        loading = under_way.any_load or step.node in under_way.loads
        l1 = (AtAttach.UNDER_WAY if loading else AtAttach.RESIDENT) if step.on_device else AtAttach.ABSENT
        if look.host is None:
            return l1, AtAttach.ABSENT, b""
        slots = self._w.slot_runs(look.host)
        if step.node in under_way.backups or not slots or len(look.host) != step.end - step.start:
            return l1, AtAttach.UNDER_WAY, b""
        return l1, AtAttach.RESIDENT, slots


def _parent(look: Look) -> int:
    return look.path[-2].node if len(look.path) > 1 else -1
