"""Product and oracle on the same recording: where do they differ?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import msgspec
from journal_tools import journal_of

from kvwitness.collectors.journal import Gap, Journal
from kvwitness.patches.schema.events import Closed, Event
from kvwitness.tracer.judgement import SCHEDULER_ROLE, judge
from kvwitness.tracer.model import Grade, RangeVerdict, Reason, RequestVerdict, Tier
from soundness.oracle import Oracle, Recorded
from soundness.things import Stay

CLAIMED = (Grade.CONFIRMED, Grade.VERIFIED)
ORACLE_TIERS = (Tier.L1, Tier.L2, Tier.L3)


@dataclass(frozen=True)
class Difference:
    """A range on which they differ. ``why``: the oracle's refusal, or what the product misses."""

    rid: str
    tier: str
    start: int
    end: int
    why: str

    def __str__(self) -> str:
        return f"{self.rid[:8]} {self.tier} [{self.start}, {self.end}): {self.why}"


@dataclass(frozen=True)
class Outcome:
    """All differences on one journal, and how many ranges were claimed and agreed on."""

    false: tuple[Difference, ...]
    missed: tuple[Difference, ...]
    agreed: int


@cache
def _nothing() -> Journal:
    return journal_of(())


def journal_as_read(events: Sequence[Event]) -> Journal:
    """What the reader makes of these events. In order, without a file in between: that is what costs most."""
    ordered = all(a.seq < b.seq and a.t_ns <= b.t_ns for a, b in pairwise(events))
    if not ordered or not events or events[0].seq < 1:
        return journal_of(events)
    gaps: list[Gap] = []
    expected = 1
    for event in events:
        if event.seq > expected:
            gaps.append(Gap(expected, event.seq - 1, "records missing"))
        expected = event.seq + 1
    empty = _nothing()
    closed = isinstance(events[-1], Closed)
    return msgspec.structs.replace(empty, events=tuple(events), gaps=tuple(gaps), closed=closed)


def compare(events: Sequence[Event]) -> Outcome:
    """Judge events as one thread wrote them, in this order."""
    return _compare(Oracle.of(events), [journal_as_read(events)])


def compare_recording(journals: Sequence[Journal]) -> Outcome:
    """Judge the journals of a recording together: ranks of one server, or several servers."""
    schedulers = [journal for journal in journals if journal.role == SCHEDULER_ROLE]
    oracle = Oracle([Recorded([j.events], j.instance, j.wall_ns) for j in schedulers])
    return _compare(oracle, journals)


def _compare(oracle: Oracle, journals: Sequence[Journal]) -> Outcome:
    by_queue: dict[tuple[str, int], list[Stay]] = {}
    for each in oracle.attempts():
        by_queue.setdefault((each.use.rid, each.queued.t_ns), []).append(each)
    false: list[Difference] = []
    missed: list[Difference] = []
    agreed = 0
    for verdict in judge(journals).verdicts:
        known = by_queue.get((verdict.rid, verdict.queued_ns or 0))
        stay: Stay | None = known.pop(0) if known else None
        for r in verdict.ranges:
            if r.tier not in ORACLE_TIERS:
                continue
            why = (
                "the oracle knows no such request"
                if stay is None
                else oracle.refusal(stay, r.tier.value, r.start, r.end)
            )
            corrupted = r.reason is Reason.CORRUPTION_SUSPECTED and r.grade is Grade.REFUTED
            if why is None and stay is not None and r.grade is Grade.VERIFIED:
                why = oracle.unequal(stay, r.start, r.end, r.pages_compared)
            elif stay is not None and corrupted:
                why = why or oracle.intact(stay, r.start, r.end)
                if why is not None:
                    false.append(_difference(verdict, r, f"called corrupted: {why}"))
                continue
            if r.grade in CLAIMED and why is not None:
                false.append(_difference(verdict, r, why))
            elif r.grade in CLAIMED:
                agreed += 1
            elif why is None:
                missed.append(_difference(verdict, r, _missing(r)))
    return Outcome(tuple(false), tuple(missed), agreed)


def _missing(r: RangeVerdict) -> str:
    """Which links the product misses, and why the first one of them, without what is particular to the journal."""
    links = ", ".join(sorted({link.link.value for link in r.missing}))
    why = (r.missing[0].detail if r.missing else r.detail).split("; ")[0]
    why = re.sub(r"\brequest-?\S*", "request", re.sub("(?<![0-9L])[0-9]+", "N", why))
    return f"{links}: {why}"


def _difference(verdict: RequestVerdict, r: RangeVerdict, why: str) -> Difference:
    return Difference(verdict.rid, r.tier.value, r.start, r.end, why)
