"""Take recorded journals apart and put them together again, changed: the tests' way to bend evidence."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvwitness.collectors.journal import Journal, parse_journal
from kvwitness.patches.schema import format as fmt
from kvwitness.patches.schema.events import Event, PathNode, Run, Tail
from kvwitness.tracer.ledger.described import Attach, Described, Instance, Process, read_as

FIXTURES = Path(__file__).parent / "fixtures"
ABC = FIXTURES / "abc-0.5.23-rust.kvwj"
"""A recorded run on SGLang 0.5.23, Rust core: warm-up, A, B, four fills, C, C again."""

Record = tuple[int, bytes]


def described(said: Mapping[str, Any]) -> Described:
    """What an instance says of itself, from the JSON as it is recorded and shown."""
    parts = {
        name: read_as(kind, said[name]) for name, kind in (("process", Process), ("attach", Attach)) if name in said
    }
    return Described(read_as(Instance, said), shown=dict(said), **parts)


def encode_event(event: Event) -> bytes:
    """One event as the recorder writes it, commit word included."""
    values = [getattr(event, field.name) for field in dataclasses.fields(event)]
    seq, t_ns, *rest = values
    tail = b""
    if event.READ_TAIL is not None:
        tail = _encode_tail(rest.pop())
    body = event.PACK.pack(seq, t_ns, event.CODE, 0, len(tail), *rest) + tail
    body += b"\0" * (-len(body) % fmt.ALIGN)
    size = fmt.COMMIT.size + len(body)
    return fmt.COMMIT.pack(fmt.COMMIT_TAG | size, zlib.crc32(body)) + body


def _encode_tail(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    assert isinstance(value, tuple)
    if value and isinstance(value[0], bytes):
        return b"".join(value)
    if value and isinstance(value[0], PathNode | Run):
        return Tail.ints(number for entry in value for number in entry)
    return Tail.ints(value)


def to_bytes(events: Sequence[Event], role: str = "scheduler", lost: int = 0) -> bytes:
    """A whole journal file with these events, in this order, written by one thread."""
    info = json.dumps({"role": role}).encode()
    raw = bytearray(fmt.HEADER_BYTES)
    records = b"".join(encode_event(event) for event in events)
    room = fmt.CHUNK_HEADER.size + len(records) + 64
    chunk = -(-room // fmt.CHUNK_BYTES) * fmt.CHUNK_BYTES
    header = fmt.HEADER.pack(
        fmt.FILE_MAGIC, fmt.SCHEMA_VERSION, fmt.HEADER_BYTES, chunk, 1, len(raw) + chunk, 0, 0, len(info)
    )
    raw[: len(header)] = header
    fmt.LOST.pack_into(raw, fmt.LOST_OFFSET, lost, 0)
    raw[fmt.INFO_OFFSET : fmt.INFO_OFFSET + len(info)] = info
    body = fmt.CHUNK_HEADER.pack(fmt.CHUNK_MAGIC, 0, 1, 0, 0) + records
    return bytes(raw) + body + b"\0" * (chunk - len(body))


def journal_of(events: Sequence[Event], name: str = "scheduler-1-1.kvwj", role: str = "scheduler") -> Journal:
    """The events as the reader gives them after they went through a file."""
    return parse_journal(to_bytes(events, role), name)


def renumbered(events: Iterable[Event]) -> list[Event]:
    """The events with sequence numbers without a hole: what a recorder with a dead hook would have written."""
    return [dataclasses.replace(event, seq=seq) for seq, event in enumerate(events, start=1)]


def changed(events: Sequence[Event], kind: type[Event], change: Callable[[Event], Event | None]) -> list[Event]:
    """Apply ``change`` to every event of a kind; None removes it."""
    out: list[Event] = []
    for event in events:
        new = change(event) if isinstance(event, kind) else event
        if new is not None:
            out.append(new)
    return out
