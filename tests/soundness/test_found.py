"""False confirmations that the search found, each as small as it gets, on the recorded run of SGLang 0.5.23.

A computed the prefix, B read it from L1, C from L2, C2 from L1 what C's load-back had brought.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from journal_tools import ABC, changed, journal_of, renumbered

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade
from soundness.compare import compare
from soundness.extras import place

EVENTS = list(read_journal(ABC).events)
A, B, C, C2 = "cfe530e4", "6edfbdb6", "a30c069e", "0984030d"
Change = Callable[[Any], Any]


def grades(events: Sequence[ev.Event]) -> dict[str, Grade]:
    """Grade of B, C and C2; the oracle agrees with everything that is confirmed."""
    assert compare(events).false == ()
    verdicts = judge([journal_of(events)]).verdicts
    return {name: next(v.grade for v in verdicts if v.rid.startswith(name)) for name in (B, C, C2)}


def number(rid: str) -> int:
    return next(e.id for e in EVENTS if isinstance(e, ev.Text) and e.text.startswith(rid))


def first(kind: type[ev.Event], rid: str = "", **values: int) -> ev.Event:
    return next(
        e
        for e in EVENTS
        if isinstance(e, kind)
        and (not rid or getattr(e, "req", None) == number(rid))
        and all(getattr(e, name) == value for name, value in values.items())
    )


def bent(event: ev.Event, **values: Any) -> list[ev.Event]:
    return [dataclasses.replace(e, **values) if e is event else e for e in EVENTS]


def with_extra(before: ev.Event, *extra: ev.Event) -> list[ev.Event]:
    events = list(EVENTS)
    place(events, before.seq - 1, extra)
    return events


def free_at(event: ev.Event) -> int:
    return [e for e in EVENTS[: event.seq] if isinstance(e, ev.HostAlloc)][-1].available


def test_untouched() -> None:
    assert set(grades(EVENTS).values()) == {Grade.CONFIRMED}


LOADED_FROM: dict[str, tuple[type[ev.Event], Change]] = {
    "other slots": (ev.LoadQueued, lambda e: dataclasses.replace(e, slots=(ev.Run(32, 1488),))),
    "slots that are no pages": (ev.LoadQueued, lambda e: dataclasses.replace(e, slots=(ev.Run(17, 1488),))),
    "slots whose backup was never acknowledged": (ev.BackupAcked, lambda e: None if e.node == 3 else e),
    "a transfer of too few bytes": (
        ev.TransferStarted,
        lambda e: dataclasses.replace(e, bytes=16) if e.direction == ev.Direction.H2D else e,
    ),
}


@pytest.mark.parametrize("name", LOADED_FROM)
def test_an_l1_hit_on_what_a_load_back_brought_is_worth_what_the_load_back_is(name: str) -> None:
    assert grades(renumbered(changed(EVENTS, *LOADED_FROM[name])))[C2] is not Grade.CONFIRMED


def test_a_load_back_that_completes_after_the_first_pass_was_launched() -> None:
    done, prefill = first(ev.LoadDone), first(ev.Prefill, C2)
    rest = [e for e in EVENTS if e is not done]
    at = rest.index(prefill) + 1
    late = renumbered([*rest[:at], dataclasses.replace(done, t_ns=prefill.t_ns), *rest[at:]])
    assert grades(late)[C2] is not Grade.CONFIRMED


def test_the_pool_s_own_count_makes_the_whole_stretch_doubtful() -> None:
    """A release that no event shows comes to light only with the next allocation, behind the claim's last event."""
    load = first(ev.LoadQueued)
    later = first(ev.HostAlloc, "77f780f8")
    events = [e for e in EVENTS if not (isinstance(e, ev.HostAlloc) and later.seq <= e.seq < load.seq)]
    last = first(ev.LoadDone)
    at = events.index(last) + 2
    more = ev.HostAlloc(0, last.t_ns, 0, 0, 16_000, (ev.Run(9_000, 16),))
    after = dataclasses.replace(more, t_ns=events[at - 1].t_ns)
    assert grades(renumbered([*events[:at], after, *events[at:]]))[C] is not Grade.CONFIRMED


def test_slots_written_without_having_been_allocated() -> None:
    match = first(ev.Matched, C)
    taken = (ev.Run(16, 1488),)
    story = (
        ev.BackupQueued(0, 0, number(A), 3, 0, 1488, 1488, 0, taken),
        ev.TransferStarted(0, 0, 900, ev.Direction.D2H, 1488, 1488 * 1024, 0, (3,)),
        ev.BackupAcked(0, 0, 900, 3, -1),
    )
    assert grades(with_extra(match, *story))[C] is not Grade.CONFIRMED


@pytest.mark.parametrize(
    "extra",
    [
        ev.HostClear(0, 0, 0, 16_400),
        ev.Reset(0, 0, 1),
        ev.HostAlloc(0, 0, 0, 0, 0, (ev.Run(16, 16),)),
    ],
)
def test_slots_lost_while_they_are_read(extra: ev.Event) -> None:
    done = first(ev.LoadDone)
    if isinstance(extra, ev.HostAlloc):
        extra = dataclasses.replace(extra, available=free_at(done) - 16)
    assert grades(with_extra(done, extra))[C] is not Grade.CONFIRMED


@pytest.mark.parametrize("rid", [B, C, C2])
def test_evicted_or_reset_between_match_and_result(rid: str) -> None:
    done = first(ev.PrefillDone, rid)
    story = (
        ev.EvictBegin(0, 0, 900, 1, 1488, 0, 0, ()),
        ev.EvictedL1(0, 0, 900, 3, 0, 1488, ev.Eviction.DEMOTED, 1488, 0),
        ev.EvictEnd(0, 0, 900, 1488),
    )
    assert grades(with_extra(done, *story))[rid] is not Grade.CONFIRMED
    assert grades(with_extra(done, ev.Reset(0, 0, 1)))[rid] is not Grade.CONFIRMED


@pytest.mark.parametrize("name", ["tree.evict", "tree.reset_full"])
def test_a_residency_rests_on_who_would_have_seen_its_end(name: str) -> None:
    def missing(event: ev.Facts) -> ev.Facts:
        facts = json.loads(event.json)
        for hook in facts.get("hooks", ()):
            if hook["name"] == name:
                hook["status"] = "missing"
        return dataclasses.replace(event, json=json.dumps(facts))

    assert Grade.CONFIRMED not in grades(changed(EVENTS, ev.Facts, missing)).values()


BENT: dict[str, tuple[Callable[[], list[ev.Event]], str]] = {
    "the prefill that gave birth is in a hole": (lambda: [e for e in EVENTS if e is not first(ev.Prefill, A)], B),
    "a pass that ends before the node does": (lambda: bent(first(ev.Prefill, A), end=1472), B),
    "no output token": (lambda: bent(first(ev.PrefillDone, B), output_tokens=0), B),
    "a decision after the admission": (
        lambda: renumbered(
            [
                *(e for e in EVENTS if not isinstance(e, ev.LoadBackDecided)),
                dataclasses.replace(first(ev.LoadBackDecided), t_ns=EVENTS[-1].t_ns),
            ]
        ),
        C,
    ),
    "two decisions": (lambda: with_extra(first(ev.Admission, C), first(ev.LoadBackDecided)), C),
    "two load-backs": (lambda: with_extra(first(ev.Admission, C), first(ev.LoadQueued)), C),
    "a load-back without a match": (
        lambda: with_extra(first(ev.Matched, C2), dataclasses.replace(first(ev.LoadQueued), req=number(C2))),
        C2,
    ),
    "matched more than the path holds": (lambda: bent(first(ev.Matched, B), host=16), B),
    "an eviction without an end": (lambda: renumbered(e for e in EVENTS if e is not first(ev.EvictEnd, call=1)), C),
    "a node that leaves L1 twice": (
        lambda: with_extra(
            first(ev.Matched, C),
            ev.EvictBegin(0, 0, 900, 1, 1488, 0, 0, ()),
            ev.EvictedL1(0, 0, 900, 3, 0, 1488, ev.Eviction.DEMOTED, 1488, 0),
            ev.EvictEnd(0, 0, 900, 1488),
        ),
        C,
    ),
    "in L1 again, and nothing brought it back": (
        lambda: with_extra(first(ev.Queued, C), first(ev.Inserted, B)),
        C,
    ),
    "a launch that leaves out what waits": (
        lambda: with_extra(
            first(ev.TransferStarted, transfer=9),
            ev.TransferStarted(0, 0, 900, ev.Direction.D2H, 0, 0, 0, ()),
        ),
        C,
    ),
    "a direction nobody knows": (lambda: bent(first(ev.TransferStarted, transfer=13), direction=3), C),
    "a number with a second meaning": (lambda: with_extra(first(ev.Queued, B), ev.Text(0, 0, number(A), "other")), B),
    "a result once more": (lambda: with_extra(first(ev.LoadDone), first(ev.PrefillDone, B)), C),
    "the node is seen for another prefix": (
        lambda: with_extra(first(ev.Queued, C), dataclasses.replace(first(ev.Inserted, A), req=number("ab053df4"))),
        C,
    ),
    "one digest of many differs": (
        lambda: bent(
            first(ev.PrefixDigests, C),
            digests=(*first(ev.PrefixDigests, C).digests[:40], bytes(8), *first(ev.PrefixDigests, C).digests[41:]),
        ),
        C,
    ),
    "no facts of the instance": (
        lambda: renumbered(e for e in EVENTS if not (isinstance(e, ev.Facts) and e.kind == ev.FactKind.INSTANCE)),
        B,
    ),
    "the id is in use twice": (lambda: with_extra(first(ev.Matched, B), first(ev.Queued, B)), B),
    "admitted after the prefill": (
        lambda: renumbered(_swapped(first(ev.Admission, B), first(ev.Prefill, B))),
        B,
    ),
}


def _swapped(a: ev.Event, b: ev.Event) -> list[ev.Event]:
    """Two events in each other's places, with each other's times."""
    other = {id(a): dataclasses.replace(b, t_ns=a.t_ns), id(b): dataclasses.replace(a, t_ns=b.t_ns)}
    return [other.get(id(e), e) for e in EVENTS]


@pytest.mark.parametrize("name", BENT)
def test_found(name: str) -> None:
    make, rid = BENT[name]
    assert grades(make())[rid] is not Grade.CONFIRMED


def test_a_prefill_that_was_launched_only_after_its_backup_was_queued() -> None:
    prefill, queued = first(ev.Prefill, A), first(ev.BackupQueued, A)
    rest = [e for e in EVENTS if e is not prefill]
    at = rest.index(queued) + 1
    moved = renumbered([*rest[:at], dataclasses.replace(prefill, t_ns=queued.t_ns), *rest[at:]])
    assert grades(moved)[C] is not Grade.CONFIRMED
