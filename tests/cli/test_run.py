"""`kvwitness run abc` with a runner that sends nothing: what goes in, what comes out, what --expect means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bundle.runs import RECORDS, simple_judge

from kvwitness.collectors.environment import HostFacts, JournalDirectory, ServerProcesses
from kvwitness.collectors.metrics import parse_metrics
from kvwitness.collectors.server_info import ServerInfo
from kvwitness.tracer.bundle import open_bundle, verify_bundle
from kvwitness.tracer.cli.expect import unmet_expectations
from kvwitness.tracer.judgement import Judgement
from kvwitness.tracer.model import Grade, RequestVerdict, Tier
from kvwitness.tracer.protocol.abc import AbcRun, UnfitServer
from kvwitness.tracer.protocol.fit import Finding, Severity
from kvwitness.tracer.protocol.options import AbcOptions

from .conftest import Command

URL = "http://127.0.0.1:30000"
HOST = HostFacts("Linux 6", "x86_64", "3.11", None, 2, 1, 1, 100, 50, (), ("cpu_model",))


def a_run(options: AbcOptions, stopped: str | None = None) -> AbcRun:
    metrics = {
        name: parse_metrics(f"sglang:x_total {n}\n", n) for n, name in enumerate(("start", "A", "B", "evict", "C"))
    }
    return AbcRun(
        run_id="r1",
        seed=1,
        options=options,
        server=ServerInfo(url=URL, version="0.5.23", unknown=("vocab_size",), raw_server={"a": 1}),
        vocabulary="0..99",
        records=RECORDS,
        findings=(Finding(Severity.WARN, "metrics_off", "metrics are off"),),
        eviction=None,
        flush=None,
        snapshots=metrics,
        stopped=stopped,
    )


class Runner:
    """Stands for ``run_abc``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stopped: str | None = None
        self.error: Exception | None = None

    def __call__(self, *args: Any, **more: Any) -> AbcRun:
        self.calls.append(args)
        if self.error is not None:
            raise self.error
        return a_run(args[0], self.stopped)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    runner = Runner()
    module = "kvwitness.tracer.cli.driving"
    monkeypatch.setattr(f"{module}.run_abc", runner)
    monkeypatch.setattr(f"{module}.ServerClient.check", lambda self: None)
    monkeypatch.setattr(f"{module}.host_facts", lambda: HOST)
    monkeypatch.setattr(f"{module}.find_server_processes", lambda url: ServerProcesses((), "another machine"))
    monkeypatch.setattr(f"{module}.locate_kvwitness_dir", lambda url: JournalDirectory(None, "it runs without"))
    return runner


def test_a_run_ends_in_a_bundle(kvwitness: Command, runner: Runner, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ("--dir", data, "--prefix-tokens", 64, "--second-hit", "--flush", "--keep-prompts", "--seed", 5)
    result = kvwitness("run", "abc", "--url", URL, "--out", out, *args)
    assert result.exit_code == 0
    assert "L2 reported" in result.stdout
    assert f"bundle: {out}" in result.stdout
    assert "warning: metrics are off" in result.stderr.splitlines()
    options, _, observer, _ = runner.calls[0]
    expected = AbcOptions(prefix_tokens=64, second_hit=True, flush_between_bc=True, keep_prompts=True, seed=5)
    assert options == expected
    assert observer.directory == data
    assert verify_bundle(out).ok
    environment = open_bundle(out).environment
    assert environment["unknown"][:3] == ["host: cpu_model", "server: vocab_size", "processes: another machine"]
    assert "model: weights: the model's path is no folder here" in environment["unknown"]
    assert environment["server"]["version"] == "0.5.23"
    assert environment["run"]["options"]["prefix_tokens"] == 64
    assert environment["raw"]["server_info"] == {"a": 1}
    moments = {path.stem: path.read_text() for path in (out / "metrics").iterdir()}
    assert moments.keys() == {"before", "after-A", "after-B", "after-evict", "after"}
    assert moments["before"].splitlines()[1] == "sglang:x_total 0"
    assert moments["after"].splitlines()[1] == "sglang:x_total 4"


def test_json(kvwitness: Command, runner: Runner, data: Path, tmp_path: Path) -> None:
    result = kvwitness("run", "abc", "--url", URL, "--out", tmp_path / "out.zip", "--dir", data, "--json")
    answer = json.loads(result.stdout)
    assert answer["requests"][2]["l2"] == 64
    assert answer["bundle"] == str(tmp_path / "out.zip")


def test_without_journals_it_warns_and_goes_on(kvwitness: Command, runner: Runner, tmp_path: Path) -> None:
    result = kvwitness("run", "abc", "--url", URL, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "nothing can be confirmed: it runs without" in result.stderr
    assert runner.calls[0][2] is None
    assert "not in the journals" in result.stdout
    assert verify_bundle(tmp_path / "out").ok


def test_a_run_that_stopped_is_kept_and_exits_1(kvwitness: Command, runner: Runner, data: Path, tmp_path: Path) -> None:
    runner.stopped = "request 4 failed"
    result = kvwitness("run", "abc", "--url", URL, "--out", tmp_path / "out", "--dir", data)
    assert result.exit_code == 1
    assert "did not reach its end: request 4 failed" in result.stderr
    assert verify_bundle(tmp_path / "out").ok


def test_a_server_that_does_not_fit(kvwitness: Command, runner: Runner, data: Path, tmp_path: Path) -> None:
    runner.error = UnfitServer((Finding(Severity.STOP, "hicache_off", "HiCache is off"),))
    result = kvwitness("run", "abc", "--url", URL, "--out", tmp_path / "out", "--dir", data)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: {URL}: this run would prove nothing: HiCache is off")


def verdicts(**tiers: tuple[Tier, Grade]) -> tuple[RequestVerdict, ...]:
    from bundle.runs import verdict_of

    from kvwitness.tracer.model import EventRef

    plain = {record.series: verdict_of(record.rid, "i", 100, 0, EventRef("i", 1, "x"), None) for record in RECORDS}
    return tuple(msgspec.structs.replace(plain[s], tier=tier, grade=grade) for s, (tier, grade) in tiers.items())


GOOD = {"A": (Tier.RECOMPUTED, Grade.RECOMPUTED), "B": (Tier.L1, Grade.CONFIRMED), "C": (Tier.L2, Grade.VERIFIED)}


def test_expectations_met() -> None:
    assert unmet_expectations(verdicts(**GOOD), RECORDS) == ()


@pytest.mark.parametrize(
    ("series", "found"),
    [
        ("A", (Tier.L1, Grade.CONFIRMED)),
        ("B", (Tier.L1, Grade.REPORTED)),
        ("C", (Tier.RECOMPUTED, Grade.RECOMPUTED)),
        ("C", (Tier.L2, Grade.CONSISTENT)),
        ("C", (Tier.L2, Grade.REFUTED)),
    ],
)
def test_expectations_not_met(series: str, found: tuple[Tier, Grade]) -> None:
    (line,) = unmet_expectations(verdicts(**{**GOOD, series: found}), RECORDS)
    assert line.startswith(f"{series} (abc-{series.lower()}-1): expected ")


def test_no_verdict_and_no_request_are_not_as_expected() -> None:
    assert len(unmet_expectations((), RECORDS)) == 3
    assert unmet_expectations((), ()) == ("A was not sent", "B was not sent", "C was not sent")


@pytest.mark.parametrize("as_expected", [True, False])
def test_expect_decides_the_exit_code(
    kvwitness: Command,
    runner: Runner,
    data: Path,
    tmp_path: Path,
    as_expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged = Judgement((), verdicts(**GOOD)) if as_expected else None
    monkeypatch.setattr("kvwitness.tracer.judgement.judge", lambda *args: judged or simple_judge(*args))
    result = kvwitness("run", "abc", "--url", URL, "--out", tmp_path / "out", "--dir", data, "--expect")
    assert result.exit_code == (0 if as_expected else 1)
    assert ("not as expected: C" in result.stderr) is not as_expected
