"""Counters of a real 0.5.23 server (tests/collectors/data), and what two readings of them do and do not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwitness.collectors.metrics import (
    CACHED_TOKENS,
    DROPPED_TOKENS,
    EVICTED_TOKENS,
    HOST_USED_TOKENS,
    LOAD_BACK_BYTES,
    LOAD_BACK_TOKENS,
    ChangeStatus,
    MetricsUnavailable,
    delta,
    fetch_metrics,
    hicache_delta,
    hicache_reading,
    parse_metrics,
)

from .small_server import SmallServer

DATA = Path(__file__).parent / "data"
BEFORE = (DATA / "sglang-0.5.23-before.prom").read_text()
AFTER = (DATA / "sglang-0.5.23-after.prom").read_text()


def counters(**values: float) -> str:
    return "".join(f"# TYPE sglang:{name} counter\nsglang:{name} {value}\n" for name, value in values.items())


def test_the_hicache_series_of_a_real_server() -> None:
    reading = hicache_reading(parse_metrics(AFTER, 1))
    assert reading.cached_tokens == {"device": 2976, "host": 1488}
    assert reading.load_back_tokens == {"kv": 1488}
    assert reading.load_back_bytes == 1523712
    assert reading.backup_tokens == {"kv": 7552}
    assert reading.evicted_tokens == 6048
    assert reading.dropped_tokens == {"host_pressure": 0, "write_through_unbacked_eviction": 0}
    assert (reading.host_used_tokens, reading.host_total_tokens) == (7552, 16400)


def test_what_never_fired_is_absent_and_not_zero() -> None:
    reading = hicache_reading(parse_metrics(BEFORE, 1))
    assert "host" not in reading.cached_tokens
    assert reading.load_back_tokens == {}
    change = hicache_delta(parse_metrics(BEFORE, 1), parse_metrics(BEFORE, 2))
    assert change.never_fired(LOAD_BACK_TOKENS)
    assert change.increase(LOAD_BACK_TOKENS) is None
    # This one the server exports from the start: it is there, and it is zero.
    assert not change.never_fired(DROPPED_TOKENS)
    assert change.increase(DROPPED_TOKENS) == 0


def test_a_series_that_appears_has_counted_all_it_shows() -> None:
    change = hicache_delta(parse_metrics(BEFORE, 1), parse_metrics(AFTER, 2))
    assert change.increase(LOAD_BACK_TOKENS, pool="kv") == 1488
    assert change.increase(CACHED_TOKENS, cache_source="host") == 1488
    assert change.increase(EVICTED_TOKENS) == 6048
    assert not change.reset


def test_a_counter_that_went_down_makes_every_increase_unknown() -> None:
    before = parse_metrics(counters(evicted_tokens_total=100, num_requests_total=9), 1)
    after = parse_metrics(counters(evicted_tokens_total=150, num_requests_total=2, load_back_tokens_total=7), 2)
    change = delta(before, after, [EVICTED_TOKENS, LOAD_BACK_TOKENS])
    assert change.reset
    assert {one.status for one in change.changes} == {ChangeStatus.RESET}
    assert change.increase(EVICTED_TOKENS) is None
    assert change.increase(LOAD_BACK_TOKENS) is None


def test_a_gauge_may_go_down() -> None:
    text = "# TYPE sglang:hicache_host_used_tokens gauge\nsglang:hicache_host_used_tokens {}\n"
    change = delta(parse_metrics(text.format(50), 1), parse_metrics(text.format(20), 2))
    assert not change.reset
    assert change.increase(HOST_USED_TOKENS) == -30


def test_a_series_that_vanished_is_unknown() -> None:
    change = delta(parse_metrics(counters(evicted_tokens_total=1), 1), parse_metrics(counters(other_total=1), 2))
    assert [one.status for one in change.select(EVICTED_TOKENS)] == [ChangeStatus.VANISHED]
    assert change.increase(EVICTED_TOKENS) is None


def test_ranks_of_a_group_report_the_same_tokens_and_their_own_bytes() -> None:
    lines = ["# TYPE sglang:load_back_tokens_total counter", "# TYPE sglang:load_back_bytes_total counter"]
    for dp, tokens in ((0, 100), (1, 40)):
        for tp in (0, 1):
            ranks = f'dp_rank="{dp}",tp_rank="{tp}"'
            lines.insert(1, f'sglang:load_back_tokens_total{{pool="kv",{ranks}}} {tokens}')
            lines.append(f"sglang:load_back_bytes_total{{{ranks}}} {tokens * 10}")
    snapshot = parse_metrics("\n".join([*lines, ""]), 1)
    assert snapshot.value(LOAD_BACK_TOKENS) == 140
    assert snapshot.value(LOAD_BACK_TOKENS, dp_rank="1") == 40
    assert snapshot.value(LOAD_BACK_BYTES) == 2800


def test_the_raw_text_is_kept_as_it_came() -> None:
    with SmallServer({"/metrics": (200, AFTER)}) as server:
        snapshot = fetch_metrics(server.url)
    assert snapshot.raw == AFTER
    assert snapshot.wall_ns > 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "Not Found"), "--enable-metrics"),
        ((500, "boom"), "answered 500"),
        ((200, "<html>{not metrics</html>"), "cannot be parsed"),
    ],
)
def test_no_metrics_is_one_line_that_says_what_to_do(answer: tuple[int, str], words: str) -> None:
    with SmallServer({"/metrics": answer}) as server, pytest.raises(MetricsUnavailable, match=words) as raised:
        fetch_metrics(server.url)
    assert "\n" not in str(raised.value)


def test_no_server_is_one_line_too() -> None:
    with SmallServer({}) as server:
        url = server.url
    with pytest.raises(MetricsUnavailable, match="does not answer"):
        fetch_metrics(url, timeout_s=2)
