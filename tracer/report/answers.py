"""Are the answers right? Errors, ends, references, and whether C answered as A did. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from kvwitness.tracer.protocol.quality import Kind, compare
from kvwitness.tracer.protocol.record import RequestRecord

_ORDER: Final = ("warmup", "A", "B", "evict", "C", "nudge")
_EXAMPLES: Final = 10


class SeriesAnswers(msgspec.Struct, frozen=True):
    """The answers of one series."""

    series: str
    count: int
    errors: int
    finished: tuple[tuple[str, int], ...]
    """Finish reasons and how often."""
    compared: int
    """With a reference."""
    right: int


class WrongAnswer(msgspec.Struct, frozen=True):
    """An answer that is not as its reference says."""

    rid: str
    series: str
    why: str


class Repeats(msgspec.Struct, frozen=True):
    """C beside the A of the same prompt."""

    compared: int
    same: int
    by_text: bool
    """No token ids were answered: the texts were compared."""
    differing: tuple[str, ...] = ()
    """Request ids of C that answered otherwise."""


class Answers(msgspec.Struct, frozen=True):
    """All of it."""

    series: tuple[SeriesAnswers, ...]
    wrong: tuple[WrongAnswer, ...]
    """The first of them."""
    repeats: Repeats

    @property
    def compared(self) -> int:
        return sum(one.compared for one in self.series)

    def wrong_in(self, series: str) -> int:
        return sum(one.compared - one.right for one in self.series if one.series == series)

    def compared_in(self, series: str) -> int:
        return sum(one.compared for one in self.series if one.series == series)


def answers_of(records: Sequence[RequestRecord]) -> Answers:
    """Look at every answer."""
    names = dict.fromkeys(record.series for record in records)
    ordered = sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    wrong = [
        WrongAnswer(record.rid, record.series, why) for record in records if (why := why_wrong(record)) is not None
    ]
    return Answers(
        tuple(_series(name, [record for record in records if record.series == name]) for name in ordered),
        tuple(wrong[:_EXAMPLES]),
        repeats_of(records),
    )


def why_wrong(record: RequestRecord) -> str | None:
    """Why an answer is wrong; None when it is right, or was not compared.

    What can be compared again from the bundle alone is; of the user's own function only the result is kept.
    """
    if record.reference is None or record.error is not None:
        return None
    if record.reference.kind is Kind.CUSTOM:
        return record.wrong or "wrong" if record.correct is False else None
    return compare(record.reference, record.text)


def repeats_of(records: Sequence[RequestRecord]) -> Repeats:
    """Hold each C against the A of the same prompt, token by token where there are tokens."""
    # A's first answer: a second A reuses the prefix as well.
    asked: dict[str, RequestRecord] = {}
    for record in records:
        if record.series == "A" and record.error is None:
            asked.setdefault(record.prompt_sha256, record)
    repeats = [one for one in records if one.series == "C" and one.error is None and one.prompt_sha256 in asked]
    pairs = [(asked[one.prompt_sha256], one) for one in repeats]
    by_ids = [(a.output_ids == c.output_ids, c.rid) for a, c in pairs if a.output_ids and c.output_ids]
    # An endpoint that answers no ids answers none for either.
    by_text = [
        (a.text == c.text, c.rid) for a, c in pairs if not a.output_ids and not c.output_ids and (a.text or c.text)
    ]
    compared = by_ids or by_text
    differing = tuple(rid for same, rid in compared if not same)
    return Repeats(len(compared), len(compared) - len(differing), bool(not by_ids and by_text), differing)


def _series(name: str, records: Sequence[RequestRecord]) -> SeriesAnswers:
    compared = [record for record in records if record.reference is not None and record.error is None]
    reasons = Counter(record.finish_reason or "none" for record in records if record.error is None)
    return SeriesAnswers(
        name,
        len(records),
        sum(record.error is not None for record in records),
        tuple(sorted(reasons.items())),
        len(compared),
        sum(why_wrong(record) is None for record in compared),
    )
