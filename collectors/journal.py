"""Open journal files: finished ones, ones cut off by ``kill -9``, and ones still being written.

The reader stops at the first record of a chunk that is not whole (never committed, torn, damaged) and says
so; it never guesses. Holes in the sequence numbers, duplicates and disorder are reported as *anomalies*
that the verdicts take as evidence.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvwitness.patches.schema import format as fmt
from kvwitness.patches.schema.events import REGISTRY, Closed, Event, decode


class JournalUnreadable(Exception):
    """The file is not a journal, or of a newer schema than this version reads."""


class Gap(msgspec.Struct, frozen=True):
    """Events ``first`` to ``last`` (inclusive sequence numbers) are not in the journal."""

    first: int
    last: int
    cause: str


class Journal(msgspec.Struct, frozen=True):
    """One process's journal. ``events`` are ordered by sequence number, each number once."""

    path: str
    instance: str
    """``<role>-<pid>-<start ns>``: one per process start."""
    role: str
    pid: int
    schema_version: int
    monotonic_ns: int
    """Reading of the process's monotonic clock when the journal was opened ..."""
    wall_ns: int
    """... and of the wall clock (Unix epoch) at the same moment."""
    info: dict[str, Any]
    events: tuple[Event, ...]
    gaps: tuple[Gap, ...]
    anomalies: tuple[str, ...]
    """What is wrong with the file, in words. Whatever was lost by it is in ``gaps`` or after the last event."""
    lost_quota: int
    lost_oversize: int
    closed: bool
    """The process ended the journal in order."""

    @property
    def last_seq(self) -> int:
        """Number of the last event; 0: there is none."""
        return self.events[-1].seq if self.events else 0

    def wall_time_ns(self, t_ns: int) -> int:
        """Wall-clock time (ns since the epoch) of a monotonic reading of this process."""
        return self.wall_ns + (t_ns - self.monotonic_ns)


class Header(msgspec.Struct, frozen=True):
    """What the first page of a journal says."""

    schema_version: int
    bytes: int
    """Length of the header; the first chunk begins there."""
    chunk_bytes: int
    pid: int
    monotonic_ns: int
    wall_ns: int
    info: dict[str, Any]
    problem: str
    """What is wrong with it (empty: nothing)."""

    @property
    def role(self) -> str:
        """The process's part in the server."""
        return str(self.info.get("role", "unknown"))


def find_journals(directory: Path) -> list[Path]:
    """Every journal below ``directory``, by name."""
    return sorted(directory.rglob(f"*{fmt.JOURNAL_SUFFIX}"))


def read_journal(path: Path) -> Journal:
    """Read one journal file.

    Raises :class:`JournalUnreadable` when the file cannot be a journal; damage inside is reported in the
    result instead.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise JournalUnreadable(f"{path}: {error.strerror or error}") from error
    return parse_journal(raw, path.name)


def parse_journal(raw: bytes, name: str) -> Journal:
    """:func:`read_journal` on bytes already in memory."""
    about = parse_header(raw, name)
    lost_quota, lost_oversize = parse_lost(raw)
    anomalies = [about.problem] if about.problem else []
    found: list[Event] = []
    gaps: list[Gap] = []
    for start in range(about.bytes, len(raw), about.chunk_bytes):
        chunk = Chunk(start)
        end = min(start + about.chunk_bytes, len(raw))
        found.extend(chunk.read(memoryview(raw)[start:end], anomalies, gaps))
        if chunk.cut_off and end == len(raw):
            anomalies.append(f"the file is cut off inside a record at byte {chunk.at}")
    events = _in_order(found, gaps)
    if lost_quota:
        gaps.append(quota_gap(events[-1].seq if events else 0, lost_quota))
    return Journal(
        path=name,
        instance=name.removesuffix(fmt.JOURNAL_SUFFIX),
        role=about.role,
        pid=about.pid,
        schema_version=about.schema_version,
        monotonic_ns=about.monotonic_ns,
        wall_ns=about.wall_ns,
        info=about.info,
        events=tuple(events),
        gaps=tuple(gaps),
        anomalies=tuple(anomalies),
        lost_quota=lost_quota,
        lost_oversize=lost_oversize,
        closed=any(isinstance(event, Closed) for event in events[-1:]),
    )


def parse_header(raw: bytes, name: str) -> Header:
    """The first page of a journal. Raises :class:`JournalUnreadable`."""
    if len(raw) < fmt.HEADER_BYTES or not raw.startswith(fmt.FILE_MAGIC):
        raise JournalUnreadable(f"{name}: not a kvwitness journal (or its header is cut off)")
    _, version, header, chunk_bytes, pid, _, mono, wall, info_bytes = fmt.HEADER.unpack_from(raw)
    if version > fmt.SCHEMA_VERSION:
        raise JournalUnreadable(
            f"{name}: schema {version} is newer than this kvwitness reads ({fmt.SCHEMA_VERSION}); update kvwitness"
        )
    if header < fmt.HEADER_BYTES or chunk_bytes < fmt.CHUNK_HEADER.size or info_bytes > header:
        raise JournalUnreadable(f"{name}: the header is damaged")
    problem = ""
    try:
        info = json.loads(raw[fmt.INFO_OFFSET : fmt.INFO_OFFSET + info_bytes])
    except ValueError:
        info, problem = {}, "the process facts in the header are damaged"
    return Header(version, header, chunk_bytes, pid, mono, wall, info, problem)


def parse_lost(raw: bytes) -> tuple[int, int]:
    """Events lost to the quota, and because they were too large, from the first page."""
    quota, oversize = fmt.LOST.unpack_from(raw, fmt.LOST_OFFSET)
    return quota, oversize


def quota_gap(last: int, lost: int) -> Gap:
    """The gap behind the last event of a journal that had reached its quota."""
    return Gap(last + 1, last + lost, f"{lost} events lost to the journal's quota")


class Chunk:
    """One thread's part of a journal, read from where the last reading stopped."""

    def __init__(self, start: int) -> None:
        self.at = start
        """Byte in the file at which the next record will be."""
        self.ended = False
        """Nothing behind ``at`` will ever be read: it is damaged, or full."""
        self.cut_off = False
        """Too few bytes are left for a record."""
        self._start = start
        self._last_seq = self._last_time = 0

    def read(self, raw: memoryview, anomalies: list[str], gaps: list[Gap]) -> Iterator[Event]:
        """The records in ``raw``, which begins at ``at`` and ends with the chunk; what is wrong goes to the lists."""
        begin, here = self.at, 0
        if begin == self._start:
            if fmt.CHUNK_HEADER.size > len(raw):
                anomalies.append(f"the file is cut off inside a chunk header at byte {begin}")
                self.ended = True
                return
            magic = fmt.CHUNK_HEADER.unpack_from(raw, 0)[0]
            if magic == 0:
                return
            if magic != fmt.CHUNK_MAGIC:
                anomalies.append(f"chunk at byte {begin} has a damaged header")
                self.ended = True
                return
            here = fmt.CHUNK_HEADER.size
        while here + fmt.HEAD_BYTES <= len(raw):
            self.at = begin + here
            commit, crc = fmt.COMMIT.unpack_from(raw, here)
            if commit == 0:
                return
            size = commit & fmt.COMMIT_LENGTH_MASK
            if commit & fmt.COMMIT_TAG_MASK != fmt.COMMIT_TAG or size < fmt.HEAD_BYTES or here + size > len(raw):
                anomalies.append(f"torn record at byte {self.at}")
                self.ended = True
                return
            body = bytes(raw[here + fmt.COMMIT.size : here + size])
            if zlib.crc32(body) != crc:
                anomalies.append(f"damaged record at byte {self.at}")
                self.ended = True
                return
            event = _decode_record(body, self.at, anomalies)
            # Before the event is given away: whoever takes no more of them goes on behind it.
            here += size
            self.at = begin + here
            if event is not None:
                # One thread writes a chunk from front to back: number and clock can only grow.
                if event.seq <= self._last_seq:
                    gaps.append(Gap(event.seq, self._last_seq, "events out of order"))
                elif event.t_ns < self._last_time:
                    gaps.append(Gap(self._last_seq, event.seq, "the clock runs backwards"))
                self._last_seq, self._last_time = max(self._last_seq, event.seq), max(self._last_time, event.t_ns)
                yield event
        self.at, self.ended, self.cut_off = begin + here, True, here < len(raw)


_HEAD = struct.Struct(fmt.RECORD_HEAD)


def _decode_record(body: bytes, at: int, anomalies: list[str]) -> Event | None:
    seq, t_ns, code, _, tail_bytes = _HEAD.unpack_from(body)
    cls = REGISTRY.get(code)
    if cls is None:
        anomalies.append(f"event {seq} at byte {at} is of unknown kind {code}")
        return None
    fields_end = cls.PACK.size
    if fields_end + tail_bytes > len(body):
        anomalies.append(f"event {seq} at byte {at} is shorter than its kind")
        return None
    values: Sequence[int] = cls.PACK.unpack_from(body)[5:]
    try:
        return decode(code, seq, t_ns, values, body[fields_end : fields_end + tail_bytes])
    except (ValueError, TypeError) as error:
        anomalies.append(f"event {seq} at byte {at} cannot be decoded: {error}")
        return None


def _in_order(found: list[Event], gaps: list[Gap]) -> list[Event]:
    """Sort by sequence number; holes and repeats become gaps."""
    found.sort(key=lambda event: event.seq)
    events: list[Event] = []
    expected = 1
    for event in found:
        if events and event.seq == events[-1].seq:
            gaps.append(Gap(event.seq, event.seq, "recorded more than once"))
            continue
        if event.seq > expected:
            gaps.append(Gap(expected, event.seq - 1, "records missing"))
        events.append(event)
        expected = event.seq + 1
    return events
