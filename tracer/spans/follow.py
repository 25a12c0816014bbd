"""Follow a folder of journals that servers write to, reading a journal again only when something was added."""

from __future__ import annotations

import os
from pathlib import Path

from kvwitness.collectors.journal import Journal, JournalUnreadable, parse_journal
from kvwitness.patches.schema import format as fmt
from kvwitness.tracer.bundle.places import recorded_journals
from kvwitness.tracer.bundle.snapshot import snapshot_bytes


class Follower:
    """The journals below a folder, as far as they were written at the last :meth:`refresh`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._marks: dict[Path, _Mark] = {}
        self._journals: dict[Path, Journal] = {}

    @property
    def journals(self) -> list[Journal]:
        """By name, as a bundle has them."""
        return [self._journals[path] for path in sorted(self._journals, key=lambda path: path.name)]

    def refresh(self) -> bool:
        """Read what has changed since the last time; whether anything has."""
        changed = False
        for path in recorded_journals(self._directory):
            changed = self._refresh_one(path) or changed
        return changed

    def _refresh_one(self, path: Path) -> bool:
        known = self._journals.get(path)
        if known is not None and known.closed:
            return False
        mark = self._marks.setdefault(path, _Mark())
        try:
            # Marked before it is read: what is written in between is found the next time.
            if not mark.advance(path):
                return False
            self._journals[path] = parse_journal(snapshot_bytes(path), path.name)
        except (JournalUnreadable, OSError):
            # Being created, being removed, or no journal at all. The next round looks again.
            self._marks.pop(path, None)
            return False
        return True


class _Mark:
    """How far a journal was written. Its file has its full size from the start, and memory-mapped writes
    need not touch the file's time, so only its content tells."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        """Where the next record of each chunk in use will be."""
        self._lost = b""

    def advance(self, path: Path) -> bool:
        """Move to where the journal is written now; whether that is further than before."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._advance(fd)
        finally:
            os.close(fd)

    def _advance(self, fd: int) -> bool:
        head = os.pread(fd, fmt.HEADER_BYTES, 0)
        if len(head) < fmt.HEADER_BYTES or not head.startswith(fmt.FILE_MAGIC):
            raise JournalUnreadable("no header yet")
        header_bytes, chunk_bytes = fmt.HEADER.unpack_from(head)[2:4]
        if header_bytes < fmt.HEADER_BYTES or chunk_bytes < fmt.CHUNK_HEADER.size:
            raise JournalUnreadable("the header is damaged")
        lost = head[fmt.LOST_OFFSET : fmt.LOST_OFFSET + fmt.LOST.size]
        moved, self._lost = lost != self._lost, lost
        for start in range(header_bytes, os.fstat(fd).st_size, chunk_bytes):
            end = self._ends.get(start)
            if end is None:
                # Chunks are taken into use in their order.
                if not any(os.pread(fd, 4, start)):
                    break
                end = start + fmt.CHUNK_HEADER.size
                moved = True
            self._ends[start] = _written_to(fd, end, start + chunk_bytes)
            moved = moved or self._ends[start] != end
        return moved


def _written_to(fd: int, at: int, chunk_end: int) -> int:
    """The end of the records that follow ``at`` in a chunk."""
    first = os.pread(fd, fmt.COMMIT.size, at) if at + fmt.HEAD_BYTES <= chunk_end else b""
    if not any(first[:4]):
        return at
    rest = os.pread(fd, chunk_end - at, at)
    offset = 0
    while offset + fmt.HEAD_BYTES <= len(rest):
        commit = fmt.COMMIT.unpack_from(rest, offset)[0]
        size = commit & fmt.COMMIT_LENGTH_MASK
        if commit & fmt.COMMIT_TAG_MASK != fmt.COMMIT_TAG or size < fmt.HEAD_BYTES:
            break
        offset += size
    return at + offset
