"""What product and oracle say of a mutant, and whether that differs from what they say of what it was made of."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvwitness.collectors.journal import Journal
from kvwitness.patches.schema.events import Event
from kvwitness.tracer.judgement import judge
from soundness.compare import CLAIMED, ORACLE_TIERS, Outcome, compare, compare_recording, journal_as_read

Journals = Sequence[Sequence[Event]]
Row = tuple[object, ...]
LIMIT_S = 5
"""For one mutant: one that takes longer is a failure of its own."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Broken:
    """Judging a mutant raised, or took too long."""

    where: str
    why: str


class TooLong(BaseException):
    """A mutant took longer than :data:`LIMIT_S`. Nothing that is judged catches it."""


def outcome(journals: Journals) -> Outcome:
    """All differences between product and oracle on one recording."""
    return compare(journals[0]) if len(journals) == 1 else compare_recording(as_read(journals))


def as_read(journals: Journals) -> list[Journal]:
    """The journals of one folder, as the reader gives them."""
    return [
        msgspec.structs.replace(
            journal_as_read(events),
            path=f"scheduler-{number}-{number}.kvwj",
            instance=f"scheduler-{number}-{number}",
            pid=number,
        )
        for number, events in enumerate(journals, start=1)
    ]


def claims(journals: Journals) -> list[str]:
    """What the product claims of a recording, whoever agrees."""
    return [
        f"{verdict.rid[:12]} {r.tier.value} [{r.start}, {r.end})"
        for verdict in judge(as_read(journals)).verdicts
        for r in verdict.ranges
        if r.grade in CLAIMED and r.tier in ORACLE_TIERS
    ]


def verdicts(events: Sequence[Event]) -> tuple[Row, ...]:
    """The verdicts about one journal as rows: what a mutant has to change to have changed anything."""
    return tuple(
        (v.rid, v.attempt, r.start, r.end, r.tier, r.grade, r.reason, tuple(link.link for link in r.missing))
        for v in judge([journal_as_read(events)]).verdicts
        for r in v.ranges
    )


@contextmanager
def limited() -> Iterator[None]:
    """At most :data:`LIMIT_S` for what is inside (in a main thread)."""

    def stop(*_: object) -> None:
        raise TooLong(f"more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def broken(error: BaseException) -> Broken:
    """Where it happened, and what."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = traceback.StackSummary.from_list(f for f in frames if str(ROOT) in f.filename and f.filename != __file__)
    last = frames[-1] if frames else None
    where = f"{Path(last.filename).relative_to(ROOT)}:{last.lineno} {last.name}" if last is not None else "?"
    return Broken(where, f"{type(error).__name__}: {error}"[:160])
