"""What claims are about: a request that was served, a page of it, what put it into L1, what a load-back read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from kvwitness.patches.schema import events as ev
from soundness.blocks import Block, Move
from soundness.relations import Relations
from soundness.rules import Refusal
from soundness.stay_rules import admission_of, doubts, loaded, match_of
from soundness.things import Copy, Fetch, Found, Stay, Touch


@dataclass(eq=False)
class Served:
    """One stay of a request, as the subject of claims."""

    r: Relations
    stay: Stay

    @cached_property
    def admission(self) -> ev.Admission | None:
        return admission_of(self.stay)

    @cached_property
    def match(self) -> ev.Matched | None:
        return match_of(self.stay, self.admission.seq) if self.admission is not None else None

    @cached_property
    def passes(self) -> list[ev.Prefill]:
        return self.stay.of(ev.Prefill)

    @cached_property
    def dones(self) -> list[ev.PrefillDone]:
        return self.stay.of(ev.PrefillDone)

    @cached_property
    def doubts(self) -> list[tuple[int, str, str]]:
        return doubts(self.stay)

    @property
    def processed(self) -> int:
        """When the result of the last pass was processed."""
        return self.dones[-1].seq

    @cached_property
    def loaded(self) -> int:
        assert self.match is not None and self.admission is not None
        return loaded(self.stay, self.match, self.admission)


@dataclass(eq=False)
class Page:
    """One page of a claim."""

    served: Served
    tier: str
    block: Block
    memory: dict[int, Served]
    """What is known of other stays."""

    @property
    def r(self) -> Relations:
        return self.served.r

    @property
    def match(self) -> ev.Matched:
        return self.block.match

    @property
    def low(self) -> int:
        return self.block.low

    @property
    def high(self) -> int:
        return self.block.high

    @cached_property
    def load(self) -> Copy | None:
        """The one load-back of it for the request."""
        assert self.served.admission is not None
        mine = [
            c
            for c in self.served.stay.loads
            if self.match.seq < c.queued.seq < self.served.admission.seq
            and c.queued.start < self.high
            and self.low < c.queued.end
        ]
        return mine[0] if len(mine) == 1 else None

    @cached_property
    def shared(self) -> Copy | None:
        """The load-back for another request that brought it: the last thing that put it into L1 before the match."""
        moves = [m for m in self.block.moves if m.seq < self.match.seq]
        for move in reversed(moves):
            if not move.there:
                return None
            if move.load is not None:
                return move.load if move.load.stay is not self.served.stay else None
        return None

    @cached_property
    def reading(self) -> Reading:
        load = self.load if self.load is not None else self.shared
        assert load is not None
        by = self.match.seq if load is self.load else load.queued.seq
        return Reading(self.r, self.block, load, by, self.memory)

    @cached_property
    def origin(self) -> Origin:
        return Origin(self.r, self.block, self.match.seq, self.memory)

    @cached_property
    def chain(self) -> list[ev.Event]:
        """The events that the claim rests on."""
        served = self.served
        assert served.admission is not None
        events: list[ev.Event] = [self.match, served.admission, *served.passes, *served.dones]
        if self.tier == "L1":
            return events + self.origin.chain
        events += self.reading.chain
        out = self.left
        if out is not None and self.tier == "L2":
            events += [e for e in self.r.of(ev.EvictedL1) if e.seq == out.seq]
            events += [out.found.event] if out.found is not None else []
        return events

    @cached_property
    def left(self) -> Move | None:
        """How it had left L1, when it had: the last move before the match (or before the shared load-back)."""
        before = self.match.seq if self.load is not None else self.reading.load.queued.seq
        moves = [m for m in self.block.moves if m.seq < before]
        return moves[-1] if moves and not moves[-1].there else None


@dataclass(eq=False)
class Reading:
    """A load-back's reading of the host page of a block. What it read has to have been there by event ``by``."""

    r: Relations
    block: Block
    load: Copy
    by: int
    memory: dict[int, Served]
    depth: int = 0
    chain: list[ev.Event] = field(default_factory=list)

    @cached_property
    def number(self) -> int | None:
        """The host page."""
        return self.load.page_of(self.block.low, self.r.page)

    @cached_property
    def touches(self) -> list[Touch]:
        """What happened to it until the read had ended."""
        assert self.load.ended is not None
        told = self.r.host.get(self.number, ()) if self.number is not None else ()
        return [t for t in told if t.seq < self.load.ended.seq]

    @cached_property
    def filled(self) -> Touch | None:
        """The last writing of it; where nothing was written, what was found in it at attach."""
        written = [t for t in self.touches if t.what != "found"]
        last = written[-1] if written else self.touches[-1] if self.touches else None
        return last if last is not None and last.source is not None else None

    @cached_property
    def taken(self) -> Touch | None:
        """Its allocation for that writing."""
        written = [t for t in self.touches if t.what != "found"]
        return written[-2] if len(written) > 1 and written[-2].what == "alloc" else None

    @property
    def source(self) -> Copy | Fetch | Found | None:
        """Who filled it last."""
        return self.filled.source if self.filled is not None else None

    @property
    def usable(self) -> int:
        """Since when it could be read."""
        match self.source:
            case Copy(acks=[ack, *_]):
                return ack.seq
            case Fetch(done=done):
                return done.seq
            case Found(event=event):
                return event.seq
        return self.by

    @property
    def backup(self) -> Copy:
        assert isinstance(self.source, Copy)
        return self.source

    @property
    def fetch(self) -> Fetch:
        assert isinstance(self.source, Fetch)
        return self.source

    @property
    def found(self) -> Found:
        assert isinstance(self.source, Found)
        return self.source


@dataclass(eq=False)
class Origin:
    """What put a block into L1 so that it was there at event ``at``."""

    r: Relations
    block: Block
    at: int
    memory: dict[int, Served]
    depth: int = 0
    carried: bool = False
    """Also by the insert that event ``at`` is a part of."""
    load: Copy | None = None
    """The load-back that it was, when it was one."""
    chain: list[ev.Event] = field(default_factory=list)

    @cached_property
    def moves(self) -> list[Move]:
        """The moves until then, the last one first."""
        before = [m for m in self.block.moves if m.seq < self.at]
        later = [m for m in self.block.moves if m.seq > self.at]
        if self.carried and later and (insert := later[0].insert) is not None and later[0].use is not None:
            birth = self.block.born(later[0].use, self.at)
            stay = self.r.stay_of.get(insert.seq)
            ended = birth is not None and birth.stay.released is not None and birth.stay.released.seq < self.at
            if birth is not None and birth.stay is stay and not ended:
                before.append(later[0])
        return before[::-1]


def served(memory: dict[int, Served], r: Relations, stay: Stay) -> Served:
    return memory.setdefault(id(stay), Served(r, stay))


COMPUTES = ("one_id_is_one_request_at_a_time", "digests_fit_pages_and_prompt", "passes_follow_one_another")
LOADS = (*COMPUTES[:2], "a_path_is_a_path", "loads_are_of_what_the_match_promised")
FETCHES = COMPUTES[:2]
"""The rules of a stay that what another request computed, loaded or fetched rests on."""


def in_doubt(memory: dict[int, Served], r: Relations, stay: Stay, until: int, of: tuple[str, ...]) -> Refusal | None:
    """Why a stay's own events say nothing of what it did until event ``until``, by some of the rules."""
    for seq, why, name in served(memory, r, stay).doubts:
        if seq <= until and name in of:
            return Refusal(name, why, (seq,))
    return None
