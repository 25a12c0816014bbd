"""Residency by KV events alone, and what it is not taken from."""

from __future__ import annotations

import msgspec
import pytest

from kvwitness.collectors.kv_events import KvDamaged, KvGap, KvLine, KvMessage, KvRestart
from kvwitness.collectors.kv_wire import KvBatch, KvEvent, KvKind
from kvwitness.tracer.outside.kv_ledger import Ended, KvFacts, RankLedger, incomplete, kv_ledger

from .recorded import messages

S = 10**9


def message(seq: int, *events: KvEvent, rank: int = 0, at: int | None = None) -> KvMessage:
    at = (seq + 1) * S if at is None else at
    return KvMessage(rank, seq, at, False, KvBatch(at, rank, events))


def stored(*blocks: str, medium: str = "GPU", size: int = 16, cells: tuple[str, ...] | None = None) -> KvEvent:
    named = tuple(f"cell-{block}" for block in blocks) if cells is None else cells
    return KvEvent(KvKind.STORED, medium, blocks, None, size, 0, named)


def removed(*blocks: str, medium: str = "GPU") -> KvEvent:
    return KvEvent(KvKind.REMOVED, medium, blocks)


def one(*lines: KvLine) -> RankLedger:
    (ledger,) = kv_ledger(lines)
    return ledger


def test_a_block_goes_from_l1_to_l2_and_back() -> None:
    ledger = one(
        message(0, stored("a")),
        message(1, stored("a", medium="CPU_PINNED")),
        message(2, removed("a")),
        message(3, stored("a")),
        message(4, removed("a", medium="CPU_PINNED")),
    )
    stays = [(stay.tier, stay.since_seq, stay.ended) for stay in ledger.stays]
    assert sorted(stays) == [("L1", 0, Ended.REMOVED), ("L1", 3, Ended.OPEN), ("L2", 1, Ended.REMOVED)]
    assert ledger.resident("L1") == {"cell-a"} and ledger.resident("L2") == frozenset()
    assert (ledger.came("L1", 0, 10 * S), ledger.left("L1", 0, 10 * S), ledger.came("L1", 0, 2 * S)) == (32, 16, 16)


def test_storing_again_what_is_there_changes_nothing() -> None:
    ledger = one(message(0, stored("a")), message(1, stored("a")))
    assert [(stay.since_seq, stay.ended) for stay in ledger.stays] == [(0, Ended.OPEN)]


def test_a_flush_ends_everything() -> None:
    ledger = one(message(0, stored("a"), stored("b", medium="CPU_PINNED")), message(1, KvEvent(KvKind.CLEARED)))
    assert {stay.ended for stay in ledger.stays} == {Ended.CLEARED} and ledger.resident("L2") == frozenset()


@pytest.mark.parametrize(
    "line",
    [KvGap(0, 1, 3, 5 * S, "lost"), KvDamaged(0, 1, 5 * S, "torn"), message(1, KvEvent(KvKind.OTHER), at=5 * S)],
)
def test_behind_a_hole_nothing_is_resident_until_it_is_stored_again(line: KvLine) -> None:
    ledger = one(message(0, stored("a", "b")), line, message(4, stored("b")))
    assert ledger.resident("L1") == {"cell-b"}
    assert [stay.ended for stay in ledger.stays if stay.block == "a"] == [Ended.GAP]
    assert ledger.gaps and incomplete(ledger, KvFacts())


def test_a_restarted_server_has_an_empty_cache() -> None:
    ledger = one(
        message(0, stored("a")), KvRestart(0, 5 * S, "counted from 0 again"), message(0, stored("b"), at=6 * S)
    )
    assert ledger.resident("L1") == {"cell-b"} and ledger.restarts == 1


def test_ranks_are_kept_apart() -> None:
    ledgers = kv_ledger([message(0, stored("a")), message(0, stored("b"), rank=1), message(1, removed("a"))])
    assert [(ledger.rank, set(ledger.resident("L1"))) for ledger in ledgers] == [(0, set()), (1, {"cell-b"})]


def test_a_cell_of_short_pages_is_there_when_all_of_them_are() -> None:
    blocks = tuple(f"p{index}" for index in range(16))
    whole = stored(*blocks, size=1, cells=("",) * 15 + ("cell",))
    assert one(message(0, whole)).resident("L1") == {"cell"}
    assert one(message(0, whole), message(1, removed("p3"))).resident("L1") == frozenset()


def test_an_event_without_a_medium_is_of_no_tier() -> None:
    event = msgspec.structs.replace(stored("a"), medium=None)
    assert one(message(0, event)).stays == ()


# --- S25 and S26: witnesses that do not tell everything ---------------------------------------------------


def test_s25_a_release_that_does_not_tell_what_leaves_l1_is_marked() -> None:
    ledger = one(*messages("0.5.10.post1"))
    facts = KvFacts(served=True, device_tokens=4096, evicted=18032.0, backed_up=16880.0, version="0.5.10.post1")
    told = incomplete(ledger, facts)
    assert any("no event tells of L2" in text for text in told)
    assert any("has room for 4096" in text for text in told)


def test_s25_without_a_single_removal() -> None:
    facts = KvFacts(evicted=6048.0, version="0.5.10.post1")
    (told,) = incomplete(one(message(0, stored("a"), stored("b", medium="CPU_PINNED"))), facts)
    assert told == "the server counted 6048 evicted tokens and no removed event came: SGLang 0.5.10.post1 sends none"


@pytest.mark.parametrize("ledger", [None, one(message(0, KvEvent(KvKind.CLEARED)))])
def test_s26_a_release_without_block_events_is_marked(ledger: RankLedger | None) -> None:
    (told,) = incomplete(ledger, KvFacts(served=True, version="0.5.8"))
    assert told == "requests were served and no block event came: SGLang 0.5.8 sends none with HiCache on"
    assert incomplete(ledger, KvFacts(served=False)) == ()
    (told,) = incomplete(ledger, KvFacts(served=True, version="0.5.23"))
    assert told.endswith("nothing was stored, or they are published elsewhere")


@pytest.mark.parametrize("release", ["0.5.23", "0.5.17"])
def test_a_witness_that_tells_everything_is_not_marked(release: str) -> None:
    facts = KvFacts(served=True, device_tokens=4096, evicted=1.0, backed_up=1.0)
    assert incomplete(one(*messages(release)), facts) == ()
