"""Fixtures for tests of the command: a runner, and a bundle of a small run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bundle.runs import simple_judge, small_run
from click.testing import CliRunner, Result

from kvwitness.tracer.bundle import write_bundle
from kvwitness.tracer.cli.application import application


class Command:
    """The ``kvwitness`` command within this process."""

    def __call__(self, *args: object) -> Result:
        result = CliRunner().invoke(application, [str(arg) for arg in args], prog_name="kvwitness")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result


@pytest.fixture
def kvwitness() -> Command:
    return Command()


@pytest.fixture(autouse=True)
def judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvwitness.tracer.judgement.judge", simple_judge)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of journals."""
    small_run(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", small_run(tmp_path / "recorded")).path


@pytest.fixture
def program() -> list[str]:
    """The ``kvwitness`` command as a process of its own."""
    return [sys.executable, "-c", "from kvwitness.tracer.cli import main; main()"]
