"""The protocol with repeats and a control, its failures, and going on after an interruption, on real servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Command
from stand_fixtures import StartServer

from kvwitness.tracer.bundle import open_bundle, verify_bundle
from kvwitness.tracer.model import Grade
from kvwitness.tracer.protocol.client import ServerClient
from kvwitness.tracer.protocol.runner import Runner, Wave
from kvwitness.tracer.report.breakeven import breakeven_of
from kvwitness.tracer.report.load import load_evidence
from kvwitness.tracer.report.messages import words_for
from kvwitness.tracer.report.outcome import Cause, Standing, outcome_of
from kvwitness.tracer.report.page import build_page
from kvwitness.tracer.stand.environment import StandEnvironment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.server import ServerOptions, StandServer, free_port

pytestmark = [pytest.mark.stand, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def kvwitness() -> Command:
    return Command()


def recorded(start_server: StartServer, folder: Path, **options: Any) -> str:
    return start_server(extra_env={"KVWITNESS_DIR": str(folder)}, **options).url


def causes(path: Path) -> list[Cause]:
    outcome = outcome_of(load_evidence(path))
    assert outcome.standing is Standing.FAILED and outcome.grade is Grade.UNKNOWN
    return [failure.cause for failure in outcome.failures]


def test_repeats_with_a_control(kvwitness: Command, start_server: StartServer, tmp_path: Path) -> None:
    url = recorded(start_server, tmp_path / "kvw")
    control = start_server(hicache=False).url
    out = tmp_path / "bundle"
    result = kvwitness("run", "abc", "--url", url, "--control-url", control, "--out", out, "--repeats", 5)
    assert result.exit_code == 0, result.stderr
    assert verify_bundle(out).ok
    outcome = outcome_of(load_evidence(out))
    assert (outcome.standing, outcome.confirmed, outcome.total) == (Standing.PROVEN, 5, 5)
    assert outcome.controlled
    assert outcome.control is not None and (outcome.control.reused, outcome.control.total) == (0, 5)
    same = build_page(load_evidence(out), words_for("en")).answers.repeats
    assert (same.same, same.compared) == (5, 5)


def test_experiments_that_fail_and_one_that_goes_on(
    kvwitness: Command, start_server: StartServer, tmp_path: Path
) -> None:
    url = recorded(start_server, tmp_path / "kvw")
    still, left, sweep, cut = (tmp_path / name for name in ("still", "left", "sweep", "cut"))
    assert kvwitness("run", "abc", "--url", url, "--out", still, "--fills", 0).exit_code == 0
    assert causes(still) == [Cause.STILL_IN_L1]
    assert kvwitness("run", "abc", "--url", url, "--out", left, "--evict-host").exit_code == 0
    assert causes(left) == [Cause.LEFT_L2]

    args = ("--url", url, "--out", sweep, "--lengths", "128,1500", "--repeats", 5)
    assert kvwitness("run", "sweep", *args).exit_code == 0
    evidence = load_evidence(sweep)
    found = breakeven_of(evidence.records, evidence.latest())
    assert found is not None and found.unproven == 0
    for point in found.points:
        assert all(summary is not None and summary.count == 5 for summary in (point.cold, point.l1, point.l2))

    interrupt_after(9, lambda: kvwitness("run", "abc", "--url", url, "--out", cut, "--repeats", 4))
    assert verify_bundle(cut).ok
    assert open_bundle(cut).environment["run"]["missing_rounds"] != []
    assert kvwitness("run", "abc", "--url", url, "--resume", cut).exit_code == 0
    assert verify_bundle(cut).ok
    outcome = outcome_of(load_evidence(cut))
    assert (outcome.standing, outcome.confirmed, outcome.total) == (Standing.PROVEN, 4, 4)


def interrupt_after(requests: int, run: Callable[[], Any]) -> None:
    """Ctrl-C in the middle of a run, once so many requests were answered."""
    plain = ServerClient.generate
    sent = 0

    def generate(self: ServerClient, call: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent > requests:
            raise KeyboardInterrupt
        return plain(self, call)

    ServerClient.generate = generate  # type: ignore[method-assign]
    try:
        assert run().exit_code == 130
    finally:
        ServerClient.generate = plain  # type: ignore[method-assign]


def test_a_server_restarted_with_another_setting(
    kvwitness: Command, stand_environment: StandEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, port = tmp_path / "kvw", free_port()
    model = ensure_model(stand_environment, SilentProgress())

    def server(ratio: float) -> StandServer:
        options = ServerOptions(hicache_ratio=ratio, extra_env={"KVWITNESS_DIR": str(folder)})
        return StandServer(stand_environment, model, options, workdir=tmp_path / f"server-{ratio:g}", port=port)

    out = tmp_path / "bundle"
    with ExitStack() as servers:
        first = servers.enter_context(server(4.0))

        def restart(self: Runner, title: str, wave: Wave) -> None:
            if title.startswith("B:"):
                first.stop()
                servers.enter_context(server(3.0))

        monkeypatch.setattr(Runner, "_phase", restart)
        result = kvwitness("run", "abc", "--url", first.url, "--out", out, "--warmups", 0)
    assert result.exit_code == 1
    assert "hicache_ratio from 4.0 to 3.0" in result.stderr
    assert verify_bundle(out).ok
    page = build_page(load_evidence(out), words_for("en"))
    assert page.claim.sentence == "The experiment failed, and nothing is claimed."
    assert [(one.name, one.one, one.other) for one in page.outcome.changed] == [("hicache_ratio", "4.0", "3.0")]
    assert page.timing.contrasts == ()


def test_without_hooks_the_report_says_what_is_reported(
    kvwitness: Command, start_server: StartServer, tmp_path: Path
) -> None:
    out = tmp_path / "bundle"
    result = kvwitness("run", "abc", "--url", start_server().url, "--out", out)
    assert result.exit_code == 0, result.stderr
    claim = build_page(load_evidence(out), words_for("en")).claim
    assert claim.sentence.startswith("The server attributes prompt tokens of series C to host memory (L2)")
    assert claim.grade == "reported"
    told = " ".join(why.text for why in claim.why)
    assert "the server runs without KVWITNESS_DIR" in told and "sized from the pools" in told
