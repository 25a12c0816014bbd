"""The gdb that the tests go into processes with, which is the product's own choice; and ones that only say things."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwitness.collectors.live.debugger import Gdb, NoGdb, find_gdb
from kvwitness.collectors.live.interpreter import interpreter_of
from kvwitness.collectors.live.preflight import LiveWay, look_for_gdb, takes_gdb

_FOUND = look_for_gdb()
needs_gdb = pytest.mark.skipif(bool(_FOUND.problem), reason=f"{_FOUND.problem} (make gdb)")


def way_into(pid: int) -> LiveWay:
    """By the gdb of this machine, or by the process's own Python."""
    interpreter = interpreter_of(pid)
    return LiveWay(interpreter, find_gdb() if takes_gdb(interpreter.shown_version) else None)


def saying_gdb(folder: Path, *lines: str, version: str = "GNU gdb (GDB) 18.1", then: str = "exit 1") -> Path:
    """A gdb that knows its version, and prints these lines where it is asked for anything else."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gdb"
    said = "".join(f"echo '{line}'\n" for line in lines)
    path.write_text(f"#!/bin/sh\ncase $* in *--version*) echo '{version}'; exit 0;; esac\n{said}{then}\n")
    path.chmod(0o755)
    return path


def no_gdb() -> Gdb:
    """Stands in for ``find_gdb`` where there is none."""
    raise NoGdb("gdb is not installed", "install it: pip install 'kvwitness[live]'")
