"""Claims that do not follow from the events, and that the rules of before let pass: the oracle refuses each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from journal_tools import changed, renumbered

from kvwitness.patches.schema import events as ev
from soundness.extras import place
from soundness.oracle import Oracle
from soundness.simulate import Server

A = tuple(range(65))
"""64 tokens in four pages, and one that is always computed."""
FILL = tuple(range(1000, 1097))
MORE = tuple(range(3000, 3097))
Events = list[ev.Event]


def served(*batches: tuple[str, tuple[int, ...]], chunked: bool = False, **options: Any) -> Server:
    """A server after these requests, one after the other."""
    server = Server(0, page=16, l1=96, l2=800, quiet=True, **options)
    server.backend.random = lambda: 0.99  # type: ignore[method-assign]
    for rid, tokens in batches:
        server.serve([(rid, tokens)], chunked=chunked and rid == "a")
    return server


def why(events: Sequence[ev.Event], rid: str, tier: str, start: int = 0, end: int = 64) -> str | None:
    oracle = Oracle.of(events)
    stay = next(stay for stay in oracle.attempts() if stay.use.rid == rid)
    return oracle.refusal(stay, tier, start, end)


def number(events: Sequence[ev.Event], rid: str) -> int:
    return next(e.id for e in events if isinstance(e, ev.Text) and e.text == rid)


def of(events: Sequence[ev.Event], kind: type[ev.Event], rid: str = "") -> list[Any]:
    return [e for e in events if isinstance(e, kind) and (not rid or e.req == number(events, rid))]  # type: ignore[attr-defined]


def moved(events: Events, what: Sequence[ev.Event], behind: ev.Event) -> Events:
    """A whole stretch comes only after an event (or before it, where it came later)."""
    rest = [e for e in events if e not in what]
    at = rest.index(behind) + 1
    late = [dataclasses.replace(e, t_ns=rest[at - 1].t_ns) for e in what]
    return renumbered([*rest[:at], *late, *rest[at:]])


def read_back() -> Events:
    """A computes, a long one pushes it out, C reads it from L2, D from L1."""
    return served(("a", A), ("fill", FILL), ("c", A), ("d", A)).events


# --- T01: the order of the copies ---------------------------------------------------------------------


@pytest.mark.parametrize("behind", [ev.Prefill, ev.PrefillDone, ev.Released])
def test_a_copy_to_l1_that_begins_after_the_pass_that_uses_it(behind: type[ev.Event]) -> None:
    events = read_back()
    copy = [e for e in of(events, ev.TransferStarted) if e.direction == ev.Direction.H2D] + of(events, ev.LoadDone)
    assert why(events, "c", "L2") is None
    late = moved(events, copy, of(events, behind, "c")[0])
    assert "launched after the first pass" in str(why(late, "c", "L2"))


# --- T02: what is copied to L2 is in L1 ---------------------------------------------------------------


def late_backup(events: Events, *, queued: bool) -> Events:
    """A's node leaves L1, and only then its backup is queued (or launched) and acknowledged."""
    gone = of(events, ev.EvictEnd)[0]
    first = of(events, ev.BackupQueued)[0]
    launch = of(events, ev.TransferStarted)[0]
    late = [launch, *of(events, ev.BackupAcked)[:1]]
    return moved(events, [*([of(events, ev.HostAlloc)[0], first] if queued else []), *late], gone)


@pytest.mark.parametrize("queued", [True, False], ids=["queued", "launched"])
def test_a_backup_of_what_had_left_l1(queued: bool) -> None:
    events = read_back()
    assert why(events, "c", "L2") is None and why(events, "d", "L1") is None
    late = late_backup(events, queued=queued)
    assert why(late, "c", "L2") is not None
    assert why(late, "d", "L1") is not None, "what C's load-back brought is no better"


@pytest.mark.parametrize("queued", [True, False], ids=["queued", "launched"])
def test_also_when_it_was_in_l1_again_before_it_was_read(queued: bool) -> None:
    """R cannot load it and computes it, so that it is in L1 again and leaves a second time: L2 holds the late copy."""
    server = served(("a", A), ("fill", FILL))
    server.serve([("r", A)], refuse=True)
    for rid, tokens in (("fill2", MORE), ("c", A)):
        server.serve([(rid, tokens)])
    assert why(server.events, "c", "L2") is None
    assert "copied to L2" in str(why(late_backup(server.events, queued=queued), "c", "L2"))


# --- T03: each chunk is born in its own pass ----------------------------------------------------------


def test_a_backup_of_a_chunk_that_is_queued_before_its_pass() -> None:
    events = served(("a", A), ("fill", FILL), ("c", A), chunked=True).events
    first, second = of(events, ev.Prefill, "a")
    queued = next(e for e in of(events, ev.BackupQueued, "a") if e.start == first.end)
    taken = next(e for e in of(events, ev.HostAlloc, "a") if e.slots == queued.slots)
    assert why(events, "c", "L2") is None
    early = moved(events, [taken, queued], events[events.index(second) - 1])
    assert why(early, "c", "L2", 0, first.end) is None
    assert "copied to L2" in str(why(early, "c", "L2", first.end, 64))


# --- T06: digests have to fit -------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [64, 32, 8])
def test_digests_of_another_grid_say_nothing_about_the_prompt(grid: int) -> None:
    """The tree serves A's node to another prompt; the digests that would show it are told with another grid."""
    events = served(("a", A), ("b", A)).events
    other = tuple(bytes([at]) * 8 for at in range(64 // grid))
    mine = number(events, "b")

    def strange(event: Any) -> ev.Event:
        return dataclasses.replace(event, grid=grid, digests=other) if event.req == mine else event  # type: ignore[no-any-return]

    assert why(events, "b", "L1") is None
    assert why(changed(events, ev.PrefixDigests, strange), "b", "L1") is not None


# --- T07, T08: facts ----------------------------------------------------------------------------------


def with_facts(events: Events, kind: int, how: Callable[[dict[str, Any]], None]) -> Events:
    def one(event: Any) -> ev.Event:
        told = json.loads(event.json)
        if event.kind == kind:
            how(told)
        return dataclasses.replace(event, json=json.dumps(told))

    return changed(events, ev.Facts, one)


@pytest.mark.parametrize("facts", [{"page_size": 32}, {"bytes_per_token": 0}, {"bytes_per_token": 512}], ids=str)
def test_facts_that_do_not_fit_the_events(facts: dict[str, Any]) -> None:
    events = with_facts(read_back(), ev.FactKind.INSTANCE, lambda told: told.update(facts))
    assert why(events, "c", "L2") is not None and why(events, "d", "L1") is not None


def before(events: Events, event: ev.Event, *extra: ev.Event) -> Events:
    copy = list(events)
    place(copy, events.index(event), extra)
    return copy


def test_a_later_fact_that_takes_back_an_earlier_one() -> None:
    """Two ranks, of which one was recorded: that it says later that there is one does not help."""
    events = read_back()
    alone = next(e for e in of(events, ev.Facts) if e.kind == ev.FactKind.INSTANCE)
    two = with_facts(
        events, ev.FactKind.INSTANCE, lambda told: told.update(ranks={**told["ranks"], "tp_size": 2, "attn_tp_size": 2})
    )
    for where in ("fill", "c", "d"):
        later = before(two, of(two, ev.Queued, where)[0], dataclasses.replace(alone, seq=0))
        assert why(later, "c", "L2") is not None
    assert why(before(events, of(events, ev.Queued, "c")[0], dataclasses.replace(alone, seq=0)), "c", "L2") is None


@pytest.mark.parametrize("until", ["fill", "c", "d"])
def test_hooks_that_are_installed_only_later(until: str) -> None:
    events = read_back()
    installed = [e for e in of(events, ev.Facts) if e.kind == ev.FactKind.COVERAGE][-1]

    def pending(told: dict[str, Any]) -> None:
        told["hooks"][0]["status"] = "pending"

    late = with_facts(events, ev.FactKind.COVERAGE, pending)
    late = before(late, of(late, ev.Queued, until)[0], dataclasses.replace(installed, seq=0))
    assert why(late, "c", "L2") is not None
    assert why(before(events, of(events, ev.Queued, until)[0], installed), "c", "L2") is None


# --- T09: storage -------------------------------------------------------------------------------------


def from_storage() -> Events:
    server = served(("a", A), stored=True)
    server.flush()
    server.serve([("c", A)])
    assert why(server.events, "c", "L3") is None
    return server.events


def test_what_was_not_looked_up_in_storage() -> None:
    events = from_storage()
    assert why(renumbered(e for e in events if not isinstance(e, ev.StorageLookedUp)), "c", "L3") is not None


def test_a_look_up_after_the_end_is_none() -> None:
    events = from_storage()
    done = of(events, ev.PrefetchDone, "c")[0]
    (told,) = of(events, ev.StorageLookedUp, "c")
    late = moved(events, [dataclasses.replace(told, tokens=0)], done)
    late = renumbered(e for e in late if not (isinstance(e, ev.StorageLookedUp) and e.tokens))
    assert why(late, "c", "L3") is not None


@pytest.mark.parametrize("work", [ev.StorageWork.READ, ev.StorageWork.LOOK_UP])
def test_a_transfer_that_raised(work: int) -> None:
    events = from_storage()
    done = of(events, ev.PrefetchDone, "c")[0]
    failed = ev.StorageFailed(0, 0, work, number(events, "c"), "OSError: told")
    assert why(before(events, done, failed), "c", "L3") is not None
    other = ev.StorageFailed(0, 0, ev.StorageWork.WRITE, 0, "OSError: told")
    assert why(before(events, done, other), "c", "L3") is None


# --- T10: a snapshot ----------------------------------------------------------------------------------


def attached() -> Events:
    server = served(("a", A), ("fill", FILL))
    server.attach()
    for rid in ("c", "d"):
        server.serve([(rid, A)])
    assert why(server.events, "c", "L2") is None and why(server.events, "d", "L1") is None
    return server.events


@pytest.mark.parametrize("direction", [ev.Direction.D2H, ev.Direction.H2D])
@pytest.mark.parametrize("launched", [0, 1])
def test_a_copy_that_is_under_way_into_the_tier_that_is_said_to_hold_it(direction: int, launched: int) -> None:
    events = attached()
    there = next(e for e in of(events, ev.ResidentNode) if (e.l1 if direction == ev.Direction.H2D else e.l2))
    flight = ev.InFlight(0, 0, 90 * launched, direction, 64, launched, (there.node,))
    assert why(before(events, of(events, ev.ResidentDigests)[0], flight), "c", "L2") is not None


def test_a_copy_whose_end_was_seen_before_the_node_was_looked_at() -> None:
    events = attached()
    there = next(e for e in of(events, ev.ResidentNode) if e.l2)
    told = [
        ev.InFlight(0, 0, 90, ev.Direction.D2H, 64, 1, (there.node,)),
        ev.BackupAcked(0, 0, 90, there.node, -1),
    ]
    assert why(before(events, of(events, ev.ResidentDigests)[0], *told), "c", "L2") is None


@pytest.mark.parametrize("field", ["nodes", "l1_tokens", "l2_tokens"])
@pytest.mark.parametrize("complete", [0, 1])
def test_a_snapshot_that_counts_otherwise_than_it_found(field: str, complete: int) -> None:
    def otherwise(end: Any) -> ev.Event:
        return dataclasses.replace(end, complete=complete, **{field: getattr(end, field) + 16})  # type: ignore[no-any-return]

    events = changed(attached(), ev.SnapshotEnd, otherwise)
    assert why(events, "c", "L2") is not None and why(events, "d", "L1") is not None


# --- T11: fields that contradict ----------------------------------------------------------------------


def test_demoted_and_without_a_host_copy() -> None:
    events = read_back()
    bent = changed(events, ev.EvictedL1, lambda e: dataclasses.replace(e, unbacked=e.tokens))  # type: ignore[attr-defined]
    assert why(bent, "c", "L2") is not None


@pytest.mark.parametrize(("tokens", "holds"), [(1, False), (48, True)])
def test_tokens_that_were_generated_are_as_many_as_came_out(tokens: int, holds: bool) -> None:
    """A has a prompt of 17 tokens, and what it put into the tree has 64: the rest is its answer, or it is nothing."""
    events = served(("a", A), ("b", A)).events
    mine = number(events, "a")
    bent: Events = []
    for e in events:
        if getattr(e, "req", None) == mine:
            if isinstance(e, ev.Queued):
                e = dataclasses.replace(e, prompt_tokens=17)
            elif isinstance(e, ev.PrefixDigests):
                later = dataclasses.replace(e, first_cell=1, digests=e.digests[1:])
                e = dataclasses.replace(e, digests=e.digests[:1])
            elif isinstance(e, ev.Matched):
                e = dataclasses.replace(e, key_tokens=16)
            elif isinstance(e, ev.Admission | ev.Prefill):
                e = dataclasses.replace(e, end=17)
            elif isinstance(e, ev.PrefixPoint):
                continue
            elif isinstance(e, ev.Inserted):
                bent.append(dataclasses.replace(later, t_ns=e.t_ns))
            elif isinstance(e, ev.Released):
                e = dataclasses.replace(e, output_tokens=tokens)
        bent.append(e)
    # What is decoded is put into the tree at the end.
    put, done = of(bent, ev.Inserted, "a")[0], of(bent, ev.PrefillDone, "a")[0]
    at = bent.index(put)
    bent[at], bent[at + 1] = dataclasses.replace(done, t_ns=put.t_ns), dataclasses.replace(put, t_ns=done.t_ns)
    assert (why(renumbered(bent), "b", "L1", 16, 64) is None) is holds


def test_a_decision_that_loaded_and_refused() -> None:
    events = read_back()
    for reason in (ev.Refusal.UNKNOWN, ev.Refusal.TOO_SHORT, ev.Refusal.NO_DEVICE_SLOTS):
        bent = changed(events, ev.LoadBackDecided, lambda e, reason=reason: dataclasses.replace(e, reason=reason))  # type: ignore[misc]
        assert why(bent, "c", "L2") is not None


# --- T12: weights -------------------------------------------------------------------------------------


def weights(events: Sequence[ev.Event], rid: str, tier: str) -> str:
    oracle = Oracle.of(events)
    stay = next(stay for stay in oracle.attempts() if stay.use.rid == rid)
    assert oracle.refusal(stay, tier, 0, 64) is None, "the read is what it is"
    return oracle.weights(stay, 0, 64)


@pytest.mark.parametrize(
    ("kind", "ok", "told"),
    [
        (ev.WeightsKind.DISK, 1, "other"),
        (ev.WeightsKind.TENSORS, 1, "other"),
        (ev.WeightsKind.DISTRIBUTED, 1, "other"),
        (ev.WeightsKind.IPC, 1, "other"),
        (ev.WeightsKind.DISK, 0, "unknown"),
        (ev.WeightsKind.LORA_LOADED, 1, "same"),
        (ev.WeightsKind.LORA_UNLOADED, 1, "same"),
    ],
)
def test_kv_of_other_weights(kind: int, ok: int, told: str) -> None:
    update = ev.WeightsUpdated(0, 0, 1, kind, ok, 0, "v2")
    events = served(("a", A), ("b", A)).events
    assert weights(events, "b", "L1") == "same"
    assert weights(before(events, of(events, ev.Queued, "b")[0], update), "b", "L1") == told
    assert weights(before(events, of(events, ev.Queued, "a")[0], update), "b", "L1") in ("same", told)
    events = read_back()
    assert weights(before(events, of(events, ev.Queued, "c")[0], update), "c", "L2") == told
    assert weights(before(events, of(events, ev.Queued, "c")[0], update), "d", "L1") == told


def test_storage_outlives_the_weights() -> None:
    events = from_storage()
    update = ev.WeightsUpdated(0, 0, 1, ev.WeightsKind.DISK, 1, 1, "v2")
    assert weights(events, "c", "L3") == "same"
    assert weights(before(events, of(events, ev.Queued, "c")[0], update), "c", "L3") == "other"
