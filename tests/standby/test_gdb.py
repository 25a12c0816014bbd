"""What is made of what gdb says, where it does not do what it was asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvwitness.collectors.live import gdb as gdb_module
from kvwitness.collectors.live.gdb import NotInjected, gdb_command, run_in, size_of
from kvwitness.collectors.live.interpreter import interpreter_of

GONE = 2**22 + 1
"""No process id: Linux has none that high."""


def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, then: str = "exit 1") -> None:
    """A gdb that prints these lines."""
    (tmp_path / "gdb").write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"{then}\n")
    (tmp_path / "gdb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("line", "text", "denied"),
    [
        ("ptrace: Operation not permitted.", "ptrace is not permitted", True),
        ("warning: process 7 is already traced by process 8", "another debugger", False),
        ("ptrace: No such process.", "it has ended", False),
        ("Cannot access memory at address 0x0", "gdb says: Cannot access memory", False),
        (
            "Couldn'\\''t write extended state status: Bad address.",
            "too old for the processor; .* KVWITNESS_GDB",
            False,
        ),
        ("kvwitness: failed the queue of pending calls is full", "queue of pending calls is full", False),
    ],
)
def test_causes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, text: str, denied: bool) -> None:
    says(tmp_path, monkeypatch, "kvwitness: stop", line)
    with pytest.raises(NotInjected, match=text) as raised:
        run_in(GONE, interpreter_of(os.getpid()), "pass", 0)
    assert raised.value.denied is denied


def test_a_gdb_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdb_module, "_TIMEOUT_S", 0.2)
    says(tmp_path, monkeypatch, "kvwitness: stop", then=f"exec {sys.executable} -c 'import time; time.sleep(60)'")
    with pytest.raises(NotInjected, match="gdb says"):
        run_in(GONE, interpreter_of(os.getpid()), "pass", 0)


def test_another_gdb_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    other = tmp_path / "cuda-gdb"
    other.write_text("#!/bin/sh\necho 'exec: cuda-gdb -nx'\necho 'NVIDIA (R) cuda-gdb 13.0'\n")
    other.chmod(0o755)
    monkeypatch.setenv("KVWITNESS_GDB", str(other))
    assert gdb_command() == str(other)
    assert gdb_module._version() == "cuda-gdb 13.0"


def test_memory_is_whole_pages_with_room_for_the_end() -> None:
    assert size_of("x" * 4095) == 4096 and size_of("x" * 4096) == 8192
