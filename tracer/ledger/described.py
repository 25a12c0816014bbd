"""What an instance says of itself, typed: the JSON of the :class:`~kvwitness.patches.schema.events.Facts` events.

A field that a release does not record is None ("not known"), never a guess; an event with a field of another type than
it has to be is not read at all. Unknown names are kept in ``shown``, which no rule reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

SCHEMA: Final = 1
"""Version of these structs; a field is never given a second meaning."""

_DEPTH: Final = 32
"""What is recorded is a few levels deep."""


class Ranks(msgspec.Struct, frozen=True):
    """The place of a scheduler among those of its server; None: it does not say."""

    tp_rank: int | None = None
    tp_size: int | None = None
    pp_rank: int | None = None
    pp_size: int | None = None
    dp_rank: int | None = None
    dp_size: int | None = None
    attn_tp_rank: int | None = None
    attn_tp_size: int | None = None


class Pool(msgspec.Struct, frozen=True):
    """One host pool. Number 0 is the anchor pool, whose slots are the identity of full-attention KV."""

    pool: int
    name: str = "?"
    hooked: bool = False


class Hook(msgspec.Struct, frozen=True):
    """One hook as the installer left it."""

    name: str
    target: str
    status: str
    links: tuple[str, ...]
    detail: str = ""
    family: str = "common"


class Arguments(msgspec.Struct, frozen=True):
    """The server's arguments that anything is concluded from; None: not set, or not known."""

    model_path: str | None = None
    served_model_name: str | None = None
    kv_cache_dtype: str | None = None
    dtype: str | None = None
    quantization: str | None = None


class Process(msgspec.Struct, frozen=True):
    """The process: its part in the server, its release, and which start of which server it belongs to."""

    role: str | None = None
    sglang: str | None = None
    arguments: Arguments = Arguments()
    start: str | None = None
    """A random id that the processes of one start of a server share (None: recorded before it existed)."""
    host: str | None = None
    """A keyed digest of the host's name ..."""
    key: str | None = None
    """... and which key that is, and the prefixes are, digested with (a digest of the key)."""


class Attach(msgspec.Struct, frozen=True):
    """How a recorder came into a running server."""

    way: str | None = None
    tool: str | None = None
    stopped_us: int | None = None


class Instance(msgspec.Struct, frozen=True):
    """The scheduler: its place, its tree, its pools, its policies. Sizes are in tokens."""

    ranks: Ranks | None = None
    family: str | None = None
    tree_class: str | None = None
    tree_core: str | None = None
    page_size: int | None = None
    device_tokens: int | None = None
    host_tokens: int | None = None
    bytes_per_token: int | None = None
    layers: int | None = None
    copy_threads: bool | None = None
    write_policy: str | None = None
    write_through_threshold: int | None = None
    load_back_threshold: int | None = None
    host_memory_mode: str | None = None
    storage: bool | None = None
    digest_every: int | None = None
    pools: tuple[Pool, ...] = ()


class Described(msgspec.Struct, frozen=True):
    """All of it, as far as it was recorded."""

    instance: Instance = Instance()
    process: Process | None = None
    attach: Attach | None = None
    shown: Mapping[str, Any] = {}
    """As recorded, for people: nothing is concluded from it."""

    @property
    def ranks(self) -> Ranks:
        """Its place, as far as it says."""
        return self.instance.ranks or Ranks()

    @property
    def arguments(self) -> Arguments:
        """The server's arguments, as far as they are known."""
        return self.process.arguments if self.process is not None else Arguments()

    @property
    def transit_mode(self) -> str | None:
        """SGLang's name of the mode in which host memory is only a way through to storage; None where it is a tier.

        ``buffer_only`` exists since 0.5.23.
        """
        mode = self.instance.host_memory_mode
        return None if mode in (None, "cache") else mode


class Unreadable(Exception):
    """Facts that are no JSON object, or whose fields are of other types; the argument says which."""


def read_object(text: str) -> dict[str, Any]:
    """The JSON object of a facts event."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable("not JSON") from error
    if not isinstance(found, dict):
        raise Unreadable("no JSON object")
    _check(found)
    return found


def _check(found: dict[str, Any]) -> None:
    """What is shown of it must be text that can be written, and no deeper than whoever shows it can follow."""
    inside: list[Any] = [found]
    for _ in range(_DEPTH):
        inside = [part for value in inside for part in _parts(value)]
    if inside:
        raise Unreadable(f"nested more than {_DEPTH} deep")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (*value, *value.values())
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Unreadable("half of a character") from error
    return value if isinstance(value, list) else ()


def read_as(kind: type[T], raw: Mapping[str, Any]) -> T:
    """Facts as their struct; unknown names are left out."""
    try:
        return msgspec.convert(dict(raw), kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Unreadable(str(error)) from error


def read_hooks(raw: Mapping[str, Any]) -> tuple[Hook, ...]:
    """The hooks of a coverage event."""
    return read_as(_Coverage, raw).hooks


class _Coverage(msgspec.Struct, frozen=True):
    hooks: tuple[Hook, ...] = ()
