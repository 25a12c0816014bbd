"""gdb queues a pending call in a running CPython and lets go of it; the interpreter makes the call by itself.

No Python code runs while the process is stopped, no lock of the interpreter or of malloc is taken: memory comes
from ``mmap``, its bytes are written by gdb, and ``Py_AddPendingCall`` puts ``PyRun_SimpleString`` with them into
the queue that the main thread empties between two byte codes. Other threads run while the two functions are
called, so that none of them holds what these wait for.

gdb is told all addresses and reads no symbols: with those of some hundred libraries a scheduler was seen to stand
still for 17 s, without them for 0.2 s.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvwitness.collectors.live.debugger import KNOWS_AMX, Gdb
from kvwitness.collectors.live.interpreter import MAP, PENDING, RUN, UNMAP, Interpreter

ADDRESS_DIGITS: Final = 16
_PAGE: Final = 4096
_TIMEOUT_S: Final = 60.0
_INTERRUPT_S: Final = 10.0
_MARK: Final = "kvwitness:"
_QUIET: Final = (
    "set auto-solib-add off",
    "set auto-load off",
    "set debuginfod enabled off",
    "set sysroot /nonexistent",
)
_MMAP_TYPE: Final = "unsigned long (*)(unsigned long, unsigned long, int, int, int, long)"
_READ_WRITE: Final = 3
_PRIVATE_ANONYMOUS: Final = 0x22


class NotInjected(Exception):
    """The process goes on as it was; the message says why, in a few words. ``denied``: ptrace is not permitted."""

    def __init__(self, text: str, *, denied: bool = False) -> None:
        super().__init__(text)
        self.denied = denied


@dataclass(frozen=True, slots=True)
class Stop:
    """How long the process stood still at most, and by whose hand."""

    seconds: float
    tool: str


def run_in(pid: int, interpreter: Interpreter, gdb: Gdb, text: str, address_at: int) -> Stop:
    """Have ``gdb`` make process ``pid`` run the Python source ``text`` on its main thread, soon.

    At ``address_at`` the text has :data:`ADDRESS_DIGITS` zeros, which become the hexadecimal address of the memory
    that it lies in; its size is :func:`size_of`. Raises :class:`NotInjected`.
    """
    with tempfile.TemporaryDirectory(prefix="kvwitness-gdb-") as folder:
        Path(folder, "text").write_bytes(text.encode() + b"\0")
        Path(folder, "script").write_text(_script(pid, interpreter, size_of(text), address_at))
        return _run(gdb, folder)


def size_of(text: str) -> int:
    """Bytes of memory that :func:`run_in` maps for ``text``."""
    return -(-(len(text.encode()) + 1) // _PAGE) * _PAGE


def _script(pid: int, interpreter: Interpreter, size: int, address_at: int) -> str:
    at = interpreter.addresses
    return f"""\
set pagination off
set confirm off
set width 0
set language c
set print thread-events off
set unwindonsignal on
handle all nostop noprint pass
handle SIGSEGV SIGBUS SIGILL SIGFPE SIGABRT stop print nopass
echo {_MARK} stop\\n
attach {pid}
echo {_MARK} stopped\\n
set $memory = (({_MMAP_TYPE}) {at[MAP]:#x})(0, {size}, {_READ_WRITE}, {_PRIVATE_ANONYMOUS}, -1, 0)
if $memory % {_PAGE} != 0
  echo {_MARK} failed the process could not map memory\\n
else
  eval "restore text binary %lu", $memory
  set $i = 0
  while $i < {ADDRESS_DIGITS}
    set $digit = ($memory >> (4 * ({ADDRESS_DIGITS - 1} - $i))) & 15
    set {{unsigned char}} ($memory + {address_at} + $i) = ($digit < 10 ? 48 : 87) + $digit
    set $i = $i + 1
  end
  set $queued = ((int (*)(unsigned long, unsigned long)) {at[PENDING]:#x})({at[RUN]:#x}, $memory)
  if $queued == 0
    echo {_MARK} queued\\n
  else
    echo {_MARK} failed the queue of pending calls is full\\n
    set $gone = ((int (*)(unsigned long, unsigned long)) {at[UNMAP]:#x})($memory, {size})
  end
end
detach
echo {_MARK} let go\\n
"""


def _run(gdb: Gdb, folder: str) -> Stop:
    command = [
        *gdb.command,
        "-nx",
        "-q",
        "-batch",
        *(part for line in _QUIET for part in ("-iex", line)),
        "-x",
        "script",
    ]
    marks: dict[str, float] = {}
    said: list[str] = []
    # A session of its own: Ctrl-C must not reach it while it holds the process.
    with subprocess.Popen(
        command,
        cwd=folder,
        env=gdb.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as running:
        late = threading.Timer(_TIMEOUT_S, _end, (running,))
        late.start()
        try:
            assert running.stdout is not None
            for line in running.stdout:
                if line.startswith(_MARK):
                    marks[line.removeprefix(_MARK).strip()] = time.monotonic()
                elif line.strip():
                    said.append(line.strip())
        finally:
            late.cancel()
        running.wait()
        ended = time.monotonic()
    failed = next((mark.removeprefix("failed ") for mark in marks if mark.startswith("failed ")), None)
    if failed is not None:
        raise NotInjected(failed)
    if "queued" not in marks:
        raise _not_injected(gdb, said)
    return Stop(marks.get("let go", ended) - marks["stop"], gdb.name)


def _end(gdb: subprocess.Popen[str]) -> None:
    """Have a gdb that hangs undo what it began and let go; what does not heed that is killed."""
    gdb.send_signal(2)
    try:
        gdb.wait(_INTERRUPT_S)
    except subprocess.TimeoutExpired:
        gdb.kill()


def _not_injected(gdb: Gdb, said: list[str]) -> NotInjected:
    text = "\n".join(said)
    if "already traced" in text:
        return NotInjected("another debugger is attached to it")
    if "No such process" in text:
        return NotInjected("it has ended")
    if "Operation not permitted" in text:
        return NotInjected("ptrace is not permitted", denied=True)
    if "extended state" in text:
        # Seen of gdb 13.1 on a processor with AMX, where nothing told beforehand that it has more registers.
        what = f"{gdb.name} is too old for the processor, and gdb {KNOWS_AMX} the oldest for one with AMX"
        return NotInjected(f"{what}: {gdb.newer}")
    # That it let go is always the last thing that it says.
    why = [line for line in said if not line.startswith("[Inferior")]
    return NotInjected(f"gdb says: {why[-1] if why else 'nothing'}")
