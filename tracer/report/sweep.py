"""The answer of a sweep in words. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from kvwitness.tracer.report.breakeven import BreakEven, Standing
from kvwitness.tracer.report.messages import Words


def sweep_sentence(found: BreakEven, words: Words) -> str:
    """The answer in one sentence."""
    values = {"shortest": found.shortest, "longest": found.longest, "length": found.length}
    if found.standing is not Standing.FROM or not found.interval:
        return words(f"sweep.{found.standing.value}", **values)
    low = words("sweep.below", length=found.shortest) if found.low is None else str(found.low)
    high = words("sweep.beyond", length=found.longest) if found.high is None else str(found.high)
    return words("sweep.from_interval", low=low, high=high, **values)


def sweep_notes(found: BreakEven, words: Words) -> Iterator[str]:
    """What to know about the answer."""
    if found.standing is Standing.FROM and not found.interval:
        yield words("sweep.no_interval")
    if found.unproven:
        yield words("sweep.unproven", count=found.unproven)
    if found.other:
        yield words("sweep.other", count=found.other)
    yield words("sweep.meaning")
