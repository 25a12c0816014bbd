"""The oracle on journals small enough to check by eye: it accepts what happened and refuses what was not seen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from journal_tools import ABC, changed, journal_of, renumbered

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.schema import events as ev
from soundness.compare import journal_as_read
from soundness.oracle import Oracle
from soundness.simulate import Server

PROMPT = tuple(range(33))
CELLS = 32


def story() -> list[ev.Event]:
    """A computes a prefix, B reads it from L1, a long one pushes it out, C reads it from L2, D from L1 again."""
    server = Server(0, page=16, l1=96, l2=400, quiet=True)
    server.serve([("a", PROMPT)])
    server.serve([("b", (*PROMPT[:CELLS], 900))])
    server.serve([("fill", tuple(range(1000, 1096)))])
    server.serve([("c", (*PROMPT[:CELLS], 901))])
    server.serve([("d", (*PROMPT[:CELLS], 902))])
    return server.events


STORY = story()


def why(events: Sequence[ev.Event], rid: str, tier: str, start: int = 0, end: int = CELLS) -> str | None:
    oracle = Oracle([events])
    attempt = next((a for a in oracle.attempts() if a.use.rid == rid), None)
    return "no such request" if attempt is None else oracle.refusal(attempt, tier, start, end)


@pytest.mark.parametrize(("rid", "tier"), [("b", "L1"), ("c", "L2"), ("d", "L1")])
def test_what_happened_is_established(rid: str, tier: str) -> None:
    assert why(STORY, rid, tier) is None
    other = "L2" if tier == "L1" else "L1"
    assert why(STORY, rid, other) is not None


@pytest.mark.parametrize("rid", ["a", "fill"])
def test_what_was_computed_was_not_reused(rid: str) -> None:
    assert why(STORY, rid, "L1") is not None and why(STORY, rid, "L2") is not None


def test_no_more_than_was_reused() -> None:
    assert why(STORY, "c", "L2", 0, CELLS + 1) is not None
    assert why(STORY, "c", "L2", CELLS, CELLS) is not None


Change = Callable[[Any], Any]


def _of(rid: str) -> int:
    return next(e.id for e in STORY if isinstance(e, ev.Text) and e.text == rid)


REFUSED: dict[str, tuple[type[ev.Event], Change]] = {
    "no backup": (ev.BackupQueued, lambda e: None),
    "backup not launched": (ev.TransferStarted, lambda e: None if e.direction == ev.Direction.D2H else e),
    "backup not acknowledged": (ev.BackupAcked, lambda e: None),
    "slots not allocated": (ev.HostAlloc, lambda e: None),
    "not evicted": (ev.EvictedL1, lambda e: None),
    "dropped, not demoted": (ev.EvictedL1, lambda e: dataclasses.replace(e, how=ev.Eviction.DROPPED)),
    "not matched": (ev.Matched, lambda e: None if e.req == _of("c") else e),
    "match promised nothing": (ev.Matched, lambda e: dataclasses.replace(e, host=0)),
    "not queued": (ev.LoadQueued, lambda e: None),
    "queued for another": (ev.LoadQueued, lambda e: dataclasses.replace(e, req=_of("b"))),
    "other slots": (ev.LoadQueued, lambda e: dataclasses.replace(e, slots=(ev.Run(64, 32),))),
    "slots in another order": (ev.LoadQueued, lambda e: dataclasses.replace(e, slots=(ev.Run(16, 16), ev.Run(0, 16)))),
    "load not launched": (ev.TransferStarted, lambda e: None if e.direction == ev.Direction.H2D else e),
    "load not complete": (ev.LoadDone, lambda e: None),
    "too few bytes": (ev.TransferStarted, lambda e: dataclasses.replace(e, bytes=e.bytes - 1024)),
    "other tokens": (ev.TransferStarted, lambda e: dataclasses.replace(e, tokens=e.tokens - 16)),
    "loaded less": (ev.LoadBackDecided, lambda e: dataclasses.replace(e, loaded=16)),
    "no decision": (ev.LoadBackDecided, lambda e: None),
    "not admitted": (ev.Admission, lambda e: dataclasses.replace(e, admitted=0)),
    "admitted with less": (ev.Admission, lambda e: dataclasses.replace(e, prefix=0)),
    "computed all the same": (ev.Prefill, lambda e: dataclasses.replace(e, start=0)),
    "not computed to the end": (ev.Prefill, lambda e: dataclasses.replace(e, end=e.end - 1)),
    "result not processed": (ev.PrefillDone, lambda e: None),
    "never computed before": (ev.Prefill, lambda e: None if e.req == _of("a") else e),
    "another prefix": (
        ev.PrefixDigests,
        lambda e: dataclasses.replace(e, digests=tuple(bytes(8) for _ in e.digests)) if e.req == _of("c") else e,
    ),
    "the server says otherwise": (ev.Released, lambda e: dataclasses.replace(e, cached_host=0)),
    "aborted": (ev.Released, lambda e: dataclasses.replace(e, state=ev.ReleaseState.ABORTED)),
    "no facts": (ev.Facts, lambda e: None if e.kind == ev.FactKind.INSTANCE else e),
    "no coverage": (ev.Facts, lambda e: None if e.kind == ev.FactKind.COVERAGE else e),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_read_from_l2_is_refused_without_a_link(name: str) -> None:
    kind, change = REFUSED[name]
    assert why(renumbered(changed(STORY, kind, change)), "c", "L2") is not None


def stored_story() -> list[ev.Event]:
    """As above after a flush, with a storage: C reads from L3, D from L1, and E what C's prefetch brought from L2."""
    server = Server(0, page=16, l1=96, l2=400, quiet=True, stored=True)
    server.backend.random = lambda: 0.99  # type: ignore[method-assign]
    server.serve([("a", PROMPT)])
    server.flush()
    server.serve([("c", (*PROMPT[:CELLS], 901))])
    server.serve([("d", (*PROMPT[:CELLS], 902))])
    server.serve([("fill", tuple(range(1000, 1096)))])
    server.serve([("e", (*PROMPT[:CELLS], 903))])
    return server.events


STORED = stored_story()
UNTRUE: dict[str, tuple[type[ev.Event], Change]] = {
    "not asked for": (ev.PrefetchAsked, lambda e: None),
    "declined": (ev.PrefetchAsked, lambda e: dataclasses.replace(e, issued=0)),
    "asked for other tokens": (ev.PrefetchAsked, lambda e: dataclasses.replace(e, start=16)),
    "asked for fewer": (ev.PrefetchAsked, lambda e: dataclasses.replace(e, tokens=16)),
    "fewer found": (ev.StorageLookedUp, lambda e: dataclasses.replace(e, tokens=16)),
    "nothing came": (ev.PrefetchDone, lambda e: None),
    "fewer came": (ev.PrefetchDone, lambda e: dataclasses.replace(e, completed=16, loaded=16)),
    "to other positions": (ev.PrefetchDone, lambda e: dataclasses.replace(e, start=16)),
    "into other slots": (ev.PrefetchDone, lambda e: dataclasses.replace(e, slots=(ev.Run(64, 32),))),
    "slots not allocated": (ev.HostAlloc, lambda e: None),
    "not loaded": (ev.LoadDone, lambda e: None),
    "for another request": (ev.PrefetchDone, lambda e: dataclasses.replace(e, req=1)),
}


def test_what_storage_brought_is_established() -> None:
    assert why(STORED, "c", "L3") is None and why(STORED, "c", "L2") is not None
    assert why(STORED, "d", "L1") is None
    assert why(STORED, "e", "L2") is None and why(STORED, "e", "L3") is not None


@pytest.mark.parametrize("name", UNTRUE)
def test_what_storage_brought_is_refused_without_a_link(name: str) -> None:
    kind, change = UNTRUE[name]
    events = renumbered(changed(STORED, kind, change))
    assert why(events, "c", "L3") is not None
    assert why(events, "e", "L2") is not None


def test_without_a_backend_nothing_came_from_storage() -> None:
    at = next(i for i, e in enumerate(STORED) if isinstance(e, ev.Queued) and e.req != 1)
    detached = ev.StorageChanged(0, STORED[at].t_ns, 0, 1, "detached")
    assert why(renumbered([*STORED[:at], detached, *STORED[at:]]), "c", "L3") is not None


def test_every_hole_repeat_and_swap_inside_the_chain_is_refused() -> None:
    first = next(i for i, e in enumerate(STORY) if isinstance(e, ev.Prefill))
    last = next(i for i, e in enumerate(STORY) if isinstance(e, ev.LoadDone))
    for at in range(first, last + 1):
        assert why([*STORY[:at], *STORY[at + 1 :]], "c", "L2") is not None, STORY[at]
        assert why([*STORY[: at + 1], *STORY[at:]], "c", "L2") is not None, STORY[at]
        swapped = list(STORY)
        swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
        assert why(swapped, "c", "L2") is not None, STORY[at]


def test_a_clock_that_runs_backwards_is_refused() -> None:
    at = next(i for i, e in enumerate(STORY) if isinstance(e, ev.LoadQueued))
    bent = [dataclasses.replace(e, t_ns=1) if i == at else e for i, e in enumerate(STORY)]
    assert why(bent, "c", "L2") is not None


def test_what_happens_outside_the_chain_does_not_matter() -> None:
    assert why(STORY[:-2], "c", "L2") is None
    last = max(i for i, e in enumerate(STORY) if isinstance(e, ev.Prefill))
    assert why([*STORY[:last], *STORY[last + 1 :]], "c", "L2") is None


@pytest.mark.parametrize(
    "extra",
    [
        [ev.HostFree(0, 0, 0, 0, 0, (ev.Run(0, 16),))],
        [ev.HostClear(0, 0, 0, 400)],
        [ev.Reset(0, 0, 1)],
    ],
)
@pytest.mark.parametrize("before", [ev.LoadQueued, ev.LoadDone])
def test_slots_that_do_not_stay_are_refused(extra: list[ev.Event], before: type[ev.Event]) -> None:
    at = next(i for i, e in enumerate(STORY) if isinstance(e, before))
    events = renumbered([*STORY[:at], *(dataclasses.replace(e, t_ns=STORY[at].t_ns) for e in extra), *STORY[at:]])
    assert why(events, "c", "L2") is not None


@pytest.mark.parametrize("name", ["controller.load", "host_pool.free", "tree.evict", "tree.insert", "tree.reset_full"])
def test_a_hook_that_was_not_there_or_failed_is_refused(name: str) -> None:
    def without(event: ev.Facts) -> ev.Facts:
        facts = json.loads(event.json)
        for hook in facts.get("hooks", ()):
            if hook["name"] == name:
                hook["status"] = "missing"
        return dataclasses.replace(event, json=json.dumps(facts))

    assert why(changed(STORY, ev.Facts, without), "c", "L2") is not None
    failed = [ev.Text(0, 1, 77, name), ev.HookFailed(0, 1, 77, 1, "x")]
    assert why(renumbered([*failed, *STORY]), "c", "L2") is not None


def test_in_order_the_reader_is_spared_without_a_difference() -> None:
    for events in (STORY, list(read_journal(ABC).events), [*STORY[:9], *STORY[12:]]):
        read = journal_of(events)
        assert journal_as_read(events) == read
