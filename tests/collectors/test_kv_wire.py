"""KV events off the wire: both forms, and what is kept of them."""

from __future__ import annotations

import lzma
import struct
from pathlib import Path

import msgspec
import pytest

from kvwitness.collectors.kv_wire import KvKind, Redactor, WireError, decode

DATA = Path(__file__).parents[1] / "outside" / "data"
RELEASES = ("0.5.23", "0.5.17", "0.5.10.post1")
KEY = bytes(range(32))
TOKENS = list(range(7000, 7032))


def frames(release: str) -> list[tuple[int, bytes]]:
    """Number and payload of all messages of a real server."""
    raw = msgspec.msgpack.decode(lzma.decompress((DATA / f"{release}-frames.msgpack.xz").read_bytes()))
    return [(int.from_bytes(parts[-2], "big"), parts[-1]) for parts in raw]


def as_array(*, medium: str | None = "GPU", parent: int | None = None, tokens: list[int] = TOKENS) -> bytes:
    event = ["BlockStored", [11, 12], parent, tokens, 16, None, *([medium] if medium else [])]
    return msgspec.msgpack.encode([1.5, [event], 0])


def as_map(**more: object) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [11, 12], "token_ids": TOKENS, "block_size": 16, "medium": "GPU"}
    return msgspec.msgpack.encode([1.5, [{**event, **more}], 0])


def test_the_two_wire_forms_say_the_same() -> None:
    assert Redactor(KEY).keep(decode(as_array())) == Redactor(KEY).keep(decode(as_map()))


@pytest.mark.parametrize("release", RELEASES)
def test_every_message_of_a_real_server_is_understood(release: str) -> None:
    redactor = Redactor(KEY)
    batches = [redactor.keep(decode(payload)) for _, payload in frames(release)]
    kinds = {event.kind for batch in batches for event in batch.events}
    assert kinds == {KvKind.STORED, KvKind.REMOVED, *([KvKind.CLEARED] if "cleared" in kinds else [])}
    stored = [event for batch in batches for event in batch.events if event.kind is KvKind.STORED]
    assert all(event.block_size == 16 and event.start is not None and event.cells for event in stored)
    media = {event.medium for event in stored}
    assert media == ({"GPU"} if release == "0.5.10.post1" else {"GPU", "CPU_PINNED"})


@pytest.mark.parametrize("release", RELEASES)
def test_neither_tokens_nor_their_hashes_are_kept(release: str) -> None:
    redactor = Redactor(KEY)
    for _, payload in frames(release):
        raw = decode(payload)
        kept = msgspec.json.encode(redactor.keep(raw)).decode()
        for event in raw.events:
            for value in event.get("block_hashes", ()):
                assert str(value) not in kept and struct.pack(">q", value).hex() not in kept
            assert str(list(event.get("token_ids") or ())[:16]).strip("[]").replace(" ", "") not in kept or not (
                event.get("token_ids")
            )


def test_salts_sessions_and_adapters_are_not_kept_and_are_no_common_prefix() -> None:
    secret = decode(as_map(cache_salt="pepper", session_id="who", lora_name="mine"))
    (event,) = Redactor(KEY).keep(secret).events
    kept = msgspec.json.encode(event).decode()
    assert "pepper" not in kept and "who" not in kept and "mine" not in kept
    assert event.cells == () and event.start is None


def test_another_key_gives_other_names() -> None:
    one, other = Redactor(KEY).keep(decode(as_map())), Redactor(KEY[::-1]).keep(decode(as_map()))
    assert not {*one.events[0].blocks, *one.events[0].cells} & {*other.events[0].blocks, *other.events[0].cells}


def test_a_prefix_goes_on_where_its_parent_ended() -> None:
    whole = Redactor(KEY).keep(decode(as_map())).events[0]
    redactor = Redactor(KEY)
    first = as_map(block_hashes=[11], token_ids=TOKENS[:16])
    second = as_map(block_hashes=[12], token_ids=TOKENS[16:], parent_block_hash=11)
    cells = [redactor.keep(decode(payload)).events[0] for payload in (first, second)]
    assert (*cells[0].cells, *cells[1].cells) == whole.cells
    assert cells[1].start == 16
    (lost,) = Redactor(KEY).keep(decode(second)).events
    assert lost.start is None and lost.cells == (), "without its beginning a block is of no known prefix"


def test_pages_of_one_token_make_a_cell_of_sixteen() -> None:
    payload = as_map(block_hashes=list(range(32)), block_size=1)
    (event,) = Redactor(KEY).keep(decode(payload)).events
    assert [index for index, cell in enumerate(event.cells) if cell] == [15, 31]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode([1.0, [7]]),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(payload)


@pytest.mark.parametrize("more", [{"block_hashes": 3}, {"block_size": "x"}, {"token_ids": 5}])
def test_an_event_that_does_not_fit_its_kind_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(WireError):
        Redactor(KEY).keep(decode(as_map(**more)))


def test_an_event_of_a_later_release_is_kept_as_unknown() -> None:
    (event,) = Redactor(KEY).keep(decode(msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}], 0]))).events
    assert event.kind is KvKind.OTHER
