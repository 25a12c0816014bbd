"""From which prefix length does a read from L2 pay? From a sweep's times, with a bootstrap interval. Pure functions.

At each length stands the difference between the medians of the L2 reads and of the cold requests; between two lengths
it is taken to run straight. The break-even is where it becomes negative for good.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
from scipy import stats

from kvwitness.tracer.bundle.reports import report_of
from kvwitness.tracer.model import Grade, RequestVerdict, Tier
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.report.statistics import (
    CONFIDENCE,
    FEWEST,
    RESAMPLES,
    SEED,
    Contrast,
    Summary,
    contrast,
    summarize,
)

COLD: Final = "cold"
L1: Final = "L1"
L2: Final = "L2"
PATHS: Final = (COLD, L1, L2)
_EXPECTED: Final = {"A": (COLD, Tier.RECOMPUTED), "B": (L1, Tier.L1), "C": (L2, Tier.L2)}
_SEEN: Final = (Grade.CONFIRMED, Grade.VERIFIED, Grade.RECOMPUTED)
_NEVER_FACTOR: Final = 16.0
"""A resample in which L2 never pays counts as this many times the longest length, so that quantiles stay numbers."""


class Standing(StrEnum):
    """The answer."""

    FROM = "from"
    ALWAYS = "always"
    """At every length that was measured."""
    NEVER = "never"
    NOT_SHOWN = "not_shown"
    """Too few requests, or a difference at the longest length whose interval holds zero."""


class Point(msgspec.Struct, frozen=True):
    """One length: the times of each path, None where it has none, and how much later L2 is than cold."""

    length: int
    cold: Summary | None
    l1: Summary | None
    l2: Summary | None
    difference: Contrast | None


class BreakEven(msgspec.Struct, frozen=True):
    """The answer, and the numbers it rests on. Lengths in tokens."""

    standing: Standing
    points: tuple[Point, ...]
    length: int | None = None
    low: int | None = None
    """Lower end of the interval; None: at or below the shortest length, or no interval."""
    high: int | None = None
    """Upper end; None: open, or no interval."""
    interval: bool = False
    unproven: int = 0
    """Of the times that were used: those for which only the server's own answer says where the tokens came from."""
    other: int = 0
    """Requests that were not used: they went another way than their series is for."""

    @property
    def shortest(self) -> int:
        return self.points[0].length

    @property
    def longest(self) -> int:
        return self.points[-1].length


def breakeven_of(records: Iterable[RequestRecord], latest: Mapping[str, RequestVerdict]) -> BreakEven | None:
    """Work out the break-even of a sweep; None when the records are of no sweep (one length, or none)."""
    times: dict[int, dict[str, list[float]]] = {}
    unproven = other = 0
    for record in records:
        if record.series not in _EXPECTED or record.prefix_tokens is None or record.error or record.ttft_s is None:
            continue
        path, tier = _EXPECTED[record.series]
        went, seen = _way(record, latest.get(record.rid))
        own = times.setdefault(record.prefix_tokens, {})
        if went is not tier:
            other += 1
            continue
        unproven += not seen
        own.setdefault(path, []).append(record.ttft_s * 1e3)
    if len(times) < 2:
        return None
    points = tuple(_point(length, times[length]) for length in sorted(times))
    return msgspec.structs.replace(_answer(points), unproven=unproven, other=other)


def _way(record: RequestRecord, verdict: RequestVerdict | None) -> tuple[Tier, bool]:
    """Where a request's tokens came from, and whether that was seen and not only said."""
    if verdict is not None:
        return verdict.tier, verdict.grade in _SEEN
    report = report_of(record)
    if report is None or report.cached is None:
        return Tier.UNKNOWN, False
    if report.host:
        return Tier.L2, False
    return (Tier.L1 if report.device else Tier.RECOMPUTED if report.cached == 0 else Tier.UNKNOWN), False


def _point(length: int, times: Mapping[str, Sequence[float]]) -> Point:
    cold, l1, l2 = (summarize(path, times[path]) if times.get(path) else None for path in PATHS)
    return Point(length, cold, l1, l2, contrast(l2, cold) if l2 is not None and cold is not None else None)


def _answer(points: tuple[Point, ...]) -> BreakEven:
    used = [point for point in points if point.difference is not None]
    if len(used) < 2:
        return BreakEven(Standing.NOT_SHOWN, points)
    lengths = np.array([point.length for point in used], dtype=float)
    differences = np.array([point.difference.difference for point in used if point.difference is not None])
    crossing = float(_crossing(lengths, differences))
    last = used[-1].difference
    enough = all(min(p.cold.count, p.l2.count) >= FEWEST for p in used if p.cold is not None and p.l2 is not None)
    if last is None or last.interval is None or last.interval.spans_zero:
        return BreakEven(Standing.NOT_SHOWN, points)
    if crossing > lengths[-1]:
        return BreakEven(Standing.NEVER, points)
    standing = Standing.ALWAYS if crossing <= lengths[0] else Standing.FROM
    length = round(crossing)
    if not enough:
        return BreakEven(standing, points, length)
    low, high = _interval(lengths, used)
    return BreakEven(
        standing,
        points,
        length,
        round(low) if low > lengths[0] else None,
        round(high) if high <= lengths[-1] else None,
        True,
    )


def _crossing(lengths: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """Where the differences (last axis: lengths) become negative for good; far beyond the end when they do not."""
    far = lengths[-1] * _NEVER_FACTOR
    found = np.full(differences.shape[:-1], lengths[0])
    for index in range(len(lengths)):
        here = differences[..., index]
        if index + 1 == len(lengths):
            found = np.where(here >= 0, far, found)
            continue
        after = differences[..., index + 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            place = lengths[index] + (lengths[index + 1] - lengths[index]) * here / (here - after)
        found = np.where((here >= 0) & (after < 0), place, found)
    return found


def _interval(lengths: np.ndarray, used: Sequence[Point]) -> tuple[float, float]:
    samples: list[np.ndarray] = []
    for point in used:
        if point.cold is not None and point.l2 is not None:
            samples += [np.asarray(point.cold.samples), np.asarray(point.l2.samples)]

    def statistic(*drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        medians = [np.median(one, axis=axis) for one in drawn]
        differences = np.stack([l2 - cold for cold, l2 in zip(medians[::2], medians[1::2], strict=True)], axis=-1)
        return _crossing(lengths, differences)

    with warnings.catch_warnings():
        # All resamples may agree, which scipy calls a degenerate distribution: the interval is then one point.
        warnings.simplefilter("ignore")
        distribution = stats.bootstrap(
            samples,
            statistic,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="percentile",
            vectorized=True,
            rng=np.random.default_rng(SEED),
        ).bootstrap_distribution
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(distribution, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)
