"""Read a journal while it is being written: each record once, in the order of its number, in portions.

Threads of one process write to chunks of their own, so a record can come into sight before one with a smaller
number. Nothing is given out before everything with a smaller number, or before it is clear that it will not come.
"""

from __future__ import annotations

import heapq
import os
from pathlib import Path
from typing import Any, Final

import msgspec

from kvwitness.collectors.journal import Chunk, Gap, Header, parse_header, parse_lost, quota_gap
from kvwitness.patches.schema import format as fmt
from kvwitness.patches.schema.events import Closed, Event

HOLE_S: Final = 5.0
"""How long a missing number is waited for: a thread that has drawn it may be about to write it."""


class TailState(msgspec.Struct, frozen=True):
    """What :class:`~kvwitness.collectors.journal.Journal` says of a journal, without its events."""

    path: str
    instance: str
    role: str
    pid: int
    monotonic_ns: int
    wall_ns: int
    info: dict[str, Any]
    gaps: tuple[Gap, ...]
    anomalies: tuple[str, ...]
    lost_quota: int
    lost_oversize: int
    closed: bool
    last_seq: int


class Tail:
    """One journal file. Used by one thread.

    Raises :class:`JournalUnreadable` as long as the file is no journal (it may be about to become one), ``OSError``
    when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._header: Header = parse_header(file.read(fmt.HEADER_BYTES), path.name)
        self._chunks: list[Chunk] = []
        self._gaps: list[Gap] = []
        self._anomalies: list[str] = [self._header.problem] if self._header.problem else []
        self._lost = (0, 0)
        self._waiting: list[tuple[int, int, Event]] = []
        """Events behind a hole, by number; the second is only there so that events are never compared."""
        self._seen = 0
        self._last = 0
        self._closed = False
        self._hole_since: float | None = None
        self.behind = False
        """The last reading stopped before the end."""

    @property
    def state(self) -> TailState:
        """The journal as far as it was given out."""
        quota, oversize = self._lost
        gaps = [*self._gaps, quota_gap(self._last, quota)] if quota else self._gaps
        return TailState(
            path=self._path.name,
            instance=self._path.name.removesuffix(fmt.JOURNAL_SUFFIX),
            role=self._header.role,
            pid=self._header.pid,
            monotonic_ns=self._header.monotonic_ns,
            wall_ns=self._header.wall_ns,
            info=self._header.info,
            gaps=tuple(gaps),
            anomalies=tuple(self._anomalies),
            lost_quota=quota,
            lost_oversize=oversize,
            closed=self._closed,
            last_seq=self._last,
        )

    def read(self, most: int, now_s: float, *, last: bool = False) -> list[Event]:
        """What was added, ``most`` events at most; the next call goes on there.

        ``last``: nothing more will be written, do not wait for missing numbers.
        """
        with self._path.open("rb") as file:
            self._lost = parse_lost(file.read(fmt.HEADER_BYTES))
            self.behind = not self._read_chunks(file.fileno(), most)
        events = self._in_order()
        if self._waiting and not self.behind and not events:
            self._hole_since = now_s if self._hole_since is None else self._hole_since
            if last or now_s - self._hole_since >= HOLE_S:
                self._give_up_hole()
                events = self._in_order()
        if events or not self._waiting:
            self._hole_since = None
        if events:
            self._closed = isinstance(events[-1], Closed)
        return events

    def _read_chunks(self, fd: int, most: int) -> bool:
        """Read on in every chunk; whether that was everything."""
        size = os.fstat(fd).st_size
        index, budget = 0, most
        while True:
            if index == len(self._chunks):
                start = self._header.bytes + index * self._header.chunk_bytes
                # Chunks are taken into use in their order.
                if start >= size or not any(os.pread(fd, 4, start)):
                    return True
                self._chunks.append(Chunk(start))
            chunk = self._chunks[index]
            end = min(self._header.bytes + (index + 1) * self._header.chunk_bytes, size)
            index += 1
            # Most chunks have nothing new, and are not worth a copy.
            if chunk.ended or not any(os.pread(fd, 4, chunk.at)):
                continue
            for event in chunk.read(memoryview(os.pread(fd, end - chunk.at, chunk.at)), self._anomalies, self._gaps):
                self._seen += 1
                budget -= 1
                heapq.heappush(self._waiting, (event.seq, self._seen, event))
                if budget <= 0:
                    return False

    def _in_order(self) -> list[Event]:
        """What follows the last event without a hole."""
        events: list[Event] = []
        while self._waiting and self._waiting[0][0] <= self._last + 1:
            seq, _, event = heapq.heappop(self._waiting)
            if seq <= self._last:
                self._gaps.append(Gap(seq, seq, "recorded more than once"))
                continue
            self._last = seq
            events.append(event)
        return events

    def _give_up_hole(self) -> None:
        first = self._waiting[0][0]
        self._gaps.append(Gap(self._last + 1, first - 1, "records missing"))
        self._last = first - 1
