"""``sitecustomize`` as the way into SGLang releases without a plugin group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvwitness.tracer.stand.paths import stand_path

SHOW = "import sys; print([m for m in ('kvwitness.patches.install', 'theirs') if m in sys.modules])"


@pytest.fixture
def way_in(tmp_path: Path) -> Path:
    return stand_path(tmp_path / "way-in")


def sglang(folder: Path, *, plugins: bool) -> Path:
    """The outline of an SGLang installation."""
    (folder / "sglang" / "srt").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text("raise RuntimeError('imported too early')\n")
    if plugins:
        (folder / "sglang" / "srt" / "plugins").mkdir()
        (folder / "sglang" / "srt" / "plugins" / "__init__.py").touch()
    return folder


def run(*path: Path, directory: Path | None, code: str = SHOW) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("KVWITNESS", "PYTHON"))}
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    if directory is not None:
        env["KVWITNESS_DIR"] = str(directory)
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_an_older_sglang_is_hooked_while_the_interpreter_starts(way_in: Path, tmp_path: Path) -> None:
    old = sglang(tmp_path / "old", plugins=False)
    assert "kvwitness.patches.install" in run(way_in, old, directory=tmp_path)


@pytest.mark.parametrize("case", ["off", "newer", "no sglang"])
def test_otherwise_it_is_idle(way_in: Path, tmp_path: Path, case: str) -> None:
    path = {
        "off": [sglang(tmp_path / "old", plugins=False)],
        "newer": [sglang(tmp_path / "new", plugins=True)],
        "no sglang": [],
    }[case]
    assert run(way_in, *path, directory=None if case == "off" else tmp_path) == "[]"


@pytest.mark.parametrize("directory", [None, "data"])
def test_another_sitecustomize_still_runs(way_in: Path, tmp_path: Path, directory: str | None) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "theirs.py").touch()
    (other / "sitecustomize.py").write_text("import theirs\n")
    assert "theirs" in run(way_in, other, directory=tmp_path / directory if directory else None)


def test_several_of_them_are_each_gone_through_once(way_in: Path, tmp_path: Path) -> None:
    old = sglang(tmp_path / "old", plugins=False)
    others = [stand_path(tmp_path / name) for name in ("second", "third")]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "theirs.py").touch()
    (theirs / "sitecustomize.py").write_text("import theirs\n")
    seen = run(way_in, *others, theirs, old, directory=tmp_path)
    assert "kvwitness.patches.install" in seen
    assert "'theirs'" in seen


def test_a_broken_setting_does_not_keep_the_interpreter_from_starting(way_in: Path, tmp_path: Path) -> None:
    old = sglang(tmp_path / "old", plugins=False)
    code = "import os; print('up')"
    assert run(way_in, old, directory=tmp_path, code=code) == "up"
    (way_in / "kvwitness" / "patches").unlink()
    assert run(way_in, old, directory=tmp_path, code=code) == "up"
