"""The commands that kvwitness proposes can be copied."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvwitness.tracer.cli.program import program, runnable


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kvwitness in a virtual environment below the current folder, and a PATH without it."""
    path = tmp_path / ".venv" / "bin" / "kvwitness"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!{sys.executable}\nfrom kvwitness.tracer.cli import main\nmain()\n")
    path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return path


def test_off_the_path_it_is_called_by_its_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(installed)])
    assert program() == ".venv/bin/kvwitness"
    monkeypatch.chdir("/usr")
    assert program() == str(installed)


def test_on_the_path_it_is_called_by_its_name(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(installed)])
    monkeypatch.setenv("PATH", str(installed.parent))
    assert program() == "kvwitness"
    assert runnable("see `kvwitness verify x`") == "see `kvwitness verify x`"


def test_another_kvwitness_on_the_path_is_not_this_one(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = installed.with_name("other")
    other.mkdir()
    shutil.copy(installed, other / "kvwitness")
    monkeypatch.setenv("PATH", str(other))
    monkeypatch.setattr("sys.argv", [str(installed)])
    assert program() == ".venv/bin/kvwitness"


def test_errors_propose_what_can_be_called(installed: Path, data: Path) -> None:
    run = subprocess.run([".venv/bin/kvwitness", "verify", str(data)], capture_output=True, text=True)
    assert run.returncode == 2
    assert "`.venv/bin/kvwitness show` and `.venv/bin/kvwitness explain` read it as it is" in run.stderr
