"""Runs recorded on an H200 (SGLang 0.5.17, both tree classes, two model shapes), judged again on every run.

A, B, four fills, C and C again with prompts of 12,000 tokens; L1 of 32,768 tokens, page size 64, CUDA events
around the copies. `KVWITNESS_UPDATE=1 pytest tests/gpu` writes the expected spans anew.
"""

from __future__ import annotations

import json
import lzma
import os
from functools import cache
from pathlib import Path

import pytest

from kvwitness.collectors.journal import Journal, parse_journal
from kvwitness.collectors.metrics import EVICTED_TOKENS, LOAD_BACK_TOKENS, parse_metrics
from kvwitness.tracer.judgement import Judgement, judge
from kvwitness.tracer.model import Grade, Link, RequestVerdict, ServerReport, Tier
from kvwitness.tracer.spans.otlp_json import span_lines
from kvwitness.tracer.verdicts.counters import EVICTED, LOADED, CounterWindow, check_counters

FOLDER = Path(__file__).parent.parent / "fixtures" / "gpu"
RUNS = sorted(path.name for path in FOLDER.iterdir())
REUSED = 11_968
"""12,000 shared tokens in whole pages of 64."""
BYTES_PER_TOKEN = {"0.5b": 24 * 2 * 64 * 2 * 2, "7b": 28 * 4 * 128 * 2 * 2}
"""Layers x KV heads x head size x (K and V) x bfloat16."""


@cache
def journals(run: str) -> tuple[Journal, ...]:
    found = sorted((FOLDER / run).glob("*.kvwj.xz"))
    return tuple(parse_journal(lzma.decompress(path.read_bytes()), path.name.removesuffix(".xz")) for path in found)


def responses(run: str) -> dict[str, ServerReport]:
    path = FOLDER / run / "responses.jsonl"
    if not path.exists():
        return {}
    reports = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        details = row["details"] or {}
        report = ServerReport("response", row["cached"], details.get("device"), details.get("host"))
        reports[f"gpu-{row['name']}"] = report
    return reports


@cache
def judged(run: str) -> Judgement:
    return judge(journals(run), responses(run))


def about(run: str, name: str) -> RequestVerdict:
    verdict = judged(run).verdict(f"gpu-{name}")
    assert verdict is not None
    return verdict


def test_there_are_runs_of_both_trees_and_both_shapes() -> None:
    assert RUNS == ["0.5b-hiradix", "0.5b-unified", "7b-hiradix", "7b-unified"]
    classes = {run: judged(run).instances[0].facts.instance.tree_class for run in RUNS}
    assert classes == {run: "HiRadixCache" if "hiradix" in run else "UnifiedRadixCache" for run in RUNS}


@pytest.mark.parametrize("run", RUNS)
def test_a_b_and_c_have_their_tiers(run: str) -> None:
    a, b, c, again = (about(run, name) for name in ("A", "B", "C", "C2"))
    assert (a.tier, a.grade) == (Tier.RECOMPUTED, Grade.RECOMPUTED)
    assert (b.sentence, b.grade, b.tokens.l1) == ("L1 read confirmed", Grade.CONFIRMED, REUSED)
    assert (c.sentence, c.grade, c.tokens.l2) == ("L2 read confirmed", Grade.CONFIRMED, REUSED)
    assert (again.sentence, again.tokens.l1) == ("L1 read confirmed", REUSED)
    assert all(check.agrees for verdict in (a, b, c, again) for check in verdict.checks)


@pytest.mark.parametrize("run", RUNS)
def test_the_load_back_has_its_bytes_and_its_time_on_the_device(run: str) -> None:
    (load,) = about(run, "C").load_backs
    assert load.tokens == load.transfer_tokens == REUSED
    assert load.bytes == REUSED * BYTES_PER_TOKEN[run.split("-")[0]]
    assert load.device_duration_ns is not None and 1e6 < load.device_duration_ns < 1e9
    read = next(link for r in about(run, "C").ranges for link in r.links if link.link is Link.READ)
    assert "ms on the device" in read.detail


@pytest.mark.parametrize("run", [run for run in RUNS if (FOLDER / run / "metrics.prom").exists()])
def test_the_servers_own_counters_say_the_same(run: str) -> None:
    snapshot = parse_metrics((FOLDER / run / "metrics.prom").read_text(), 0)
    tokens = {LOADED: snapshot.value(LOAD_BACK_TOKENS), EVICTED: snapshot.value(EVICTED_TOKENS)}
    window = CounterWindow(-(2**62), 2**62, {name: int(value) for name, value in tokens.items() if value is not None})
    checks = check_counters(judged(run).instances, window)
    assert [check.agrees for check in checks] == [True, True], checks


@pytest.mark.parametrize("run", RUNS)
def test_the_spans_are_those_that_were_kept(run: str) -> None:
    kept = FOLDER / run / "spans.otlp.jsonl.xz"
    lines = "".join(f"{line}\n" for line in span_lines(judged(run), ()))
    if os.environ.get("KVWITNESS_UPDATE"):
        kept.write_bytes(lzma.compress(lines.encode(), preset=9))
    assert lzma.decompress(kept.read_bytes()).decode() == lines


@pytest.mark.parametrize("run", RUNS)
def test_the_clients_trace_goes_on(run: str) -> None:
    contexts = {request.rid: request.traceparent for request in judged(run).instances[0].requests}
    for name in ("A", "B", "C"):
        context = contexts[f"gpu-{name}"]
        assert context is not None
        assert context.split("-")[1] in "".join(span_lines(judged(run), ()))
