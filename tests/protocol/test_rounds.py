"""Runs of several rounds: repeats, clients, orders, endpoints, documents, controls, and what goes wrong in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvwitness.collectors.environment import ProcessIdentity
from kvwitness.collectors.server_info import read_server_info
from kvwitness.tracer.protocol.abc import AbcRun, run_abc
from kvwitness.tracer.protocol.client import ServerClient
from kvwitness.tracer.protocol.control import ControlRefused, check_control, control_options
from kvwitness.tracer.protocol.options import AbcOptions, Api, Order
from kvwitness.tracer.protocol.quality import Kind, Reference
from kvwitness.tracer.protocol.questions import Question, Questions
from kvwitness.tracer.protocol.resume import NothingToResume, earlier_part, remaining_of
from kvwitness.tracer.protocol.runner import Before
from kvwitness.tracer.protocol.sweep import default_lengths, parse_lengths

from .fake_sglang import CacheObserver, FakeSglang, Silent, SteppingClock

SMALL = AbcOptions(prefix_tokens=320, question_tokens=3, output_tokens=4, warmups=0, seed=7)


def run(server: FakeSglang, watched: bool = True, document: str | None = None, **options: Any) -> AbcRun:
    more = {name: options.pop(name) for name in ("load", "before") if name in options}
    asked = msgspec.structs.replace(SMALL, **options)
    observer = CacheObserver(server) if watched else None
    with ServerClient(server.url, timeout_s=10) as client:
        return run_abc(asked, client, observer, Silent(), SteppingClock(), document=document, **more)


def codes(result: AbcRun) -> set[str]:
    return {finding.code for finding in result.findings}


def test_every_round_has_a_cold_a_an_l1_hit_and_an_l2_read() -> None:
    with FakeSglang(device_tokens=1024) as server:
        result = run(server, repeats=4)
    assert result.stopped is None and result.missing == ()
    for series, device, host in (("A", 0, 0), ("B", 320, 0), ("C", 0, 320)):
        records = result.series(series)
        assert [record.round for record in records] == [0, 1, 2, 3]
        assert len({record.prompt_sha256 for record in records}) == 4
        found = [record.cached_tokens_details or {"device": 0, "host": 0} for record in records]
        assert found == [{"device": device, "host": host}] * 4
    assert [one.rounds for one in result.evictions] == [(0,), (1,), (2,), (3,)]
    fills = [body["input_ids"] for body in server.generated if body["rid"].endswith("evict")]
    assert len({tuple(fill) for fill in fills}) == len(fills) == sum(one.fills for one in result.evictions)


def test_the_first_round_does_not_depend_on_how_many_follow() -> None:
    with FakeSglang(device_tokens=1024) as one, FakeSglang(device_tokens=1024) as many:
        alone, several = run(one), run(many, repeats=3)
    assert alone.series("A")[0].prompt_sha256 == several.series("A")[0].prompt_sha256


def test_clients_are_under_way_at_the_same_time() -> None:
    import threading

    together = threading.Barrier(3, timeout=20)

    def meet(number: int) -> None:
        # The six requests of A, then B: none is answered before three are there.
        if number < 6:
            together.wait()

    with FakeSglang(device_tokens=4096, before_post=meet) as server:
        result = run(server, repeats=3, clients=3)
    assert [record.series for record in result.records[:6]] == ["A", "A", "A", "B", "B", "B"]
    assert [record.order for record in result.records] == list(range(len(result.records)))
    assert [record.round for record in result.series("C")] == [0, 1, 2]
    assert all(record.cached_tokens_details == {"device": 0, "host": 320} for record in result.series("C"))


def test_in_order_of_series_one_eviction_is_for_all() -> None:
    with FakeSglang(device_tokens=2048) as server:
        result = run(server, repeats=3, order=Order.SERIES)
    names = [record.series for record in result.records if record.series != "evict"]
    assert names == ["A"] * 3 + ["B"] * 3 + ["C"] * 3
    assert [one.rounds for one in result.evictions] == [(0, 1, 2)]


def test_a_failed_request_costs_its_round_and_not_the_run() -> None:
    with FakeSglang(device_tokens=1024) as server:

        def fail(number: int) -> None:
            server.faults = {"B": "500"} if number == 1 else {}

        server.before_post = fail
        result = run(server, repeats=3)
    assert result.stopped is None
    assert [record.status for record in result.series("B")] == [500, 200, 200]
    assert len(result.series("C")) == 3


def test_failures_without_end_stop_the_run() -> None:
    with FakeSglang(faults={"A": "500"}) as server:
        result = run(server, repeats=9)
    assert result.stopped is not None and "failed: HTTP 500" in result.stopped
    assert "missing: 9 of 9 rounds" in result.stopped
    assert len(server.generated) == 3


def test_another_setting_stops_the_run_and_is_named() -> None:
    with FakeSglang(device_tokens=1024) as server:

        def restart(number: int) -> None:
            if number == 1:
                server.info = {"hicache_ratio": 2.0}

        server.before_post = restart
        result = run(server)
    assert result.stopped == (
        "the server's settings changed between after A and after B: hicache_ratio from 16.0 to 2.0"
    )
    (change,) = result.settings.changes
    assert (change.name, change.one, change.other) == ("hicache_ratio", "16.0", "2.0")
    assert result.one("C") is None


def test_a_restart_with_the_same_settings_is_noticed_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started = iter([1.0, 2.0, 60.0])
    monkeypatch.setattr(ServerClient, "identity", lambda self: (ProcessIdentity(5, next(started)),))
    with FakeSglang(device_tokens=1024) as server:
        result = run(server)
    assert result.stopped is not None
    assert "between after A and after B the server's processes were replaced" in result.stopped


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT])
def test_openai_endpoints(api: Api) -> None:
    with FakeSglang(device_tokens=1024) as server:
        result = run(server, watched=False, api=api, repeats=2)
    assert result.stopped is None
    assert server.generated == [] and len(server.completed) == len(result.records)
    for record in result.records:
        assert record.error is None and record.ttft_s is not None and record.text
        assert record.prompt_tokens > 300
    body = server.completed[0]
    assert body["stream_options"]["include_usage"] and body["rid"] == result.records[0].rid
    assert ("messages" in body) is (api is Api.CHAT)
    c = result.series("C")[0]
    assert c.cached_tokens is not None and c.cached_tokens > 300


def test_a_document_with_questions() -> None:
    document = "A long text about the sea. " * 12
    questions = Questions(
        (Question("What is it about?", Reference(Kind.CONTAINS, "SEA")),), (Question("And the sky?"),)
    )
    with FakeSglang(device_tokens=1024, answer="It is about the sea.") as server:
        result = run(server, document=document, questions=questions, repeats=2)
    a, b = result.series("A"), result.series("B")
    texts = [body["text"] for body in server.generated if body["rid"].endswith("-A")]
    assert all(document in text and text.endswith("What is it about?") for text in texts)
    assert len(set(texts)) == 2, "each round's prefix begins with a line of its own"
    assert [record.correct for record in a] == [True, True]
    assert [record.correct for record in b] == [None, None]
    assert all(record.reference == questions.known[0].reference for record in result.series("C"))
    assert result.options.prefix_tokens == len(document)
    assert server.generated[0]["sampling_params"]["ignore_eos"] is False


def test_a_sweep_goes_through_the_lengths_in_turn() -> None:
    with FakeSglang(device_tokens=2048) as server:
        result = run(server, lengths=(64, 640), repeats=3)
    assert [record.prefix_tokens for record in result.series("A")] == [64, 640] * 3
    assert [record.prefix_tokens for record in result.series("C")] == [64, 640] * 3


def test_lengths_by_default_and_as_written() -> None:
    info = read_server_info("http://127.0.0.1:1", FakeSglang().server_info(), {})
    lengths = default_lengths(info, 24)
    assert len(lengths) == 6 and lengths == tuple(sorted(lengths))
    assert lengths[0] == 64 and lengths[-1] <= 2048 and all(one % 16 == 0 for one in lengths)
    assert parse_lengths("512,128, 512") == (128, 512)
    for wrong in ("", "12", "a,b", "0,5"):
        with pytest.raises(ValueError, match=r"."):
            parse_lengths(wrong)


# --- the control ---------------------------------------------------------------------------------------


def test_the_control_gets_the_same_prompts_in_the_same_order() -> None:
    with FakeSglang(device_tokens=1024) as server, FakeSglang(device_tokens=1024, hicache=False) as other:
        mine = run(server, repeats=3)
        options = control_options(mine.options, mine.seed)
        with ServerClient(other.url, timeout_s=10) as client:
            control = run_abc(options, client, None, Silent(), SteppingClock(), load=mine.load)
    assert [record.prompt_sha256 for record in mine.records] == [record.prompt_sha256 for record in control.records]
    assert all(record.cached_tokens == 0 for record in control.series("C"))
    assert not any(seen.path == "/flush_cache" for seen in [*server.seen, *other.seen])


def info(**changes: Any) -> Any:
    return read_server_info("http://127.0.0.1:1", FakeSglang(info=changes).server_info(), {})


def test_a_control_server_may_differ_in_hicache_alone() -> None:
    off = {"enable_hierarchical_cache": False, "hicache_ratio": 2.0, "hicache_write_policy": "write_back"}
    check_control(info(), info(**off, port=31000, random_seed=5))
    for changes, said in (
        ({}, "HiCache on"),
        ({"enable_hierarchical_cache": ...}, "not said whether HiCache is off"),
        ({**off, "page_size": 64}, "page_size: 16 and 64"),
        ({**off, "max_total_num_tokens": 99}, "max_total_num_tokens: 4096 and 99"),
        ({**off, "disable_radix_cache": True}, "radix cache is off"),
    ):
        with pytest.raises(ControlRefused, match=said):
            check_control(info(), info(**changes))


def test_the_load_of_a_run_is_that_of_its_complete_rounds() -> None:
    with FakeSglang(device_tokens=4096) as server:

        def fail(number: int) -> None:
            server.faults = {"A": "500"} if number == 1 else {}

        server.before_post = fail
        result = run(server, repeats=4, order=Order.SERIES)
    assert [wave.rounds for wave in result.load] == [(0, 2, 3)]
    assert result.missing == (1,)
    assert result.stopped == "requests failed, and with them their rounds; missing: 1 of 4 rounds"


# --- resuming ------------------------------------------------------------------------------------------


def environment(result: AbcRun) -> dict[str, Any]:
    options = {key: value for key, value in msgspec.to_builtins(result.options).items() if value is not None}
    return {
        "run": {
            "id": result.run_id,
            "seed": result.seed,
            "options": options,
            "evictions": msgspec.to_builtins(result.evictions),
        },
        "raw": {"server_info": result.server.raw_server},
    }


def test_a_run_that_was_cut_short_goes_on_where_it_was() -> None:
    with FakeSglang(device_tokens=1024) as server:

        def break_off(number: int) -> None:
            if number == 9:
                raise KeyboardInterrupt

        def interrupted(call: Any) -> Any:
            break_off(call.order)
            return generate(call)

        with ServerClient(server.url, timeout_s=10) as client:
            generate = client.generate
            client.generate = interrupted  # type: ignore[method-assign]
            first = run_abc(
                msgspec.structs.replace(SMALL, repeats=4), client, CacheObserver(server), Silent(), SteppingClock()
            )
        assert first.interrupted and len(first.records) == 9
        assert first.missing == (1, 2, 3)
        earlier = earlier_part(first.records, environment(first))
        assert earlier.options.repeats == 4
        second = run(server, repeats=4, seed=earlier.options.seed, before=earlier.before)
    assert second.stopped is None and second.run_id == first.run_id
    done = [record.round for record in second.series("C")]
    # Round 1 had begun: its prefix is in the cache, so it is begun again with another one.
    assert done == [0, 5, 2, 3]
    assert all(record.cached_tokens == 0 for record in second.series("A"))
    assert second.records[:9] == first.records
    assert len({record.rid for record in second.records}) == len(second.records)
    assert remaining_of(second.options, second.records) == ()
    with pytest.raises(NothingToResume, match="all of its rounds are complete"):
        earlier_part(second.records, environment(second))


def test_what_is_no_run_cannot_go_on() -> None:
    for found in ({}, {"run": {"options": {}}}, {"run": {"options": {"repeats": "x"}, "seed": 1, "id": "a"}}):
        with pytest.raises(NothingToResume):
            earlier_part((), found)


def test_a_sweep_goes_on_with_the_same_lengths() -> None:
    options = msgspec.structs.replace(SMALL, lengths=(64, 128), repeats=2)
    with FakeSglang(device_tokens=1024) as server:
        whole = run(server, lengths=(64, 128), repeats=2)
    cut = [record for record in whole.records if record.series != "C" or record.round == 0]
    (one, two, three) = remaining_of(options, cut)
    assert [wave.rounds for wave in (one, two, three)] == [(5,), (6,), (7,)]
    assert [number % 2 for number in (5, 6, 7)] == [1, 0, 1]
    assert Before("x", (), (), (one,)).remaining == (one,)


def test_the_document_is_known_by_its_hash(tmp_path: Path) -> None:
    with FakeSglang(device_tokens=1024) as server:
        one = run(server, document="x" * 400, seed=1)
    assert one.vocabulary.startswith("the document")
