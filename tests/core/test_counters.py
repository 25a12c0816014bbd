"""The server's counters as a witness of the same interval."""

from __future__ import annotations

import msgspec
from journal_tools import ABC, described

from kvwitness.collectors.journal import read_journal
from kvwitness.tracer.bundle.counters import window_of
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Link, Tier
from kvwitness.tracer.verdicts.counters import BACKED_UP, EVICTED, LOADED, CounterWindow, check_counters

JOURNAL = read_journal(ABC)
INSTANCES = judge([JOURNAL]).instances
# The fixture's clock is not anchored (monotonic and wall time both from 0).
WHOLE = CounterWindow(0, 2**62, {LOADED: 1488, BACKED_UP: 16 + 5 * 1504 + 16, EVICTED: 1536 + 1504 + 1504 + 1504})


def test_counters_that_say_the_same_agree() -> None:
    checks = check_counters(INSTANCES, WHOLE)
    assert [check.agrees for check in checks] == [True, True, True], checks


def test_only_what_happened_in_the_window_is_compared() -> None:
    empty = CounterWindow(2**61, 2**62, {LOADED: 0, BACKED_UP: 0, EVICTED: 0})
    assert all(check.agrees for check in check_counters(INSTANCES, empty))


def test_a_load_back_that_is_seen_to_end_after_the_reading_may_be_counted_already() -> None:
    """Up to 0.5.8 the server counts when it launches; what the scheduler sees later is the end."""
    (instance,) = INSTANCES
    load = next(load for load in instance.loads if load.tokens == 1488)
    assert load.done is not None
    between = (load.queued.t_ns + load.done.t_ns) // 2
    for counted, agrees in ((0, True), (1488, True), (1489, False)):
        window = CounterWindow(0, instance.wall_time_ns(between), {LOADED: counted})
        (check,) = check_counters(INSTANCES, window)
        assert check.agrees is agrees
        assert check.ours == "0 to 1488 tokens"


def test_a_load_back_counter_that_did_not_move_caps_the_l2_read() -> None:
    verdict = next(
        v
        for v in judge([JOURNAL], counters=msgspec.structs.replace(WHOLE, tokens={LOADED: 0})).verdicts
        if v.tier is Tier.L2
    )
    assert verdict.grade is Grade.REPORTED
    assert Link.WITNESSES_AGREE in {link.link for r in verdict.ranges for link in r.missing}


def test_an_agreeing_counter_leaves_the_grade() -> None:
    verdict = next(v for v in judge([JOURNAL], counters=WHOLE).verdicts if v.tier is Tier.L2)
    assert verdict.grade is Grade.CONFIRMED
    assert any("metrics" in check.witness and check.agrees for check in verdict.checks)


def test_a_counter_summed_over_ranks_is_understood() -> None:
    ranks = {"tp_size": 2, "tp_rank": 0, "pp_size": 1, "pp_rank": 0}
    two = [msgspec.structs.replace(i, facts=described({**i.facts.shown, "ranks": ranks})) for i in INSTANCES]
    (check,) = check_counters(two, msgspec.structs.replace(WHOLE, tokens={LOADED: 2 * 1488}))
    assert check.agrees and "2 ranks" in check.explanation


def _prom(moment_ns: int, loaded: int) -> str:
    return (
        f"# kvwitness read these metrics at {moment_ns} ns since the epoch\n"
        "# TYPE sglang:load_back_tokens_total counter\n"
        f'sglang:load_back_tokens_total{{pool="kv",tp_rank="0"}} {loaded}.0\n'
    )


def test_the_window_comes_from_the_bundles_metrics() -> None:
    window = window_of({"before": _prom(5, 100), "after": _prom(9, 1588)})
    assert window == CounterWindow(5, 9, {LOADED: 1488})


def test_metrics_without_a_moment_or_of_a_restarted_server_are_no_witness() -> None:
    assert window_of({"before": "x 1\n", "after": _prom(9, 1)}) is None
    assert window_of({"after": _prom(9, 1)}) is None
    restarted = window_of({"before": _prom(5, 1588), "after": _prom(9, 100)})
    assert restarted is not None and restarted.tokens == {}
