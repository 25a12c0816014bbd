"""What the witnesses of a recording said, line by line, in files that a killed collector leaves readable.

Each witness has a file of JSON lines of its own. A line is written with one system call and never changed. Where
the disk takes no more, lines are counted, and a :class:`Lost` line says so as soon as it takes one again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from kvwitness.collectors.kv_events import KvDamaged, KvGap, KvMessage, KvRestart
from kvwitness.collectors.stacks import StackSamples

RECORDING: Final = "recording.jsonl"
KV_EVENTS: Final = "kv-events.jsonl"
METRICS_LINES: Final = "metrics.jsonl"
SERVER: Final = "server.jsonl"
HOST: Final = "host.jsonl"
STACKS: Final = "stacks.jsonl"
FILES: Final = (RECORDING, KV_EVENTS, METRICS_LINES, SERVER, HOST, STACKS)


class Head(msgspec.Struct, frozen=True, tag="head"):
    """How a recording began. ``not_recorded``: witness -> why it has none."""

    url: str
    kvwitness: str
    begin_ns: int
    interval_s: float
    shared_key: bool
    """Prefixes are named as in the journals of the server's data folder."""
    not_recorded: dict[str, str]


class End(msgspec.Struct, frozen=True, tag="end"):
    """It ended in order. Without this line the collector was killed."""

    at_ns: int
    why: str


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """Lines that could not be written between two moments (ns since the epoch)."""

    lines: int
    from_ns: int
    to_ns: int
    cause: str


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """What the server's metrics gained between two readings, one number per counter and label."""

    from_ns: int
    at_ns: int
    reset: bool
    """The server's counters went down: it was restarted, and what it counted in between is not known."""
    gained: dict[str, float]
    """``counter`` or ``counter{label}``, as :func:`kvwitness.tracer.outside.counting.gains` names them."""
    gauges: dict[str, float]


class Unanswered(msgspec.Struct, frozen=True, tag="unanswered"):
    """A witness did not answer at a moment."""

    at_ns: int
    problem: str


class Server(msgspec.Struct, frozen=True, tag="server"):
    """What the server says it is."""

    at_ns: int
    facts: dict[str, Any]
    processes: tuple[dict[str, Any], ...]


class HostReading(msgspec.Struct, frozen=True, tag="host"):
    """Memory of the machine and of the server's processes at a moment, in bytes."""

    at_ns: int
    available: int
    swap_used: int
    server_rss: int | None
    numa_free: dict[str, int] = {}
    gpu_used_mib: dict[str, int] = {}


Line = (
    Head
    | End
    | Lost
    | Counted
    | Unanswered
    | Server
    | HostReading
    | StackSamples
    | KvMessage
    | KvGap
    | KvRestart
    | KvDamaged
)
T = TypeVar("T")


class LinesFile:
    """One witness's file. Used by one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        """None until the first line: a disk that is full from the start must not end the recording either."""
        self._end = 0
        self._lost = 0
        self._lost_since = 0
        self._cause = ""

    @property
    def lost(self) -> int:
        """Lines that are not in the file and that no line tells of yet."""
        return self._lost

    @property
    def problem(self) -> str:
        """Why the last line could not be written; empty when it was."""
        return self._cause

    def write(self, line: Line) -> None:
        """Append a line. Never raises: what cannot be written is counted."""
        if self._lost:
            told = Lost(self._lost, self._lost_since, time.time_ns(), self._cause)
            if not self._append(told):
                self._lost += 1
                return
            self._lost, self._cause = 0, ""
        if not self._append(line):
            self._lost, self._lost_since = 1, time.time_ns()

    def _append(self, line: Line) -> bool:
        raw = msgspec.json.encode(line) + b"\n"
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            written = os.write(self._fd, raw)
            if written == len(raw):
                self._end += written
                return True
            self._cause = "the disk is full"
        except OSError as error:
            self._cause = error.strerror or str(error)
            if self._fd is None:
                return False
        try:
            os.ftruncate(self._fd, self._end)
        except OSError:
            self._end = os.fstat(self._fd).st_size  # The reader skips a line that is not whole.
        return False

    def close(self) -> None:
        if self._lost:
            self._append(Lost(self._lost, self._lost_since, time.time_ns(), self._cause))
        if self._fd is not None:
            os.close(self._fd)


class Writer:
    """The files of one recording; opened when the first line for them comes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, mode=0o700)
        self._folder = folder
        self._files: dict[str, LinesFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    @property
    def problems(self) -> Mapping[str, str]:
        """File -> why it takes no lines at the moment."""
        return {name: file.problem for name, file in self._files.items() if file.problem}

    def write(self, name: str, line: Line) -> None:
        """Append a line to the file ``name``. Each file belongs to one thread."""
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = LinesFile(self._folder / name)
        file.write(line)


class Recording(msgspec.Struct, frozen=True):
    """A recording as read: its lines by file, and what is wrong with them in words."""

    lines: dict[str, tuple[Line, ...]]
    damage: tuple[str, ...]

    def of(self, name: str, kind: type[T]) -> tuple[T, ...]:
        """The lines of one kind in one file."""
        return tuple(line for line in self.lines.get(name, ()) if isinstance(line, kind))

    @property
    def head(self) -> Head | None:
        return next(iter(self.of(RECORDING, Head)), None)

    @property
    def end(self) -> End | None:
        return next(iter(self.of(RECORDING, End)), None)

    @property
    def last_ns(self) -> int | None:
        """The latest moment that any line tells of."""
        return max((at for lines in self.lines.values() for line in lines if (at := _moment(line))), default=None)


def _moment(line: Line) -> int:
    for name in ("at_ns", "got_ns", "to_ns", "begin_ns"):
        at = getattr(line, name, 0)
        if at:
            return int(at)
    return 0


def is_recording(folder: Path) -> bool:
    """Whether a folder holds the files of a recording."""
    return (folder / RECORDING).is_file()


def read_recording(folder: Path) -> Recording:
    """Read the files of a recording, finished or not. Raises OSError when one cannot be read."""
    return parse_recording({name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()})


def parse_recording(files: Mapping[str, bytes]) -> Recording:
    """:func:`read_recording` on bytes in memory."""
    damage: list[str] = []
    lines = {name: tuple(_lines(name, raw, damage)) for name, raw in sorted(files.items()) if name in FILES}
    return Recording(lines, tuple(damage))


def _lines(name: str, raw: bytes, damage: list[str]) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    parts = raw.split(b"\n")
    for number, part in enumerate(parts, start=1):
        if not part.strip():
            continue
        try:
            yield decoder.decode(part)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            what = "is cut off" if number == len(parts) else "cannot be read"
            damage.append(f"{name}: line {number} {what}")
