"""The relation between a block (one page of tokens of a prefix) and what put it into L1 or took it out of there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from kvwitness.patches.schema import events as ev
from soundness.relations import Relations
from soundness.stay_rules import match_of
from soundness.things import Copy, Found, Sighting, Stay, Use, agree


@dataclass(eq=False)
class Move:
    """Something that put a block into L1 (``there``) or took it out."""

    seq: int
    there: bool
    how: int = 0
    """How it left L1; 0: not known for this block."""
    insert: ev.Inserted | None = None
    use: Use | None = None
    load: Copy | None = None
    found: Found | None = None


@dataclass(eq=False)
class Birth:
    """The pass that computed a block, or behind which its tokens were generated."""

    stay: Stay
    launched: ev.Prefill
    done: ev.PrefillDone | None

    @property
    def events(self) -> list[ev.Event]:
        return [self.launched, *([self.done] if self.done is not None else [])]


@dataclass(eq=False)
class Block:
    """Tokens ``[low, high)`` of a prefix, as a match found them: at most one page."""

    r: Relations
    use: Use
    match: ev.Matched
    low: int
    high: int
    _held: dict[tuple[int, int], bool | None] = field(default_factory=dict)

    @cached_property
    def epoch(self) -> int:
        return self.r.epoch(self.match.seq)

    @cached_property
    def step(self) -> ev.PathNode | None:
        """The node of the matched path that holds it."""
        return next((s for s in self.match.path if s.start <= self.low and self.high <= s.end), None)

    @cached_property
    def lineage(self) -> list[int]:
        """That node, and what it was split off from."""
        return self.r.lineage(self.epoch, self.step.node) if self.step is not None else []

    @cached_property
    def alike(self) -> list[Use]:
        """Who begins with the same tokens, by the digests, but for less than a cell."""
        return [use for use in self.r.alike(self.use, self.high) if agree(use, self.use, self.high) is not False]

    def seen(self, node: int, until: int) -> list[Sighting]:
        return [s for s in self.r.sightings.get((self.epoch, node), ()) if s.seq <= until]

    def is_held_by(self, node: int, until: int = 0) -> bool | None:
        """Does a node hold this block? None: nothing recorded says so."""
        if self.step is not None and (node == self.step.node or node in self.lineage):
            return True
        key = node, max(until, self.match.seq)
        if key not in self._held:
            answers = {agree(s.use, self.use, self.high) for s in self.seen(*key)}
            self._held[key] = False if False in answers else True if True in answers else None
        return self._held[key]

    def beside(self, node: int, seq: int) -> bool:
        """Was the node that holds the block there beside ``node`` at event ``seq``? Then they are two blocks."""
        if self.step is None or node in self.lineage or any(s.node == node for s in self.match.path):
            return False
        return any(
            s.seq < seq and s.step.start <= self.low < s.step.end
            for holder in self.lineage
            for s in self.r.sightings.get((self.epoch, holder), ())
        )

    @cached_property
    def moves(self) -> list[Move]:
        """Everything that put it into L1 or took it out, in order."""
        found = [*self._inserted(), *self._left(), *self._loaded(), *self._was_found()]
        return sorted(found, key=lambda move: move.seq)

    def _inserted(self) -> Iterator[Move]:
        for use in self.alike:
            for insert in use.inserts:
                if self.r.epoch(insert.seq) != self.epoch:
                    continue
                step = next((s for s in insert.path if s.start <= self.low and self.high <= s.end), None)
                if step is None or self.beside(step.node, insert.seq):
                    continue
                if self.is_held_by(step.node) or agree(use, self.use, self.high):
                    yield Move(insert.seq, bool(step.on_device), insert=insert, use=use)

    def _left(self) -> Iterator[Move]:
        told: dict[int, ev.EvictedL1] = {}
        nodes = {s.node for use in self.alike for _, s in use.steps if s.start < self.high and self.low < s.end}
        nodes |= {there.event.node for there in self.r.found if there.use in self.alike}
        for node in {*nodes, *self.lineage}:
            for gone in self.r.evicted_by_node.get((self.epoch, node), ()):
                told[gone.seq] = gone
        after = bisect_right(self.r.doubtful, self.match.seq, key=lambda e: e.seq)
        for gone in self.r.doubtful[after:]:
            if self.r.epoch(gone.seq) == self.epoch:
                told[gone.seq] = gone
        for gone in told.values():
            seen = self.seen(gone.node, max(self.match.seq, gone.seq))
            if not seen and gone.seq < self.match.seq:
                continue  # No path led through it, the matched one neither: a split leaves both parts on the path.
            known = gone.start >= 0 and gone.end > gone.start
            low = gone.start if known else min((s.step.start for s in seen), default=0)
            high = gone.end if known else max((s.step.end for s in seen), default=self.high)
            if not (low < self.high and self.low < high):
                continue
            if seen and self.beside(gone.node, gone.seq):
                continue
            if self.is_held_by(gone.node, gone.seq) is not False:
                whole = seen and low <= self.low and self.high <= high
                yield Move(gone.seq, False, how=gone.how if whole else 0)

    def _loaded(self) -> Iterator[Move]:
        for use in self.alike:
            for copy in (c for stay in use.stays for c in stay.loads):
                load = copy.queued
                if self.r.epoch(load.seq) != self.epoch or not (load.start <= self.low and self.high <= load.end):
                    continue
                match = match_of(copy.stay, load.seq) if copy.stay is not None else None
                path = match.path if match is not None else ()
                node = next((s.node for s in path if s.start <= self.low and self.high <= s.end), None)
                if node is not None and self.beside(node, load.seq):
                    continue
                if node is None or self.is_held_by(node) is not False:
                    yield Move(load.seq, True, load=copy, use=use)

    def _was_found(self) -> Iterator[Move]:
        for there in self.r.found:
            event = there.event
            if not self.was(there) or self.beside(event.node, event.seq):
                continue
            if event.l1 == ev.AtAttach.RESIDENT:
                yield Move(event.seq, True, found=there)
            elif event.l1 == ev.AtAttach.ABSENT:
                usable = event.l2 == ev.AtAttach.RESIDENT
                yield Move(event.seq, False, how=ev.Eviction.DEMOTED if usable else 0, found=there)

    def was(self, there: Found) -> bool:
        """Is a node that was found at attach a holder of this block, by its digests and by the path?"""
        event = there.event
        if there.wrong or self.r.epoch(event.seq) != self.epoch or not event.start <= self.low < self.high <= event.end:
            return False
        return there.use in self.alike and bool(self.is_held_by(event.node))

    def born(self, use: Use, before: int, everywhere: bool = False) -> Birth | None:
        """The last pass before event ``before`` in which ``use`` itself computed the block, or generated it behind, in
        this epoch or in any."""
        best: Birth | None = None
        for stay in use.stays:
            for launched in stay.of(ev.Prefill):
                if launched.seq >= before or launched.start > self.low:
                    continue
                if not everywhere and self.r.epoch(launched.seq) != self.epoch:
                    continue
                if self.high <= launched.end:
                    best = Birth(stay, launched, None)
                elif launched.last and (done := self._generated(stay, launched, before)):
                    best = Birth(stay, launched, done)
        return best

    def _generated(self, stay: Stay, last: ev.Prefill, before: int) -> ev.PrefillDone | None:
        """Decoding leaves no events of its own, but the number of tokens that a request is released with."""
        released = stay.released
        if released is None or self.high > stay.queued.prompt_tokens + released.output_tokens:
            return None
        done = [e for e in stay.of(ev.PrefillDone) if e.batch == last.batch and last.seq < e.seq < before]
        return done[0] if done and done[0].output_tokens else None
