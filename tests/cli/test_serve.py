"""`kvwitness serve` around a real child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHOW = (
    "import json, os, sys; json.dump({k: os.environ.get(k) for k in ('KVWITNESS_DIR', 'PYTHONPATH')} "
    "| {'argv': sys.argv[1:]}, sys.stdout)"
)
WAIT = (
    "import signal, sys, time\n"
    "def end(number, frame): print('got', number, flush=True); sys.exit(7)\n"
    "signal.signal(signal.SIGTERM, end); signal.signal(signal.SIGINT, end)\n"
    "print('ready', flush=True); time.sleep(60)"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", "/some/where")
    monkeypatch.chdir(home)
    return home


def test_the_child_sees_the_way_in(program: list[str], home: Path) -> None:
    command = [*program, "serve", "--dir", "data", sys.executable, "-c", SHOW, "--port", "1", "--json", "--dir", "x"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    seen = json.loads(run.stdout)
    assert seen["KVWITNESS_DIR"] == str(home / "data")
    assert seen["argv"] == ["--port", "1", "--json", "--dir", "x"]
    first, *rest = seen["PYTHONPATH"].split(os.pathsep)
    assert rest == ["/some/where"]
    assert (Path(first) / "kvwitness" / "patches" / "recorder.py").is_file()
    assert Path(first).is_relative_to(home / "data")
    first_line, second_line = run.stderr.splitlines()
    assert first_line == f"kvwitness records into {home / 'data'}"
    assert second_line.startswith("nothing was recorded")  # this child is no SGLang
    assert [path.name for path in home.iterdir()] == ["data"]


def test_the_share_of_pages_to_compare_reaches_the_child(program: list[str], home: Path) -> None:
    show = "import os; print(os.environ['KVWITNESS_DIGEST'])"
    command = [*program, "serve", "--dir", "data", "--digest", "1/4", "--", sys.executable, "-c", show]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1/4\n"
    command[command.index("1/4")] = "half"
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "half" in refused.stderr and "sample, all and 1/N" in refused.stderr


def test_on_standby_the_child_is_told_so(program: list[str], home: Path) -> None:
    show = "import os; print(os.environ['KVWITNESS_STANDBY'], os.environ['KVWITNESS_DIR'])"
    command = [*program, "serve", "--dir", "data", "--standby", "--", sys.executable, "-c", show]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == f"1 {home / 'data'}\n"
    # Nothing is to be recorded, so that nothing was is not worth a line.
    assert run.stderr == f"kvwitness is on standby: kvwitness attach --dir {home / 'data'} --url URL\n"


def test_sglang_would_find_the_plugin(program: list[str], home: Path) -> None:
    code = (
        "from importlib.metadata import entry_points; "
        "print([e.value for e in entry_points(group='sglang.srt.plugins') if e.name == 'kvwitness'])"
    )
    command = [*program, "serve", "--dir", "data", "--", sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "kvwitness.patches.entry:plugin" in run.stdout


def test_the_default_directory_is_new(program: list[str], home: Path) -> None:
    run = subprocess.run(
        [*program, "serve", "--json", "--", sys.executable, "-c", "pass"], capture_output=True, text=True, check=True
    )
    directory = Path(json.loads(run.stdout)["directory"])
    assert directory.parent == home / "kvwitness-data"
    assert directory.is_dir()
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_the_childs(program: list[str], home: Path, code: str, expected: int) -> None:
    run = subprocess.run([*program, "serve", "--", sys.executable, "-c", code], capture_output=True)
    assert run.returncode == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(program: list[str], home: Path, number: signal.Signals) -> None:
    command = [*program, "serve", "--", sys.executable, "-c", WAIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == f"got {int(number)}\n"
        assert process.wait(20) == 7


def test_an_interrupt_from_the_terminal_arrives_once(program: list[str], home: Path) -> None:
    counting = (
        "import signal, time\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))\n"
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 20\n"
        "while not seen and time.monotonic() < end: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "print('seen', len(seen), flush=True)"
    )
    leader, follower = os.openpty()
    command = [*program, "serve", "--", sys.executable, "-c", counting]
    # `setsid --ctty` makes the terminal the children's controlling one, as in a person's shell.
    with subprocess.Popen(["setsid", "--ctty", "--wait", *command], stdin=follower, stdout=follower, stderr=follower):
        os.close(follower)
        text = _read_until(leader, "ready")
        os.write(leader, b"\x03")
        text += _read_until(leader, "seen")
        text += _read_until(leader, "\n")
    os.close(leader)
    assert "seen 1" in text


def _read_until(terminal: int, word: str) -> str:
    text, end = "", time.monotonic() + 20
    while word not in text and time.monotonic() < end:
        try:
            text += os.read(terminal, 1000).decode()
        except OSError:  # the other side is closed
            break
    return text
