"""What a log says of a long step that says nothing itself."""

from __future__ import annotations

import io
import re
import time

import pytest

from kvwitness.tracer.stand import progress
from kvwitness.tracer.stand.progress import PLAIN_INTERVAL_S, reporting


def test_a_silent_step_is_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.1)
    monkeypatch.setattr(progress, "_TICK_S", 0.02)
    log = io.StringIO()
    with reporting(log) as report:
        report.phase("Starting the server")
        time.sleep(0.5)
        report.phase("Stopping it")
    lines = log.getvalue().splitlines()
    assert lines[0] == "Starting the server"
    assert lines[-1] == "Stopping it"
    assert len(lines) >= 4
    assert all(re.fullmatch(r"Starting the server \(\d s\)", line) for line in lines[1:-1])


def test_nothing_is_said_between_steps_and_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_TICK_S", 0.01)
    log = io.StringIO()
    with reporting(log) as report:
        time.sleep(0.1)
        report.phase("Installing")
        for number in range(100):
            report.detail(f"package {number}")
        time.sleep(0.1)
    assert log.getvalue() == "Installing\n"
    assert PLAIN_INTERVAL_S == 30
