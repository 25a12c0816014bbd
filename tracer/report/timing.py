"""Times to the first token by series, and what the number of requests lets one say about them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.report.messages import Words
from kvwitness.tracer.report.statistics import (
    FEWEST,
    FEWEST_FOR_P90,
    FEWEST_FOR_P99,
    RESAMPLES,
    SEED,
    Contrast,
    Summary,
    contrast,
    samples_of,
    summarize,
)

_ORDER: Final = ("warmup", "A", "B", "evict", "C")
_COMPARED: Final = (("B", "A"), ("C", "A"), ("C", "B"))


class Timing(msgspec.Struct, frozen=True):
    """The section about times. ``notes`` say what could not be said."""

    summaries: tuple[Summary, ...]
    contrasts: tuple[Contrast, ...]
    notes: tuple[str, ...]


def timing_of(records: Sequence[RequestRecord], words: Words, *, comparable: bool, by_length: bool = False) -> Timing:
    """Describe each series and compare A, B and C, unless the server's settings changed between them.

    With ``by_length`` the series hold several prefix lengths, which say nothing when thrown together.
    """
    if by_length:
        return Timing((), (), (words("timing.by_length"),))
    samples = samples_of(records)
    ordered = sorted(samples, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    summaries = {name: summarize(name, samples[name]) for name in ordered}
    contrasts: tuple[Contrast, ...] = ()
    if comparable:
        pairs = [(one, other) for one, other in _COMPARED if one in summaries and other in summaries]
        contrasts = tuple(contrast(summaries[one], summaries[other]) for one, other in pairs)
    failed = sum(record.error is not None for record in records)
    return Timing(
        tuple(summaries.values()), contrasts, tuple(_notes(tuple(summaries.values()), failed, words, comparable))
    )


def _notes(summaries: Sequence[Summary], failed: int, words: Words, comparable: bool) -> Iterator[str]:
    if not summaries:
        yield words("timing.none")
        return
    if not comparable:
        yield words("timing.refused")
    few = [one.series for one in summaries if one.count < FEWEST]
    if all(one.count == 1 for one in summaries):
        yield words("timing.one")
    elif few:
        yield words("timing.too_few", fewest=FEWEST, series=", ".join(few))
    if any(one.p99 is None for one in summaries):
        yield words("timing.p90_needs", p90=FEWEST_FOR_P90, p99=FEWEST_FOR_P99)
    if any(one.interval for one in summaries):
        yield words("timing.method", resamples=RESAMPLES, seed=SEED)
    if failed:
        yield words("timing.failed", count=failed)
