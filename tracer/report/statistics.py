"""Times of series: medians, percentiles, bootstrap intervals, and differences. Seeded, so that a report repeats.

An interval that the number of requests does not carry is left out: the summary says so by having none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np
from scipy import stats

from kvwitness.tracer.protocol.record import RequestRecord

SEED: Final = 20_260_101
RESAMPLES: Final = 9_999
CONFIDENCE: Final = 0.95
FEWEST: Final = 5
"""Requests of a series below which a bootstrap interval would only repeat the few values that there are."""
FEWEST_FOR_P90: Final = 10
FEWEST_FOR_P99: Final = 100


class Interval(msgspec.Struct, frozen=True):
    """From the bootstrap, at :data:`CONFIDENCE`."""

    low: float
    high: float

    @property
    def spans_zero(self) -> bool:
        return self.low <= 0 <= self.high


class Summary(msgspec.Struct, frozen=True):
    """Times to the first token of one series, in ms. None: too few requests for it."""

    series: str
    samples: tuple[float, ...]
    median: float
    interval: Interval | None
    p90: float | None
    p99: float | None

    @property
    def count(self) -> int:
        return len(self.samples)


class Contrast(msgspec.Struct, frozen=True):
    """Median of one series minus median of another, in ms."""

    series: str
    baseline: str
    difference: float
    interval: Interval | None


def samples_of(records: Iterable[RequestRecord]) -> dict[str, tuple[float, ...]]:
    """Times to the first token by series, in ms, in the order sent; failed requests have none."""
    found: dict[str, list[float]] = {}
    for record in sorted(records, key=lambda record: record.order):
        if record.ttft_s is not None and record.error is None:
            found.setdefault(record.series, []).append(record.ttft_s * 1e3)
    return {series: tuple(values) for series, values in found.items()}


def summarize(series: str, samples: Sequence[float]) -> Summary:
    """Describe one series. ``samples`` must not be empty."""
    count = len(samples)
    return Summary(
        series=series,
        samples=tuple(samples),
        median=float(np.median(samples)),
        interval=_median_interval(samples) if count >= FEWEST else None,
        p90=float(np.percentile(samples, 90)) if count >= FEWEST_FOR_P90 else None,
        p99=float(np.percentile(samples, 99)) if count >= FEWEST_FOR_P99 else None,
    )


def contrast(one: Summary, baseline: Summary) -> Contrast:
    """How much later the first token of ``one`` comes than that of ``baseline``."""
    enough = min(one.count, baseline.count) >= FEWEST
    interval = _difference_interval(one.samples, baseline.samples) if enough else None
    return Contrast(one.series, baseline.series, one.median - baseline.median, interval)


def _median_interval(samples: Sequence[float]) -> Interval:
    # The percentile method: the bias correction of BCa has no meaning for a median of few, repeated values.
    found = stats.bootstrap(
        (np.asarray(samples),),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def _difference_interval(one: Sequence[float], other: Sequence[float]) -> Interval:
    found = stats.bootstrap(
        (np.asarray(one), np.asarray(other)),
        _difference_of_medians,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def _difference_of_medians(one: np.ndarray, other: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.asarray(np.median(one, axis=axis) - np.median(other, axis=axis))
