"""What is made of what gdb says, where it does not do what it was asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from gdb_tools import saying_gdb

from kvwitness.collectors.live import gdb as gdb_module
from kvwitness.collectors.live.debugger import Gdb
from kvwitness.collectors.live.gdb import NotInjected, run_in, size_of
from kvwitness.collectors.live.interpreter import interpreter_of

GONE = 2**22 + 1
"""No process id: Linux has none that high."""


def says(tmp_path: Path, *lines: str, then: str = "exit 1") -> Gdb:
    return Gdb((str(saying_gdb(tmp_path, *lines, then=then)),), "gdb 13.1", (13, 1))


@pytest.mark.parametrize(
    ("line", "text", "denied"),
    [
        ("ptrace: Operation not permitted.", "ptrace is not permitted", True),
        ("warning: process 7 is already traced by process 8", "another debugger", False),
        ("ptrace: No such process.", "it has ended", False),
        ("Cannot access memory at address 0x0", "gdb says: Cannot access memory", False),
        (
            "Couldn'\\''t write extended state status: Bad address.",
            r"gdb 13.1 is too old for the processor, .* gdb 14 .*pip install 'kvwitness\[live\]' .*KVWITNESS_GDB",
            False,
        ),
        ("kvwitness: failed the queue of pending calls is full", "queue of pending calls is full", False),
    ],
)
def test_causes(tmp_path: Path, line: str, text: str, denied: bool) -> None:
    gdb = says(tmp_path, "kvwitness: stop", line)
    with pytest.raises(NotInjected, match=text) as raised:
        run_in(GONE, interpreter_of(os.getpid()), gdb, "pass", 0)
    assert raised.value.denied is denied


def test_a_gdb_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdb_module, "_TIMEOUT_S", 0.2)
    gdb = says(tmp_path, "kvwitness: stop", then=f"exec {sys.executable} -c 'import time; time.sleep(60)'")
    with pytest.raises(NotInjected, match="gdb says"):
        run_in(GONE, interpreter_of(os.getpid()), gdb, "pass", 0)


def test_memory_is_whole_pages_with_room_for_the_end() -> None:
    assert size_of("x" * 4095) == 4096 and size_of("x" * 4096) == 8192
