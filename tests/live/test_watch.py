"""`kvwitness watch` on a real server, and what becomes of the stand and of the record when something breaks."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from outside_tools import Running, kvwitness, load, prompt, publishing, running, serving, wait_for
from stand_fixtures import generate

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.digests import load_key
from kvwitness.tracer.judgement import SCHEDULER_ROLE
from kvwitness.tracer.stand.releases import NEWEST
from kvwitness.tracer.stand.server import StandServer

pytestmark = [pytest.mark.stand, pytest.mark.timeout(900)]


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
