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

    def wall_time_ns(self, t_ns: int) -> int:
        """Wall-clock time (ns since the epoch) of a monotonic reading of this process."""
        return self.wall_ns + (t_ns - self.monotonic_ns)


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
    if len(raw) < fmt.HEADER_BYTES or not raw.startswith(fmt.FILE_MAGIC):
        raise JournalUnreadable(f"{name}: not a kvwitness journal (or its header is cut off)")
    _, version, header, chunk_bytes, pid, _, mono, wall, info_bytes = fmt.HEADER.unpack_from(raw)
    if version > fmt.SCHEMA_VERSION:
        raise JournalUnreadable(
            f"{name}: schema {version} is newer than this kvwitness reads ({fmt.SCHEMA_VERSION}); update kvwitness"
        )
    if header < fmt.HEADER_BYTES or chunk_bytes < fmt.CHUNK_HEADER.size or info_bytes > header:
        raise JournalUnreadable(f"{name}: the header is damaged")
    lost_quota, lost_oversize = fmt.LOST.unpack_from(raw, fmt.LOST_OFFSET)
    anomalies: list[str] = []
    try:
        info = json.loads(raw[fmt.INFO_OFFSET : fmt.INFO_OFFSET + info_bytes])
    except ValueError:
        info = {}
        anomalies.append("the process facts in the header are damaged")
    found: list[Event] = []
    gaps: list[Gap] = []
    for chunk in range(header, len(raw), chunk_bytes):
        found.extend(_read_chunk(raw, chunk, min(chunk + chunk_bytes, len(raw)), anomalies, gaps))
    events = _in_order(found, gaps)
    if lost_quota:
        last = events[-1].seq if events else 0
        gaps.append(Gap(last + 1, last + lost_quota, f"{lost_quota} events lost to the journal's quota"))
    role = str(info.get("role", "unknown"))
    return Journal(
        path=name,
        instance=name.removesuffix(fmt.JOURNAL_SUFFIX),
        role=role,
        pid=pid,
        schema_version=version,
        monotonic_ns=mono,
        wall_ns=wall,
        info=info,
        events=tuple(events),
        gaps=tuple(gaps),
        anomalies=tuple(anomalies),
        lost_quota=lost_quota,
        lost_oversize=lost_oversize,
        closed=any(isinstance(event, Closed) for event in events[-1:]),
    )


def _read_chunk(raw: bytes, start: int, end: int, anomalies: list[str], gaps: list[Gap]) -> Iterator[Event]:
    if start + fmt.CHUNK_HEADER.size > end:
        anomalies.append(f"the file is cut off inside a chunk header at byte {start}")
        return
    magic = fmt.CHUNK_HEADER.unpack_from(raw, start)[0]
    if magic == 0:
        return
    if magic != fmt.CHUNK_MAGIC:
        anomalies.append(f"chunk at byte {start} has a damaged header")
        return
    at = start + fmt.CHUNK_HEADER.size
    last_seq = last_time = 0
    while at + fmt.HEAD_BYTES <= end:
        commit, crc = fmt.COMMIT.unpack_from(raw, at)
        if commit == 0:
            return
        size = commit & fmt.COMMIT_LENGTH_MASK
        if commit & fmt.COMMIT_TAG_MASK != fmt.COMMIT_TAG or size < fmt.HEAD_BYTES or at + size > end:
            anomalies.append(f"torn record at byte {at}")
            return
        body = raw[at + fmt.COMMIT.size : at + size]
        if zlib.crc32(body) != crc:
            anomalies.append(f"damaged record at byte {at}")
            return
        event = _decode_record(body, at, anomalies)
        if event is not None:
            # One thread writes a chunk from front to back: number and clock can only grow.
            if event.seq <= last_seq:
                gaps.append(Gap(event.seq, last_seq, "events out of order"))
            elif event.t_ns < last_time:
                gaps.append(Gap(last_seq, event.seq, "the clock runs backwards"))
            last_seq, last_time = max(last_seq, event.seq), max(last_time, event.t_ns)
            yield event
        at += size
    if at < end:
        anomalies.append(f"the file is cut off inside a record at byte {at}") if end == len(raw) else None


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
