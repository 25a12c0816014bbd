"""A whole run against a server that speaks SGLang's HTTP API."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from kvwitness.tracer.protocol.abc import AbcRun, UnfitServer, run_abc
from kvwitness.tracer.protocol.client import ServerClient, ServerUnavailable
from kvwitness.tracer.protocol.observer import Observer
from kvwitness.tracer.protocol.options import AbcOptions

from .fake_sglang import CacheObserver, FakeSglang, Silent, SteppingClock

QUICK = AbcOptions(prefix_tokens=1500, question_tokens=3, output_tokens=4, warmups=0, seed=7)
OBSERVED = "observed"


def run(server: FakeSglang, options: AbcOptions = QUICK, observer: Observer | str | None = OBSERVED) -> AbcRun:
    watching = CacheObserver(server) if isinstance(observer, str) else observer
    with ServerClient(server.url, timeout_s=10) as client:
        return run_abc(options, client, watching, Silent(), SteppingClock())


def codes(result: AbcRun) -> set[str]:
    return {finding.code for finding in result.findings}


def with_options(**changes: object) -> AbcOptions:
    return AbcOptions(**{**{name: getattr(QUICK, name) for name in QUICK.__struct_fields__}, **changes})


def test_c_asks_exactly_what_a_asked_and_b_shares_only_the_prefix() -> None:
    with FakeSglang() as server:
        result = run(server)
    a, b, c = (result.one(name) for name in "ABC")
    assert result.stopped is None
    assert a is not None and b is not None and c is not None
    assert a.prompt_sha256 == c.prompt_sha256 != b.prompt_sha256
    assert (a.cached_tokens, b.cached_tokens_details) == (0, {"device": 1488, "host": 0})
    assert c.cached_tokens_details == {"device": 0, "host": 1488}
    assert a.output_ids == c.output_ids
    assert [record.series for record in result.records][:2] == ["A", "B"]
    assert result.records[-1] is c


def test_turns_of_one_conversation_go_on_where_the_answer_ended() -> None:
    with FakeSglang() as server:
        result = run(server, with_options(turns=True, keep_prompts=True))
    a, b, c = (result.one(name) for name in "ABC")
    assert a is not None and b is not None and c is not None
    assert b.prompt_tokens == a.prompt_tokens + len(a.output_ids) + QUICK.question_tokens
    assert c.prompt_sha256 == b.prompt_sha256 != a.prompt_sha256


def test_filling_ends_as_soon_as_the_prefix_is_seen_to_have_left_l1() -> None:
    with FakeSglang() as server:
        result = run(server)
    assert result.eviction is not None
    assert result.eviction.decided_by == "observer"
    assert result.eviction.left_l1 is True and result.eviction.left_l2 is False
    # B's prompt keeps L1 half full, so two prompts of 1,503 tokens are not enough to know beforehand.
    assert result.eviction.fills == len(result.series("evict")) < result.eviction.limit


def test_a_larger_pool_takes_more_fills() -> None:
    with FakeSglang(device_tokens=12000, host_tokens=48000) as server:
        result = run(server)
    assert result.eviction is not None and result.eviction.left_l1 is True
    assert result.eviction.fills > 5


def test_a_very_large_pool_is_filled_with_longer_prompts() -> None:
    with FakeSglang(device_tokens=160_000, host_tokens=640_000, info={"max_req_input_len": 8000}) as server:
        result = run(server)
    assert {record.prompt_tokens for record in result.series("evict")} == {8000}
    assert len(result.series("evict")) <= 21
    assert result.eviction is not None and result.eviction.left_l1 is True


def test_without_an_observer_the_fills_follow_the_pool_size_and_the_run_says_so() -> None:
    with FakeSglang() as server:
        result = run(server, observer=None)
    assert result.eviction is not None
    assert (result.eviction.decided_by, result.eviction.left_l1) == ("size", None)
    assert result.eviction.fills * 1503 > 4096
    assert {"no_observer", "fills_by_size"} <= codes(result)
    c = result.one("C")
    assert c is not None and c.cached_tokens_details == {"device": 0, "host": 1488}


def test_a_given_number_of_fills_is_kept_and_its_failure_to_evict_is_told() -> None:
    with FakeSglang(device_tokens=16000, host_tokens=64000) as server:
        result = run(server, with_options(fills=2))
    assert len(result.series("evict")) == 2
    assert {"fits_in_l1", "still_in_l1"} <= codes(result)


def test_evict_host_goes_on_until_the_prefix_has_left_l2() -> None:
    with FakeSglang(host_tokens=6000) as server:
        result = run(server, with_options(evict_host=True))
    c = result.one("C")
    assert c is not None and c.cached_tokens == 0
    assert result.eviction is not None and result.eviction.left_l2 is True
    assert "left_l2_too" not in codes(result)


def test_filling_is_bounded_when_the_prefix_never_leaves() -> None:
    class Stuck(CacheObserver):
        def left_l1(self, rid: str, beyond: int = 0) -> bool | None:
            return False

    with FakeSglang() as server:
        result = run(server, observer=Stuck(server))
    assert result.eviction is not None
    assert result.eviction.fills == result.eviction.limit
    assert "fills_exhausted" in codes(result)
    assert result.one("C") is not None


def test_flush_between_b_and_c_is_recorded_and_c_finds_nothing() -> None:
    with FakeSglang() as server:
        result = run(server, with_options(flush_between_bc=True))
    c = result.one("C")
    assert result.flush is not None and result.flush.ok
    assert c is not None and c.cached_tokens == 0


def test_a_refused_flush_ends_the_run_before_c() -> None:
    with FakeSglang(flush_status=400) as server:
        result = run(server, with_options(flush_between_bc=True))
    assert result.stopped is not None and "not idle" in result.stopped
    assert result.one("C") is None


def test_second_hit_sends_a_twice_before_the_eviction() -> None:
    with FakeSglang() as server:
        result = run(server, with_options(second_hit=True))
    assert [record.series for record in result.records[:3]] == ["A", "A", "B"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("500", "HTTP 500: CUDA out of memory"),
        ("refuse", "refused by the server: Requested token count"),
        ("abort", "aborted by the server: out of memory"),
        ("cut", "the stream ended before the request was finished"),
        ("garbage", "the event stream is damaged"),
    ],
)
def test_a_failed_request_is_recorded_and_ends_the_run_without_raising(fault: str, words: str) -> None:
    with FakeSglang(faults={"B": fault}) as server:
        result = run(server)
    b = result.one("B")
    assert b is not None and b.error is not None and words in b.error
    assert result.stopped is not None and words in result.stopped
    assert result.one("A") is not None and result.one("C") is None
    assert "A" in result.snapshots


def test_a_failed_fill_keeps_what_the_eviction_had_reached() -> None:
    with FakeSglang(faults={"evict": "500"}) as server:
        result = run(server)
    assert result.eviction is not None
    assert (result.eviction.fills, result.eviction.decided_by) == (0, "error")


def test_a_server_that_cannot_show_it_gets_no_request_at_all() -> None:
    with FakeSglang(hicache=False) as server, pytest.raises(UnfitServer, match="--enable-hierarchical-cache"):
        run(server)
    assert server.generated == []


def test_the_control_run_goes_on_without_hicache() -> None:
    with FakeSglang(hicache=False) as server:
        result = run(server, with_options(control=True))
    c = result.one("C")
    assert result.stopped is None
    assert c is not None and c.cached_tokens == 0


def test_no_server_is_one_clear_line() -> None:
    with FakeSglang() as server:
        url = server.url
    with ServerClient(url, timeout_s=2) as client, pytest.raises(ServerUnavailable) as raised:
        run_abc(QUICK, client, None, Silent(), SteppingClock())
    assert str(raised.value).startswith(f"no server answers at {url}")
    assert "\n" not in str(raised.value)


def test_a_server_that_is_still_starting_is_told_apart() -> None:
    with FakeSglang(healthy=False) as server, pytest.raises(ServerUnavailable, match="still starting"):
        run(server)


def test_a_proxy_in_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with FakeSglang() as server:
        assert run(server).stopped is None


def test_a_dp_rank_is_sent_under_its_new_and_its_old_name() -> None:
    with FakeSglang(info={"dp_size": 2}) as server:
        run(server, with_options(dp_rank=1))
    assert {(body["routed_dp_rank"], body["data_parallel_rank"]) for body in server.generated} == {(1, 1)}


def test_every_request_carries_its_own_valid_trace_context() -> None:
    with FakeSglang() as server:
        result = run(server)
    received = [seen.headers["traceparent"] for seen in server.seen if seen.path == "/generate"]
    assert [record.traceparent for record in result.records] == received
    assert all(re.fullmatch(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-01", value) for value in received)
    assert len(set(received)) == len(received)


def test_the_same_seed_sends_the_same_prompts_under_other_ids() -> None:
    with FakeSglang() as one:
        first = run(one)
    with FakeSglang() as two:
        second = run(two)
    assert [record.prompt_sha256 for record in first.records] == [record.prompt_sha256 for record in second.records]
    assert {record.rid for record in first.records}.isdisjoint(record.rid for record in second.records)


def test_a_drawn_seed_repeats_its_run() -> None:
    with FakeSglang() as server:
        first = run(server, with_options(seed=None))
        second = run(server, with_options(seed=first.seed))
    assert first.records[0].prompt_sha256 == second.records[0].prompt_sha256
    assert "prefix_known" in codes(second) and "prefix_known" not in codes(first)


def test_token_ids_stay_out_of_the_records_unless_asked_for() -> None:
    with FakeSglang() as server:
        plain = run(server)
        kept = run(server, with_options(seed=8, keep_prompts=True))
    assert not any(record.prompt_ids for record in plain.records)
    assert {record.series for record in kept.records if record.prompt_ids} == {"A", "B", "C"}


def test_token_ids_stay_within_the_vocabulary() -> None:
    with FakeSglang(info={"vocab_size": 320}) as server:
        run(server)
    assert max(max(body["input_ids"]) for body in server.generated) < 320


def test_an_observer_that_fails_costs_the_observation_and_not_the_run() -> None:
    class Failing(CacheObserver):
        def left_l1(self, rid: str, beyond: int = 0) -> bool | None:
            raise OSError("journal directory vanished")

    with FakeSglang() as server:
        result = run(server, observer=Failing(server))
    assert result.stopped is None
    assert {"observer_failed", "fills_by_size"} <= codes(result)


def test_waiting_for_events_that_never_come_is_bounded_and_told() -> None:
    class Blind(CacheObserver):
        def settled(self, rids: Sequence[str]) -> bool | None:
            return False

    clock = SteppingClock()
    with FakeSglang() as server, ServerClient(server.url) as client:
        result = run_abc(QUICK, client, Blind(server), Silent(), clock)
    assert result.stopped is None
    assert "not_settled" in codes(result)
    # Ten seconds for the first request, one for each of the others.
    assert clock.now <= 10 + len(result.records)


def test_a_request_is_waited_for_until_its_copies_are_done() -> None:
    class Late(CacheObserver):
        asked = 0

        def settled(self, rids: Sequence[str]) -> bool | None:
            self.asked += 1
            return self.asked % 5 == 0

    with FakeSglang() as server:
        observer = Late(server)
        result = run(server, observer=observer)
    assert observer.asked == 5 * len(result.records)
    assert "not_settled" not in codes(result)


def test_what_the_policy_has_not_backed_up_is_told_before_the_eviction() -> None:
    class Unbacked(CacheObserver):
        def backed_up(self, rid: str) -> bool | None:
            return False

    with FakeSglang(info={"hicache_write_policy": "write_through_selective"}) as server:
        result = run(server, observer=Unbacked(server))
    (note,) = [finding for finding in result.findings if finding.code == "not_backed_up"]
    assert "second_hit" in note.message


def test_metrics_are_kept_from_before_and_after_every_series() -> None:
    with FakeSglang() as server:
        result = run(server)
    assert list(result.snapshots) == ["start", "A", "B", "evict", "C"]
    assert result.snapshots["evict"].value("sglang:load_back_tokens_total") is None
    assert result.snapshots["C"].value("sglang:load_back_tokens_total") == 1488


def test_a_server_without_metrics_is_no_obstacle() -> None:
    with FakeSglang(metrics=False) as server:
        result = run(server, observer=None)
    assert result.stopped is None
    assert result.snapshots == {}
    assert {"metrics_off", "no_metrics"} <= codes(result)


def test_streams_that_send_only_what_is_new_give_the_same_answer() -> None:
    with FakeSglang() as whole:
        one = run(whole)
    with FakeSglang(incremental=True) as pieces:
        two = run(pieces)
    assert [(r.output_ids, r.text) for r in one.records] == [(r.output_ids, r.text) for r in two.records]
    assert all(record.ttft_s is not None and record.ttft_s <= record.total_s for record in two.records)
