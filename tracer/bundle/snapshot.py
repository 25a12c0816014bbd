"""Copy a journal while its process may still be writing it.

A journal is preallocated, most of it unused; only chunks in use are copied. Threads append to chunks of
their own, so one pass over the file sees a later event of one chunk without an earlier event of another,
which a reader would have to call a loss. The copy therefore ends at an event number that a first pass
saw: everything up to it is in the second pass, and what came later is left out.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvwitness.collectors.journal import JournalUnreadable
from kvwitness.patches.schema import format as fmt

_SEQ = struct.Struct("<Q")
_PASSES = 5
_PAUSE_S = 0.02

Chunks = dict[int, bytes]
"""The chunks in use, by their offset in the file."""


def snapshot_journal(source: Path, destination: Path) -> None:
    """Copy journal ``source`` to ``destination``, leaving ``source`` untouched.

    Raises :class:`JournalUnreadable` when ``source`` is not a journal; damage inside is copied as it is.
    """
    content = snapshot_bytes(source)
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_bytes(content)


def snapshot_bytes(source: Path) -> bytes:
    """What :func:`snapshot_journal` writes."""
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise JournalUnreadable(f"{source}: {error.strerror or error}") from error
    try:
        return _snapshot(fd, str(source))
    except OSError as error:
        raise JournalUnreadable(f"{source}: {error.strerror or error}") from error
    finally:
        os.close(fd)


def _snapshot(fd: int, name: str) -> bytes:
    header, first = _read_used(fd, name)
    last = max((seq for chunk in first.values() for _, _, seq in whole_records(chunk)), default=0)
    for _ in range(_PASSES):
        time.sleep(_PAUSE_S)
        header, second = _read_used(fd, name)
        if second == first:
            # Nobody writes: finished, idle or killed. Whatever its state is, that is the evidence.
            return header + b"".join(first.values())
        if _count_up_to(second, last) >= last:
            break
    # After the last pass a hole is a real loss, or a thread that the scheduler has forgotten: the reader says so.
    return header + b"".join(cut_after(chunk, last) for chunk in second.values())


def _read_used(fd: int, name: str) -> tuple[bytes, Chunks]:
    head = os.pread(fd, fmt.HEADER_BYTES, 0)
    if len(head) < fmt.HEADER_BYTES or not head.startswith(fmt.FILE_MAGIC):
        raise JournalUnreadable(f"{name}: not a kvwitness journal (or its header is cut off)")
    header_bytes, chunk_bytes = fmt.HEADER.unpack_from(head)[2:4]
    if header_bytes < fmt.HEADER_BYTES or chunk_bytes < fmt.CHUNK_HEADER.size:
        raise JournalUnreadable(f"{name}: the header is damaged")
    chunks: Chunks = {}
    for start in range(header_bytes, os.fstat(fd).st_size, chunk_bytes):
        chunk_head = os.pread(fd, fmt.CHUNK_HEADER.size, start)
        # A header that is cut off is kept: the reader reports it.
        if len(chunk_head) < fmt.CHUNK_HEADER.size or fmt.CHUNK_HEADER.unpack(chunk_head)[0] != 0:
            chunks[start] = _read_whole(fd, chunk_bytes, start)
    return _read_whole(fd, header_bytes, 0), chunks


def _read_whole(fd: int, size: int, start: int) -> bytes:
    """``pread`` that only comes short at the end of the file."""
    parts: list[bytes] = []
    while size and (part := os.pread(fd, size, start)):
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return b"".join(parts)


def whole_records(chunk: bytes) -> Iterator[tuple[int, int, int]]:
    """Begin, end and event number of each whole record of a chunk, up to the first that is not whole."""
    at = fmt.CHUNK_HEADER.size
    while at + fmt.HEAD_BYTES <= len(chunk):
        commit, crc = fmt.COMMIT.unpack_from(chunk, at)
        end = at + (commit & fmt.COMMIT_LENGTH_MASK)
        if commit & fmt.COMMIT_TAG_MASK != fmt.COMMIT_TAG or end < at + fmt.HEAD_BYTES or end > len(chunk):
            return
        if zlib.crc32(chunk[at + fmt.COMMIT.size : end]) != crc:
            return
        yield at, end, _SEQ.unpack_from(chunk, at + fmt.COMMIT.size)[0]
        at = end


def _count_up_to(chunks: Chunks, last: int) -> int:
    return sum(seq <= last for chunk in chunks.values() for _, _, seq in whole_records(chunk))


def cut_after(chunk: bytes, last: int) -> bytes:
    """The chunk without the records after event ``last``; empty when nothing else is in it.

    Damage before them stays. A record that was in the middle of being written carries its number already.
    """
    at = fmt.CHUNK_HEADER.size
    for begin, end, seq in whole_records(chunk):
        if seq > last:
            at = begin
            break
        at = end
    if at + fmt.HEAD_BYTES > len(chunk) or _SEQ.unpack_from(chunk, at + fmt.COMMIT.size)[0] <= last:
        return chunk
    if at == fmt.CHUNK_HEADER.size:
        return b""
    return chunk[:at] + bytes(len(chunk) - at)
