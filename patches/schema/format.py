"""Byte layout of a journal file, shared by the recorder that writes it and the reader that opens it.

A journal is one file per process::

    header page (4096 bytes) | chunk 0 | chunk 1 | ... | chunk N-1

Each *chunk* (1 MiB by default) belongs to one thread of the process, so that no lock is needed to append.
A chunk starts with a 32-byte chunk header and then holds records, each padded to 8 bytes::

    u32 commit | u32 crc32 | u64 seq | u64 t_ns | u16 code | u16 flags | u32 tail bytes | fields | tail | padding

``commit`` is written last: it carries a tag and the record's length, so a record that was being written
when the process died reads as "not there". ``crc32`` covers everything after itself, padding included.
``seq`` counts the events of the whole process from 1; a missing number is a lost record. ``t_ns`` is
``time.monotonic_ns()``; the header anchors it to the wall clock.

Everything is little-endian.
"""

from __future__ import annotations

import struct
from typing import Final

SCHEMA_VERSION: Final = 1
"""Bumped when an event's fields change meaning or order. Readers refuse a newer one."""

FILE_MAGIC: Final = b"KVWJRNL1"
HEADER_BYTES: Final = 4096
CHUNK_BYTES: Final = 1 << 20
JOURNAL_SUFFIX: Final = ".kvwj"

HEADER: Final = struct.Struct("<8sIIIIQQQQ")
"""magic, schema version, header bytes, chunk bytes, pid, quota bytes, monotonic ns, wall-clock ns, info bytes."""

LOST: Final = struct.Struct("<QQ")
LOST_OFFSET: Final = 128
"""Two counters kept in the header page: events lost to the quota, events too large for a chunk."""

INFO_OFFSET: Final = 256
"""UTF-8 JSON about the process (host, start, argv digest, Python), ``info bytes`` long."""

CHUNK_MAGIC: Final = 0x4B4E4843
CHUNK_HEADER: Final = struct.Struct("<IIQQQ")
"""magic, chunk index, thread id, ordinal of this chunk among the thread's chunks, reserved."""

COMMIT_TAG: Final = 0xA5000000
COMMIT_TAG_MASK: Final = 0xFF000000
COMMIT_LENGTH_MASK: Final = 0x00FFFFFF

COMMIT: Final = struct.Struct("<II")
RECORD_HEAD: Final = "<QQHHI"
"""seq, t_ns, code, flags, tail bytes. The fields of the event follow in the same struct."""

HEAD_BYTES: Final = COMMIT.size + struct.calcsize(RECORD_HEAD)
ALIGN: Final = 8
