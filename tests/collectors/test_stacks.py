"""Stacks by py-spy: of a real process, and where that is not permitted."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwitness.collectors.stacks import StacksRefused, check_allowed, find_py_spy, parse_raw, python_of, sample

PROGRAM = """
import time
def init_load_back():
    while True:
        sum(range(1000))
print("ready", flush=True)
init_load_back()
"""


@pytest.fixture
def busy() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


def test_a_load_back_is_seen_in_the_stacks_of_a_running_process(busy: int) -> None:
    found = sample(busy, 1.0)
    assert found.samples and found.load_back_samples and "init_load_back" in found.stacks[0][0]
    assert found.pid == busy and found.from_ns < found.at_ns
    assert python_of(busy) == platform.python_version()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_users_process_is_refused_in_one_line(busy: int) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            check_allowed(busy)
        except StacksRefused as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as said:
        assert "another user" in (line := said.read()) or "may not be looked at" in line


def test_a_process_that_has_ended_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(StacksRefused, match="has ended"):
        check_allowed(process.pid)
    with pytest.raises(StacksRefused, match="has ended, or is not a Python process"):
        sample(process.pid, 1.0)


def test_ptrace_that_is_not_permitted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = tmp_path / "ptrace_scope"
    scope.write_text("1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(StacksRefused, match=r"ptrace is not permitted here .*ptrace_scope is 1"):
        check_allowed(os.getpid(), scope)
    scope.write_text("0\n")
    check_allowed(os.getpid(), scope)


def test_what_py_spy_says_about_permission_is_one_line(tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Permission Denied: Try running again with sudo' >&2\nexit 1\n")
    program.chmod(0o700)
    with pytest.raises(StacksRefused, match="ptrace of process 1 is not permitted: run as root"):
        sample(1, 1.0, str(program))


def test_frames_are_kept_without_folders_of_the_machine() -> None:
    lines = [
        "main (/home/me/x.py:3);load_back (/a/site-packages/sglang/srt/mem_cache/hiradix_cache.py:9) 12",
        "bad",
        "",
    ]
    assert parse_raw(lines) == {"main (x.py:3);load_back (sglang/srt/mem_cache/hiradix_cache.py:9)": 12}


def test_the_py_spy_of_this_environment_is_found() -> None:
    assert Path(find_py_spy()).is_file()
