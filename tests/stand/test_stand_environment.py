from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvwitness.tracer.stand import environment as env_module
from kvwitness.tracer.stand.building import MARKER, StandBuildError, build_once, run_reported
from kvwitness.tracer.stand.environment import (
    ensure_environment,
    environment_key,
    environment_ready,
    environment_root,
    pins_text,
    venv_python,
)
from kvwitness.tracer.stand.places import stand_home
from kvwitness.tracer.stand.progress import PlainProgress, Progress, SilentProgress


class FakePip:
    """Makes an environment with nothing but an interpreter in it, and counts how often."""

    def __init__(self, failures: int = 0) -> None:
        self.runs = 0
        self.failures = failures

    def __call__(self, venv: Path, pins_file: Path, log: Path, progress: Progress) -> None:
        self.runs += 1
        assert "sglang==0.5.23" in pins_file.read_text()
        (venv / "bin").mkdir(parents=True)
        if self.runs <= self.failures:
            raise StandBuildError("no network")
        (venv / "bin" / "python").touch()


def test_pins_are_exact_and_nothing_else() -> None:
    lines = pins_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    assert {"torch==2.14.1", "sglang==0.5.23"} <= set(lines)
    assert len({line.split("==")[0] for line in lines}) == len(lines)


def test_key_changes_with_each_thing_that_it_stands_for() -> None:
    key = environment_key("a==1\n", (3, 11))
    assert key == environment_key("a==1\n", (3, 11))
    others = {
        environment_key("a==2\n", (3, 11)),
        environment_key("a==1\n", (3, 12)),
        environment_key("a==1\n", (3, 11), layout=99),
    }
    assert len(others | {key}) == 4


def test_home_follows_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVWITNESS_STAND_HOME", str(tmp_path / "own"))
    assert stand_home() == tmp_path / "own"
    monkeypatch.delenv("KVWITNESS_STAND_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert stand_home() == tmp_path / "cache" / "kvwitness" / "stand"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert stand_home() == tmp_path / ".cache" / "kvwitness" / "stand"


def test_finished_environment_is_not_built_again(tmp_path: Path) -> None:
    pip = FakePip()
    first = ensure_environment(SilentProgress(), home=tmp_path, install=pip)
    second = ensure_environment(SilentProgress(), home=tmp_path, install=pip)

    assert pip.runs == 1
    assert first == second
    assert environment_ready(first.root)
    assert json.loads((first.root / MARKER).read_text())["sglang"] == "0.5.23"


def test_environment_that_failed_half_way_is_built_again(tmp_path: Path) -> None:
    pip = FakePip(failures=1)
    with pytest.raises(StandBuildError):
        ensure_environment(SilentProgress(), home=tmp_path, install=pip)
    root = environment_root(home=tmp_path)
    assert root.exists() and not environment_ready(root)
    (root / "left-over").touch()

    built = ensure_environment(SilentProgress(), home=tmp_path, install=pip)

    assert pip.runs == 2
    assert environment_ready(built.root)
    assert not (built.root / "left-over").exists()


def test_environment_whose_interpreter_is_gone_is_built_again(tmp_path: Path) -> None:
    pip = FakePip()
    built = ensure_environment(SilentProgress(), home=tmp_path, install=pip)
    venv_python(built.root).unlink()
    assert not environment_ready(built.root)

    ensure_environment(SilentProgress(), home=tmp_path, install=pip)

    assert pip.runs == 2


def test_second_builder_waits_and_uses_the_first_ones_result(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()
    builds: list[str] = []

    def slow(folder: Path) -> dict[str, str]:
        builds.append("slow")
        started.set()
        assert go.wait(10)
        return {}

    def never(folder: Path) -> dict[str, str]:
        builds.append("never")
        return {}

    target = tmp_path / "thing"
    first = threading.Thread(target=build_once, args=(target, slow, SilentProgress()))
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=build_once, args=(target, never, SilentProgress()))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go.set()
    first.join(10)
    second.join(10)
    assert builds == ["slow"]


def test_too_little_room_is_said_before_pip_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(env_module, "MIN_FREE_BYTES", 10**18)
    with pytest.raises(StandBuildError, match="KVWITNESS_STAND_HOME"):
        ensure_environment(SilentProgress(), home=tmp_path)


def test_failing_command_shows_its_last_lines(tmp_path: Path) -> None:
    script = "print('useful reason'); raise SystemExit(3)"
    with pytest.raises(StandBuildError, match=r"(?s)exit status 3.*useful reason"):
        run_reported([sys.executable, "-c", script], tmp_path / "log", SilentProgress())
    assert "useful reason" in (tmp_path / "log").read_text()


def test_plain_progress_prints_phases_and_now_and_then_a_detail() -> None:
    out = io.StringIO()
    quiet = PlainProgress(out, interval_s=3600)
    quiet.phase("installing")
    quiet.detail("Collecting a")
    assert out.getvalue() == "installing\n"
    chatty = PlainProgress(out, interval_s=0)
    chatty.phase("installing")
    chatty.detail("Collecting b")
    assert out.getvalue().endswith("(0 s): Collecting b\n")


def test_kvwitness_patches_import_without_the_tools_dependencies() -> None:
    # The stand's own parser is what the tool side borrows; it must not pull in torch.
    script = "import kvwitness.patches.stand.faults, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
