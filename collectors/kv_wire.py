"""What SGLang's KV events say, read off the wire (``--kv-events-config``), without any of the prompt's content.

SGLang publishes ``[time, events, dp rank]`` in msgpack. An event is a positional array through 0.5.19 and a map
with ``type`` from 0.5.20 on. It carries token ids and an unkeyed hash of them; neither leaves this module. A block
is named by a keyed hash of its hash, and the tokens become the same keyed prefix digests that the hooks record, so
that the two can be compared where both have the same key.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final

import msgspec

from kvwitness.patches.digests import Tip, go_on, grid_for, seed_of
from kvwitness.patches.schema.events import DIGEST_BYTES

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
_TIPS: Final = 1 << 18
"""Blocks whose end is remembered, so that those behind them can be digested."""

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""The positional form, through 0.5.19. 0.5.4 to 0.5.9 leave the medium out."""

_NAMESPACE: Final = ("lora_id", "lora_name", "cache_salt")
_PLAIN: Final = (None, None)
"""The namespace of a request with neither of the two things that the hooks tell prefixes apart by."""


class WireError(ValueError):
    """A message that is not a batch of KV events; the text says why."""


class KvKind(StrEnum):
    """What happened to blocks."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    OTHER = "other"
    """Of a kind that this version does not know; what it did is not known either."""


class KvEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. Blocks and digests are keyed, in hexadecimal."""

    kind: KvKind
    medium: str | None = None
    """``GPU``, ``CPU_PINNED``, ... as told; None: not told."""
    blocks: tuple[str, ...] = ()
    parent: str | None = None
    block_size: int = 0
    """Tokens in a block."""
    start: int | None = None
    """Position of the first token of the first block in its prompt; None: its beginning was not seen."""
    cells: tuple[str, ...] = ()
    """For each block the digest of the prefix that ends with it, empty where no cell of digests ends there."""


class KvBatch(msgspec.Struct, frozen=True):
    """One message. ``at_ns`` is when the server published it (ns since the epoch)."""

    at_ns: int
    rank: int | None
    """Data-parallel rank, as told."""
    events: tuple[KvEvent, ...]


class RawBatch(msgspec.Struct, frozen=True):
    """A message as decoded: it holds token ids, and is never kept."""

    time_s: float
    events: tuple[Mapping[str, Any], ...]
    rank: int | None


def decode(payload: bytes) -> RawBatch:
    """The two wire forms as one. Raises :class:`WireError`."""
    try:
        message = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not msgpack: {error}") from error
    if not isinstance(message, list) or len(message) < 2 or not isinstance(message[1], list):
        raise WireError("not a batch of events")
    time_s, events = message[0], message[1]
    if not isinstance(time_s, int | float) or isinstance(time_s, bool):
        raise WireError("a batch without its time")
    rank = message[2] if len(message) > 2 and isinstance(message[2], int) else None
    return RawBatch(float(time_s), tuple(_event(event) for event in events), rank)


def _event(event: Any) -> Mapping[str, Any]:
    if isinstance(event, dict) and isinstance(event.get("type"), str):
        return event
    if isinstance(event, list) and event and isinstance(event[0], str):
        return {"type": event[0], **dict(zip(_FIELDS.get(event[0], ()), event[1:], strict=False))}
    raise WireError("an event that is neither an array nor a map")


class Redactor:
    """Turns the events of one rank into what may be kept. ``key`` is that of the digests."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seed = Tip(seed_of(key, _PLAIN), 0, array("q"))
        self._tips: OrderedDict[str, Tip | None] = OrderedDict()

    def keep(self, raw: RawBatch) -> KvBatch:
        """The batch without token ids, salts, names and plain hashes. Raises :class:`WireError`."""
        try:
            return KvBatch(int(raw.time_s * 1e9), raw.rank, tuple(self._keep(event) for event in raw.events))
        except (TypeError, ValueError, OverflowError) as error:
            raise WireError(f"an event that does not fit its kind: {error}") from error

    def _keep(self, event: Mapping[str, Any]) -> KvEvent:
        medium = event.get("medium")
        medium = medium if isinstance(medium, str) else None
        match event["type"]:
            case "BlockStored":
                return self._stored(event, medium)
            case "BlockRemoved":
                return KvEvent(KvKind.REMOVED, medium, self._names(event["block_hashes"]))
            case "AllBlocksCleared":
                self._tips.clear()
                return KvEvent(KvKind.CLEARED)
            case _:
                return KvEvent(KvKind.OTHER, medium)

    def _stored(self, event: Mapping[str, Any], medium: str | None) -> KvEvent:
        blocks = self._names(event["block_hashes"])
        parent = event.get("parent_block_hash")
        above = None if parent is None else self._name(parent)
        size = int(event["block_size"])
        tokens = event.get("token_ids") or ()
        tip: Tip | None
        if any(event.get(name) is not None for name in _NAMESPACE):
            tip = None  # Equal tokens of another namespace are another prefix.
        else:
            tip = self._seed if above is None else self._tips.get(above)
        start = None if tip is None else tip.cells * grid_for(size) + len(tip.rest)
        cells: list[str] = []
        for index, block in enumerate(blocks):
            part = tokens[index * size : (index + 1) * size]
            cell = ""
            if tip is not None and len(part) == size and all(isinstance(token, int) for token in part):
                tip, new = go_on(self._key, grid_for(size), tip, part)
                cell = new[-1].hex() if new and not tip.rest else ""
            else:
                tip = None
            self._remember(block, tip)
            cells.append(cell)
        return KvEvent(KvKind.STORED, medium, blocks, above, size, start, tuple(cells) if any(cells) else ())

    def _remember(self, block: str, tip: Tip | None) -> None:
        self._tips[block] = tip
        self._tips.move_to_end(block)
        if len(self._tips) > _TIPS:
            self._tips.popitem(last=False)

    def _names(self, hashes: Sequence[Any]) -> tuple[str, ...]:
        return tuple(self._name(one) for one in hashes)

    def _name(self, value: Any) -> str:
        return blake2b(repr(value).encode(), key=self._key, digest_size=DIGEST_BYTES, person=b"block").hexdigest()
