"""What the server's Python threads are doing, by py-spy: without a patch, and without stopping them.

py-spy reads the memory of a running process, which the system allows to whom it allows ptrace. It is told not to
pause the process (``--nonblocking``), so a sample may be torn; py-spy drops those.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import psutil

RATE_HZ: Final = 100
_MARKS: Final = ("load_back", "start_loading", "loading_check", "ready_to_load", "init_load_back")
"""Functions of SGLang that a load-back goes through (0.4.6 to 0.5.23)."""
_KEPT: Final = 40
_VERSION: Final = re.compile(r"^Python v(\S+)", re.MULTILINE)
_GRACE_S: Final = 20.0
_PTRACE_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")


class StacksRefused(Exception):
    """Stacks cannot be taken of a process: what is wrong, and what to do about it."""


class StackSamples(msgspec.Struct, frozen=True, tag="stacks"):
    """Stacks of one process over a while, outermost frame first, ``file:line`` behind each name."""

    pid: int
    from_ns: int
    at_ns: int
    rate_hz: int
    samples: int
    load_back_samples: int
    """Samples with a function of a load-back in them."""
    stacks: tuple[tuple[str, int], ...]
    """Those with their counts, the most frequent first; at most :data:`_KEPT`."""


def find_py_spy() -> str:
    """The py-spy beside this Python, or on PATH. Raises :class:`StacksRefused`."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    if found is None:
        raise StacksRefused("there is no py-spy: pip install py-spy")
    return found


def check_allowed(pid: int, scope_file: Path = _PTRACE_SCOPE) -> None:
    """Whether this user may read a process's memory. Raises :class:`StacksRefused`."""
    try:
        owner = psutil.Process(pid).uids().real
    except psutil.NoSuchProcess as error:
        raise StacksRefused(f"process {pid} has ended") from error
    except psutil.AccessDenied as error:
        raise StacksRefused(f"process {pid} may not be looked at: run as its user") from error
    if os.geteuid() == 0:
        return
    if owner != os.getuid():
        raise StacksRefused(f"process {pid} belongs to another user: run as that user, or as root")
    with contextlib.suppress(OSError, ValueError):
        scope = int(scope_file.read_text())
        if scope:
            raise StacksRefused(
                f"ptrace is not permitted here (kernel.yama.ptrace_scope is {scope}): run as root, "
                "or leave the stacks out"
            )


def sample(pid: int, seconds: float, py_spy: str | None = None) -> StackSamples:
    """Sample one process for a while. Blocks that long. Raises :class:`StacksRefused`."""
    program = py_spy or find_py_spy()
    began = time.time_ns()
    with tempfile.TemporaryDirectory(prefix="kvwitness-stacks-") as folder:
        out = Path(folder) / "stacks"
        command = [program, "record", "--pid", str(pid), "--nonblocking", "--format", "raw", "--output", str(out)]
        command += ["--rate", str(RATE_HZ), "--duration", str(max(1, round(seconds)))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + _GRACE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise StacksRefused(f"py-spy does not come back from process {pid}") from error
        if not out.is_file():
            raise StacksRefused(_why(pid, done.stderr))
        return _counted(pid, began, out.read_text("utf-8", "replace").splitlines())


def python_of(pid: int, py_spy: str | None = None) -> str | None:
    """The Python version that a process runs; None where py-spy cannot tell."""
    command = [py_spy or find_py_spy(), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GRACE_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    found = _VERSION.search(done.stdout)
    return found[1] if found else None


def _counted(pid: int, began: int, lines: Iterable[str]) -> StackSamples:
    counts = parse_raw(lines)
    inside = Counter({stack: n for stack, n in counts.items() if any(mark in stack for mark in _MARKS)})
    return StackSamples(
        pid, began, time.time_ns(), RATE_HZ, counts.total(), inside.total(), tuple(inside.most_common(_KEPT))
    )


def parse_raw(lines: Iterable[str]) -> Counter[str]:
    """Stacks and their counts in py-spy's raw format. Folders of the machine are left out of the frames."""
    counts: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if stack and count.isdigit():
            counts[";".join(_frame(frame) for frame in stack.split(";"))] += int(count)
    return counts


def _frame(frame: str) -> str:
    name, bracket, place = frame.partition(" (")
    if not bracket:
        return frame
    file, colon, line = place.rstrip(")").rpartition(":")
    at = file.rfind("site-packages/")
    short = file[at + len("site-packages/") :] if at >= 0 else file.rsplit("/", 1)[-1]
    return f"{name} ({short}{colon}{line})"


def _why(pid: int, text: str) -> str:
    lower = text.lower()
    if "permission denied" in lower or "operation not permitted" in lower:
        return f"ptrace of process {pid} is not permitted: run as root, or leave the stacks out"
    if "no such process" in lower or "failed to find a python" in lower or "no such file" in lower:
        return f"process {pid} has ended, or is not a Python process"
    lines = [line for line in text.splitlines() if line.strip()]
    return f"py-spy cannot read process {pid}: {lines[-1].strip() if lines else 'it said nothing'}"
