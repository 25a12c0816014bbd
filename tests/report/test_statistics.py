"""Medians, percentiles and intervals: right where they can be known, left out where they cannot, always the same."""

from __future__ import annotations

import numpy as np
import pytest

from kvwitness.tracer.report.messages import words_for
from kvwitness.tracer.report.statistics import FEWEST, contrast, samples_of, summarize
from kvwitness.tracer.report.timing import timing_of

from .runs import record


def test_few_requests_have_no_interval() -> None:
    assert summarize("A", [3.0]).interval is None
    assert summarize("A", [3.0] * (FEWEST - 1)).interval is None
    assert summarize("A", [1.0, 2.0, 3.0, 4.0, 5.0]).interval is not None


def test_percentiles_need_their_number_of_requests() -> None:
    nine, ten, hundred = (summarize("A", range(count)) for count in (9, 10, 100))
    assert (nine.p90, nine.p99) == (None, None)
    assert ten.p90 == pytest.approx(8.1) and ten.p99 is None
    assert hundred.p99 == pytest.approx(98.01)


def test_the_interval_holds_the_median_in_most_experiments() -> None:
    generator = np.random.default_rng(7)
    hits = 0
    for _ in range(60):
        interval = summarize("A", generator.normal(100, 10, 30)).interval
        assert interval is not None
        hits += interval.low <= 100 <= interval.high
    assert hits >= 52


def test_a_difference_and_one_that_is_none() -> None:
    generator = np.random.default_rng(8)
    slow = summarize("A", generator.normal(400, 5, 20))
    fast = summarize("C", generator.normal(50, 5, 20))
    found = contrast(fast, slow)
    assert found.difference == pytest.approx(-350, abs=10)
    assert found.interval is not None and found.interval.high < -330
    same = contrast(summarize("B", generator.normal(400, 5, 20)), slow)
    assert same.interval is not None and same.interval.spans_zero
    assert contrast(fast, summarize("A", [400.0])).interval is None


def test_equal_times_and_the_same_result_each_time() -> None:
    interval = summarize("A", [2.0] * 8).interval
    assert interval is not None and (interval.low, interval.high) == (2.0, 2.0)
    samples = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0]
    assert summarize("A", samples) == summarize("A", samples)


def test_failed_requests_are_not_counted_and_said() -> None:
    records = [record("a", "A", 1), record("b", "A", 2, error="timeout"), record("c", "A", 3, ttft_s=None)]
    assert samples_of(records) == {"A": (400.0,)}
    timing = timing_of(records, words_for("en"), comparable=True)
    assert "Not counted: 1 failed requests." in timing.notes
