"""The append-only journal of one process, written into a memory-mapped file.

Cost on the calling thread: one ``struct.pack``, one crc32, two stores into mapped memory; no lock, no
system call, no other thread. Everything that is the same for a kind of event is computed once. The whole
file is allocated when it is opened, so that a full disk is found there and not as a SIGBUS in the middle of
serving. What does not fit any more is counted, never silent.

A record is committed by its first word, stored last: after ``kill -9`` everything recorded before is there.
Threads never share a chunk. Holds for every SGLang release; needs CPython with the GIL (``next()`` on an
``itertools.count`` and the stores into the map are each atomic under it).
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import Any
from zlib import crc32

from kvwitness.patches.schema import format as fmt
from kvwitness.patches.schema.events import Closed, Event, Facts, HookFailed, Text

_ALIGN_MASK = fmt.ALIGN - 1
_COMMIT_BYTES = fmt.COMMIT.size
_KIND = "<QQQ"
"""The bytes of ``RECORD_HEAD``: code, flags (0) and tail bytes as one number, ``code + (tail bytes << 32)``."""
_SHAPES_KEPT = 4096
"""A new length of tail costs a few microseconds; this many are remembered (some hundred bytes each)."""
_TEXT_LIMIT = 1 << 16


class JournalError(Exception):
    """The journal could not be opened. The server runs on without it."""


class _Lane:
    """Where one thread appends: a window inside its current chunk."""

    __slots__ = ("end", "offset", "ordinal", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.offset = 0
        self.end = 0
        self.ordinal = 0


class _Lanes(dict[int, _Lane]):
    """Thread id -> its lane."""

    def __missing__(self, thread: int) -> _Lane:
        lane = self[thread] = _Lane(thread)
        return lane


class _Shapes(dict[Any, tuple[Callable[..., bytes], int, int, int]]):
    """What is the same for all events of a kind with tails of one length: how to pack one, padding included,
    its code and tail length, its bytes, its commit word.

    The key is the event's type and the length of the tail, or the type alone: no tail.
    """

    def __missing__(self, key: Any) -> tuple[Callable[..., bytes], int, int, int]:
        event, tail = key if isinstance(key, tuple) else (key, 0)
        pad = -(event.PACK.size + tail) & _ALIGN_MASK
        fields = event.PACK.format.removeprefix(fmt.RECORD_HEAD)
        record = struct.Struct(f"{_KIND}{fields}{f'{tail}s' if tail else ''}{pad}x")
        size = _COMMIT_BYTES + record.size
        if len(self) >= _SHAPES_KEPT:
            self.clear()
        shape = self[key] = record.pack, event.CODE + (tail << 32), size, fmt.COMMIT_TAG | size
        return shape


class Recorder:
    """Appends events to one journal file.

    ``directory`` is ``KVWITNESS_DIR``; the file is ``<role>-<pid>-<start ns>.kvwj``. ``quota_bytes`` is
    allocated at once and given back (truncated) by :meth:`close`; 256 MiB hold about 3 million events.

    Raises :class:`JournalError` when the directory or the space is not to be had.
    """

    emit: Callable[..., None]
    """``emit(EventType, *integer_fields, tail=b"")`` appends one event. Never blocks.

    Raises ``struct.error`` when the values do not fit the event (a defect of the caller; the guard around
    every hook counts it).
    """

    def __init__(
        self,
        directory: Path,
        *,
        role: str,
        quota_bytes: int = 256 << 20,
        chunk_bytes: int = fmt.CHUNK_BYTES,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        chunks = max(1, (quota_bytes - fmt.HEADER_BYTES) // chunk_bytes)
        size = fmt.HEADER_BYTES + chunks * chunk_bytes
        started = time.time_ns()
        self.path = directory / f"{role}-{os.getpid()}-{started}{fmt.JOURNAL_SUFFIX}"
        self._pid = os.getpid()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
                self._map = mmap.mmap(fd, size)
            except BaseException:
                os.close(fd)
                self.path.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise JournalError(f"{self.path}: {error.strerror or error}") from error
        self._fd = fd
        self._view = memoryview(self._map)
        self._chunk_bytes = chunk_bytes
        self._chunks = chunks
        self._next_chunk = itertools.count()
        self._next_seq = itertools.count(1)
        self._lanes = _Lanes()
        self._texts: dict[str, int] = {}
        self._next_text = itertools.count(1)
        self._lost_quota = 0
        self._lost_oversize = 0
        self._failures: dict[int, int] = {}
        self.emit = self._make_emit()
        self._write_header(size, started, {"role": role, **(info or {})})

    def _write_header(self, size: int, started: int, info: Mapping[str, Any]) -> None:
        raw = json.dumps(info, separators=(",", ":")).encode()
        raw = raw[: fmt.HEADER_BYTES - fmt.INFO_OFFSET]
        header = fmt.HEADER.pack(
            fmt.FILE_MAGIC,
            fmt.SCHEMA_VERSION,
            fmt.HEADER_BYTES,
            self._chunk_bytes,
            self._pid,
            size,
            monotonic_ns(),
            started,
            len(raw),
        )
        self._map[fmt.INFO_OFFSET : fmt.INFO_OFFSET + len(raw)] = raw
        self._map[: len(header)] = header

    # --- appending -----------------------------------------------------------------------------------

    def _make_emit(self) -> Callable[..., None]:
        """Build :attr:`emit` as a closure: local variables are what keeps it under two microseconds."""
        # Slices of a memoryview are cheaper to assign to than those of the map itself.
        buffer, lanes, numbers = self._view, self._lanes, self._next_seq
        new_chunk, commit, shapes, head = self._new_chunk, fmt.COMMIT.pack_into, _Shapes(), _COMMIT_BYTES

        def emit(event: type[Event], *values: int | bytes, tail: bytes = b"") -> None:
            if tail:
                pack, kind, size, word = shapes[event, len(tail)]
                values += (tail,)
            else:
                pack, kind, size, word = shapes[event]
            # Adding tuples is cheaper than unpacking ``values``, which goes through a list.
            body = pack(*(next(numbers), monotonic_ns(), kind) + values)  # noqa: RUF005
            lane = lanes[get_ident()]
            offset = lane.offset
            end = offset + size
            if end > lane.end:
                offset = new_chunk(lane, size)
                if offset < 0:
                    return
                end = offset + size
            buffer[offset + head : end] = body
            commit(buffer, offset, word, crc32(body))
            lane.offset = end

        return emit

    def _new_chunk(self, lane: _Lane, size: int) -> int:
        """Give the lane a fresh chunk; -1 when the record is lost (its number stays missing)."""
        if size > self._chunk_bytes - fmt.CHUNK_HEADER.size:
            self._lost_oversize += 1
            self._write_lost()
            return -1
        index = next(self._next_chunk)
        if index >= self._chunks:
            self._lost_quota += 1
            self._write_lost()
            return -1
        start = fmt.HEADER_BYTES + index * self._chunk_bytes
        fmt.CHUNK_HEADER.pack_into(self._map, start, fmt.CHUNK_MAGIC, index, lane.thread, lane.ordinal, 0)
        lane.ordinal += 1
        lane.offset = start + fmt.CHUNK_HEADER.size
        lane.end = start + self._chunk_bytes
        return lane.offset

    def _write_lost(self) -> None:
        fmt.LOST.pack_into(self._map, fmt.LOST_OFFSET, self._lost_quota, self._lost_oversize)

    def text(self, value: str) -> int:
        """The number of ``value``; recorded the first time it is seen."""
        number = self._texts.get(value)
        if number is None:
            number = next(self._next_text)
            self._texts[value] = number
            self.emit(Text, number, tail=value.encode("utf-8", "replace")[:_TEXT_LIMIT])
        return number

    def forget_text(self, value: str) -> None:
        """Drop the memory of a text that will not come again (a finished request id)."""
        self._texts.pop(value, None)

    def facts(self, kind: int, facts: Mapping[str, Any]) -> None:
        """Record a JSON object (:class:`~kvwitness.patches.schema.events.FactKind`)."""
        self.emit(Facts, kind, tail=json.dumps(facts, default=str, separators=(",", ":")).encode())

    def hook_failed(self, hook: str, error: BaseException) -> None:
        """Count a failure of a hook; the first ones and every power of two leave an event."""
        number = self.text(hook)
        count = self._failures.get(number, 0) + 1
        self._failures[number] = count
        if count <= 4 or count & (count - 1) == 0:
            text = f"{type(error).__name__}: {error}"[:500]
            self.emit(HookFailed, number, count, tail=text.encode("utf-8", "replace"))

    def close(self) -> None:
        """End the journal in order and give unused space back. Idempotent; a forked child must not call it."""
        if self._map.closed or os.getpid() != self._pid:
            return
        self.emit(Closed, self._lost_quota, self._lost_oversize)
        used = min(next(self._next_chunk), self._chunks)
        size = fmt.HEADER_BYTES + used * self._chunk_bytes
        self._view.release()
        self._map.flush()
        self._map.close()
        os.ftruncate(self._fd, size)
        os.close(self._fd)
