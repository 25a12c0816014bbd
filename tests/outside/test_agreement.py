"""The ledger from KV events beside the ledger from hooks, on recorded runs and on bent ones."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from kvwitness.collectors.kv_events import KvGap, KvLine, KvMessage
from kvwitness.collectors.kv_wire import KvKind
from kvwitness.tracer.outside.agreement import Agreement, Name, compare
from kvwitness.tracer.outside.kv_ledger import kv_ledger

from .recorded import facts, journal, messages


def agreement(release: str, lines: Iterable[KvLine] | None = None) -> Agreement:
    (ledger,) = kv_ledger(messages(release) if lines is None else lines)
    return compare(journal(release), facts(release), ledger)


def names(found: Agreement) -> set[Name]:
    return {one.name for one in found.differences}


def without(release: str, kind: KvKind, medium: str, count: int) -> list[KvMessage]:
    """The messages without the first so many events of a kind."""
    kept: list[KvMessage] = []
    for message in messages(release):
        events = []
        for event in message.batch.events:
            if event.kind is kind and event.medium == medium and count:
                count -= 1
            else:
                events.append(event)
        kept.append(
            msgspec.structs.replace(message, batch=msgspec.structs.replace(message.batch, events=tuple(events)))
        )
    assert not count
    return kept


def test_the_unified_tree_and_its_events_agree_on_every_stay() -> None:
    found = agreement("0.5.23")
    assert found.differences == () and found.agree
    l1, l2 = found.tiers
    assert (l1.stays, l1.resident_hooks, l1.resident_kv) == (1337, 207, 207)
    assert (l2.stays, l2.resident_hooks, l2.resident_kv) == (1055, 301, 301)
    assert found.sentence == "KV events and hooks agree: 1337 stays in L1 and 1055 stays in L2"


def test_hiradix_puts_recomputed_blocks_back_without_an_event() -> None:
    found = agreement("0.5.17")
    (difference,) = found.differences
    assert (difference.name, difference.tier, difference.only) == (Name.PUT_BACK_WITHOUT_EVENT, "L1", "hooks")
    assert difference.stays == 3 and found.agree
    assert [(tier.resident_hooks, tier.resident_kv) for tier in found.tiers] == [(207, 207), (301, 301)]


def test_s25_what_a_release_does_not_tell_has_a_name() -> None:
    found = agreement("0.5.10.post1")
    assert names(found) == {Name.REMOVAL_NOT_SENT, Name.NO_EVENTS_FOR_TIER}
    assert found.tiers[0].resident_kv > found.tiers[0].resident_hooks


@pytest.mark.parametrize(
    ("kind", "medium"), [(KvKind.STORED, "GPU"), (KvKind.STORED, "CPU_PINNED"), (KvKind.REMOVED, "GPU")]
)
def test_an_event_that_is_taken_out_is_not_explained_away(kind: KvKind, medium: str) -> None:
    found = agreement("0.5.23", without("0.5.23", kind, medium, 6))
    assert not found.agree and Name.UNEXPLAINED in names(found)
    assert "DISAGREE" in found.sentence


def test_messages_that_are_missing_name_the_gap() -> None:
    lines: list[KvLine] = list(messages("0.5.23"))
    lost = lines[10:14]
    assert all(isinstance(line, KvMessage) for line in lost)
    at = lost[0].batch.at_ns if isinstance(lost[0], KvMessage) else 0
    lines[10:14] = [KvGap(0, 10, 13, at, "lost on the way")]
    found = agreement("0.5.23", lines)
    assert Name.GAP in names(found) and Name.UNEXPLAINED not in names(found)


def test_what_began_before_the_recording_is_named_so() -> None:
    found = agreement("0.5.23", messages("0.5.23")[12:])
    assert Name.BEFORE_RECORDING in names(found)


def test_events_under_another_key_cannot_be_compared() -> None:
    (ledger,) = kv_ledger(messages("0.5.17"))
    found = compare(journal("0.5.23"), facts("0.5.23"), ledger)
    assert not found.agree and found.cells == 0 and found.sentence.startswith("not comparable")
