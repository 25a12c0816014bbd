"""A span before it is sent or written: plain data, with ids that depend only on what was recorded."""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import NamedTuple

import msgspec

Value = str | bool | int | float | tuple[str, ...]
"""An attribute's value."""


class Kind(IntEnum):
    """Span kinds, with their numbers in OTLP."""

    INTERNAL = 1
    SERVER = 2


class Ref(NamedTuple):
    """Where a span is: enough to be its child or to link to it."""

    trace_id: str
    span_id: str


class EventSpec(msgspec.Struct, frozen=True):
    """Something that happened at one moment of a span."""

    name: str
    time_ns: int
    attributes: dict[str, Value] = {}


class LinkSpec(msgspec.Struct, frozen=True):
    """A relation to another span, in this trace or in another."""

    to: Ref
    relation: str


class ResourceSpec(msgspec.Struct, frozen=True):
    """Who did it: one scheduler process."""

    instance: str
    attributes: dict[str, Value]


class SpanSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One span. Times are nanoseconds of the Unix epoch; ids are lower-case hexadecimal."""

    ref: Ref
    name: str
    start_ns: int
    end_ns: int
    resource: ResourceSpec
    kind: Kind = Kind.INTERNAL
    parent: str | None = None
    """Span id within the same trace."""
    parent_is_remote: bool = False
    attributes: dict[str, Value] = {}
    events: tuple[EventSpec, ...] = ()
    links: tuple[LinkSpec, ...] = ()
    error: str | None = None
    """Why the span's status is an error; None: unset."""
    unit: str
    """Spans with the same unit are only understood together, and are sent together while a server runs."""
    open: bool = False
    """Its end was not recorded; ``end_ns`` is the last moment at which it was known to go on."""
    complete: bool = True
    """Nothing that this process may still record will change the span."""


def trace_id_of(*parts: str | int) -> str:
    """Trace id for what ``parts`` name: the same parts give the same id, anywhere."""
    return _hashed("trace", parts, 16)


def span_id_of(*parts: str | int) -> str:
    """Span id for what ``parts`` name."""
    return _hashed("span", parts, 8)


def _hashed(kind: str, parts: tuple[str | int, ...], size: int) -> str:
    # The separator is in no instance name, and numbers have none either: no two lists of parts read alike.
    text = "\x1f".join(("kvwitness", kind, *map(str, parts)))
    # All zero bytes would mean "no id".
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * size].replace("0" * 2 * size, "0" * (2 * size - 1) + "1")
