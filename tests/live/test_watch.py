"""`kvwitness watch` on a real server, and what becomes of the stand and of the record when something breaks."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from attach_fixtures import load
from outside_tools import Running, kvwitness, prompt, publishing, running, serving, wait_for
from stand_fixtures import generate

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.digests import load_key
from kvwitness.tracer.judgement import SCHEDULER_ROLE
from kvwitness.tracer.spans.jaeger import JaegerProcess, find_or_build_jaeger
from kvwitness.tracer.stand.releases import NEWEST
from kvwitness.tracer.stand.server import StandServer, free_port

pytestmark = [pytest.mark.stand, pytest.mark.timeout(900)]

JAEGER_MODULE = Path(__file__).parents[1] / "jaeger"


def lines(command: Running, kind: str) -> list[dict[str, Any]]:
    """The JSON lines of one kind that a watch has printed so far."""
    found = [json.loads(line) for line in list(command.out) if line.endswith("\n")]
    return [line for line in found if line["type"] == kind]


def metrics(address: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=10) as answer:
        return str(answer.read().decode())


def address_of(command: Running) -> str:
    return command.said("metrics at ").split("metrics at ")[1].strip()


def story(server: StandServer, seed: int = 1) -> None:
    """A, B, prompts that push the prefix out of L1, C (request id "c")."""
    chance = random.Random(seed)
    shared = prompt(chance)
    generate(server.url, [*shared, 5, 6, 7])
    generate(server.url, [*shared, 8, 9, 10])
    for _ in range(4):
        generate(server.url, prompt(chance))
    generate(server.url, [*shared, 5, 6, 7], rid="c")


@pytest.mark.slow
def test_watch_shows_tiers_rates_and_metrics_and_survives_what_breaks(tmp_path: Path) -> None:
    data, recorded = tmp_path / "data", tmp_path / "outside"
    data.mkdir(mode=0o700)
    load_key(data)
    extra = {"KVWITNESS_DIR": str(data)}
    with serving(NEWEST, tmp_path / "server", extra_args=publishing(tmp_path), extra_env=extra) as server:
        arguments = ("--url", server.url, "--json", "--listen", "127.0.0.1:0")
        with running("watch", *arguments) as watched, load(server.url) as seen:
            address = address_of(watched)
            with running("attach", "--outside", "--url", server.url, "--out", str(recorded)) as recorder:
                recorder.said("recording SGLang")
                story(server)
                wait_for(lambda: any(line["request"] == "c" for line in lines(watched, "request")))
                _judged(watched, metrics(address))
                assert recorder.interrupt() == 0, recorder.err
            _full_disk(server.url, tmp_path)
            _killed(server.url, tmp_path)
            before = seen.answers
            os.kill(watched.process.pid, signal.SIGKILL)
            wait_for(lambda: seen.answers > before + 8)
        assert seen.wrong == []
    (journal,) = [j for j in map(read_journal, find_journals(data)) if j.role == SCHEDULER_ROLE]
    assert journal.closed and not journal.gaps and not journal.anomalies
    _both_ledgers(recorded)


def _judged(watched: Running, exported: str) -> None:
    (c,) = [line for line in lines(watched, "request") if line["request"] == "c"]
    assert c["sentence"] == "L2 read confirmed" and c["l2"] >= 1488
    assert {line["kind"] for line in lines(watched, "eviction")} >= {"demoted"}
    assert all(line["cause"] != "unknown" for line in lines(watched, "eviction"))
    assert sum(line["tokens"] for line in lines(watched, "load_back")) >= 1488
    assert lines(watched, "disagreement") == [] and lines(watched, "lost") == []
    assert "reported by the server, not confirmed" in lines(watched, "interval")[-1]["sentence"]
    for wanted in (
        'kvwitness_requests_total{grade="confirmed",tier="L2"} ',
        'kvwitness_prompt_tokens_total{tier="L2"} ',
        'kvwitness_evicted_tokens_total{cause="prefill allocation",kind="demoted",tier="L1"} ',
        "kvwitness_load_back_seconds_bucket",
        "kvwitness_load_back_bytes_total ",
        "kvwitness_server_up 1.0",
    ):
        assert wanted in exported, exported


def _both_ledgers(recorded: Path) -> None:
    """Residency by KV events alone and by the hooks, of the same run."""
    shown = kvwitness("show", str(recorded))["outside"]
    (agreement,) = shown["agreements"]
    print(json.dumps(agreement), json.dumps(shown["statement"]["checks"]))
    assert [one["name"] for one in agreement["differences"] if one["name"] == "unexplained"] == []
    assert all(tier["stays"] > 90 for tier in agreement["tiers"])
    assert kvwitness("verify", str(recorded))["ok"]


def _full_disk(url: str, tmp_path: Path) -> None:
    """A file that takes no more: the recording goes on, what is lost is counted, and what was recorded is there."""
    out = tmp_path / "full"
    folder = tmp_path / "full.recording"

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, resource.RLIM_INFINITY))

    with running("attach", "--outside", "--url", url, "--out", str(out), "--interval", "0.2", preexec_fn=small) as one:
        one.said("takes no lines")
        one.interrupt()
    shown = kvwitness("show", str(folder if folder.exists() else out))
    gaps = shown.get("outside", shown)["statement"]["gaps"]
    print("full disk:", one.err, gaps)
    assert any("lines lost" in gap or "could not write its end" in gap for gap in gaps)


def _killed(url: str, tmp_path: Path) -> None:
    """kill -9 of the collector: what was recorded is read, and says that it has no end."""
    folder = tmp_path / "killed.recording"
    with running("attach", "--outside", "--url", url, "--out", str(tmp_path / "killed")) as one:
        one.said("recording SGLang")
        wait_for(lambda: (folder / "metrics.jsonl").is_file())
        one.process.kill()
        one.process.wait()
    statement = kvwitness("show", str(folder))["statement"]
    print("killed:", statement["sentence"], statement["gaps"])
    assert not statement["complete"]
    assert any("the collector was killed" in gap for gap in statement["gaps"])


@pytest.mark.slow
def test_a_restarted_server_is_a_gap_and_is_watched_on(tmp_path: Path) -> None:
    data, port = tmp_path / "data", free_port()
    extra: dict[str, Any] = {
        "extra_env": {"KVWITNESS_DIR": str(data)},
        "extra_args": publishing(tmp_path),
        "port": port,
    }
    url = f"http://127.0.0.1:{port}"
    with serving(NEWEST, tmp_path / "first", **extra) as first:
        with running("watch", "--url", url, "--dir", str(data), "--json", "--listen", "127.0.0.1:0") as watched:
            address = address_of(watched)
            outside = ("attach", "--outside", "--url", url, "--dir", str(data), "--out", str(tmp_path / "outside"))
            with running(*outside) as recorder:
                recorder.said("recording SGLang")
                story(first)
                wait_for(lambda: any(line["request"] == "c" for line in lines(watched, "request")))
                for pid in (*first.scheduler_pids(), first.pid):
                    os.kill(pid, signal.SIGKILL)
                first.stop()
                wait_for(lambda: any("does not answer" in line["what"] for line in lines(watched, "gap")))
                assert "kvwitness_server_up 0.0" in metrics(address)
                with serving(NEWEST, tmp_path / "second", **extra) as second:
                    story(second, seed=2)
                    wait_for(lambda: len([1 for line in lines(watched, "request") if line["request"] == "c"]) == 2)
                    wait_for(lambda: any("restarted" in line["what"] for line in lines(watched, "gap")))
                    assert recorder.interrupt() == 0, recorder.err
            assert watched.interrupt() == 0
        gaps = [line["what"] for line in lines(watched, "gap")]
        print("restarted:", gaps)
        assert any("not running any more" in gap for gap in gaps)
        assert any("began to record" in gap for gap in gaps)
        assert {line["sentence"] for line in lines(watched, "request") if line["request"] == "c"} == {
            "L2 read confirmed"
        }
    statement = kvwitness("show", str(tmp_path / "outside"))["outside"]["statement"]
    print(statement["gaps"], statement["witnesses"])
    assert any("restarted" in gap for gap in statement["gaps"]) and not statement["complete"]


@pytest.mark.slow
@pytest.mark.jaeger
def test_a_stopped_jaeger_costs_the_server_nothing_and_no_span(tmp_path: Path) -> None:
    data = tmp_path / "data"
    program = find_or_build_jaeger(lambda line: None, JAEGER_MODULE)
    extra = {"KVWITNESS_DIR": str(data)}
    with serving(NEWEST, tmp_path / "server", extra_env=extra) as server, JaegerProcess(program) as jaeger:
        collect = ("collect", "--dir", str(data), "--otlp", jaeger.otlp_http, "--json")
        with running(*collect) as collector, running("watch", "--dir", str(data), "--json") as watched:
            collector.said("following")
            with load(server.url) as seen:
                wait_for(lambda: bool(lines(watched, "request")))
                jaeger.stop()
                story(server)
                collector.said("cannot send")
                wait_for(lambda: any(line["request"] == "c" for line in lines(watched, "request")))
                before, begun = seen.answers, time.monotonic()
                wait_for(lambda: seen.answers > before + 8)
                print(f"answers while Jaeger is down: {seen.answers - before} in {time.monotonic() - begun:.1f} s")
            assert seen.wrong == []
            assert watched.interrupt() == 0
            collector.interrupt()
        print(collector.err)
        assert any("not taken" in line or "spans" in line for line in collector.err)
    (journal,) = [j for j in map(read_journal, find_journals(data)) if j.role == SCHEDULER_ROLE]
    assert journal.closed and not journal.gaps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "policy", "page"),
    [("0.5.17", "write_through", 16), ("0.5.17", "write_back", 1), (NEWEST, "write_back", 1), ("0.5.10.post1", "", 16)],
)
def test_the_ledger_of_kv_events_and_that_of_hooks(release: str, policy: str, page: int, tmp_path: Path) -> None:
    data, recorded = tmp_path / "data", tmp_path / "outside"
    data.mkdir(mode=0o700)
    load_key(data)
    chosen: dict[str, Any] = {
        "extra_args": publishing(tmp_path),
        "extra_env": {"KVWITNESS_DIR": str(data)},
        "write_policy": policy or "write_through",
        "page_size": page,
        "hicache_ratio": 1.5,
    }
    arguments = ("attach", "--outside", "--out", str(recorded), "--url")
    with serving(release, tmp_path / "server", **chosen) as server, running(*arguments, server.url) as recorder:
        recorder.said("recording SGLang")
        story(server)
        story(server, seed=2)
        assert recorder.interrupt() == 0, recorder.err
    outside = kvwitness("show", str(recorded))["outside"]
    (agreement,) = outside["agreements"]
    print(json.dumps(agreement))
    names = {one["name"] for one in agreement["differences"]}
    assert "unexplained" not in names
    events = next(witness for witness in outside["statement"]["witnesses"] if witness["name"] == "KV events")
    if release == "0.5.10.post1":
        # Its counters say nothing of what was copied to L2: that no event tells of L2 shows beside the hooks alone.
        assert names == {"removal_not_sent", "no_events_for_tier"}
        assert any("it has room for" in gap for gap in events["gaps"]), events
    else:
        assert all(tier["stays"] > 90 for tier in agreement["tiers"]) and events["gaps"] == []


@pytest.mark.slow
def test_each_dp_rank_has_an_endpoint_of_its_own(tmp_path: Path) -> None:
    data, recorded = tmp_path / "data", tmp_path / "outside"
    data.mkdir(mode=0o700)
    load_key(data)
    chosen: dict[str, Any] = {
        "extra_args": ("--dp-size", "2", *publishing(None)),
        "extra_env": {"KVWITNESS_DIR": str(data), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    }
    arguments = ("attach", "--outside", "--out", str(recorded), "--url")
    with serving(NEWEST, tmp_path / "server", **chosen) as server, running(*arguments, server.url) as recorder:
        recorder.said("recording SGLang")
        for seed in (1, 2):
            story(server, seed)
        assert recorder.interrupt() == 0, recorder.err
    outside = kvwitness("show", str(recorded))["outside"]
    print(json.dumps(outside["agreements"]), json.dumps(outside["statement"]["checks"]))
    assert [agreement["rank"] for agreement in outside["agreements"]] == [0, 1]
    for agreement in outside["agreements"]:
        assert agreement["cells"] and agreement["differences"] == []
    assert all(check["agrees"] for check in outside["statement"]["checks"])
