"""Records that contradict themselves in ways that were once confirmed (T01 to T12): none of it is confirmed any more.

None was seen of SGLang. Each is a record as a faulty recorder, a mixed-up folder or a forger would leave it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from journal_tools import journal_of, renumbered
from soundness.simulate import Server

from kvwitness.collectors.journal import Journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Reason, RequestVerdict, Tier

A = tuple(range(65))
"""64 tokens in four pages, and one that is always computed."""
PROVEN = (Grade.CONFIRMED, Grade.VERIFIED)
Events = list[ev.Event]


def fill(number: int, tokens: int = 97) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + tokens))


def server(**options: Any) -> Server:
    return Server(0, page=16, l1=options.pop("l1", 96), l2=options.pop("l2", 800), quiet=True, **options)


def read_from_l2() -> Events:
    """a computes, a fill pushes it out of L1, c reads it from L2, d finds it in L1."""
    s = server(l1=192)
    s.serve([("a", A)])
    s.serve([("fill", fill(1, 177))])
    s.serve([("c", A)])
    s.serve([("d", A)])
    return s.events


def verdict_of(events: Sequence[ev.Event], rid: str) -> RequestVerdict:
    verdict = judge([journal_of(renumbered(events))]).verdict(rid)
    assert verdict is not None
    return verdict


def proven(events: Sequence[ev.Event], rid: str) -> bool:
    return verdict_of(events, rid).grade in PROVEN


def number(events: Sequence[ev.Event], rid: str) -> int:
    return next(e.id for e in events if isinstance(e, ev.Text) and e.text == rid)


def only(events: Sequence[ev.Event], kind: type[ev.Event], rid: str = "", **values: object) -> Any:
    """The last event of a kind, of a request, with these values."""
    req = number(events, rid) if rid else None
    found = [
        e
        for e in events
        if isinstance(e, kind)
        and (req is None or getattr(e, "req", None) == req)
        and all(getattr(e, name) == value for name, value in values.items())
    ]
    return found[-1]


def moved(events: Events, moving: Sequence[ev.Event], behind: ev.Event) -> Events:
    """The events with some of them right behind another one."""
    rest = [e for e in events if e not in moving]
    at = rest.index(behind) + 1
    later = [dataclasses.replace(e, t_ns=behind.t_ns) for e in moving]
    return [*rest[:at], *later, *rest[at:]]


def bent(events: Events, event: ev.Event, **values: Any) -> Events:
    return [dataclasses.replace(e, **values) if e is event else e for e in events]


def with_facts(events: Events, **facts: Any) -> Events:
    return [
        dataclasses.replace(e, json=json.dumps({**json.loads(e.json), **facts}))
        if isinstance(e, ev.Facts) and e.kind == ev.FactKind.INSTANCE
        else e
        for e in events
    ]


def test_what_the_cases_bend_is_confirmed() -> None:
    events = read_from_l2()
    assert verdict_of(events, "c").sentence == "L2 read confirmed"
    assert verdict_of(events, "d").sentence == "L1 read confirmed"


# --- T01, T02, T03: the order of copies --------------------------------------------------------------


@pytest.mark.parametrize("behind", [ev.Prefill, ev.PrefillDone, ev.Released])
def test_t01_a_copy_to_l1_that_is_launched_after_the_pass_that_uses_it(behind: type[ev.Event]) -> None:
    events = read_from_l2()
    copy = [only(events, ev.TransferStarted, direction=ev.Direction.H2D), only(events, ev.LoadDone)]
    late = moved(events, copy, only(events, behind, "c"))
    assert verdict_of(late, "c").grade not in PROVEN


def backed_up_late(*, again: bool, launched: bool) -> Events:
    """a's node leaves L1, and only then a copy of it is queued (or launched) and acknowledged."""
    events = read_from_l2()
    out = next(e for e in events if isinstance(e, ev.EvictedL1) and e.node == 2)
    queued = next(e for e in events if isinstance(e, ev.BackupQueued) and e.node == 2)
    alloc = events[events.index(queued) - 1]
    started = next(e for e in events if isinstance(e, ev.TransferStarted) and 2 in e.nodes)
    acked = next(e for e in events if isinstance(e, ev.BackupAcked) and e.node == 2)
    copy = [started, acked] if launched else [alloc, queued, started, acked]
    late = moved(events, copy, only(events, ev.EvictEnd, call=only(events, ev.EvictEnd).call - 1 or 1))
    end = next(e for e in events if isinstance(e, ev.EvictEnd) and e.seq > out.seq)
    late = moved(events, copy, end)
    free = 800
    counted: Events = []
    for e in late:
        if isinstance(e, ev.HostAlloc | ev.HostFree):
            size = sum(run.length for run in e.slots)
            free += size if isinstance(e, ev.HostFree) else -size
            e = dataclasses.replace(e, available=free)
        counted.append(e)
    if not again:
        return counted
    where = next(i for i, e in enumerate(counted) if isinstance(e, ev.BackupAcked) and e.node == 2) + 1
    insert = next(e for e in events if isinstance(e, ev.Inserted) and e.node == 2)
    return [
        *counted[:where],
        insert,
        ev.EvictBegin(0, 0, 90, ev.Cause.PREFILL, 64, 0, 0, ()),
        dataclasses.replace(out, call=90),
        ev.EvictEnd(0, 0, 90, 64),
        *counted[where:],
    ]


def clocked(events: Events) -> Events:
    """Clocks that do not run backwards."""
    clock, steady = 0, []
    for e in events:
        clock = max(clock, e.t_ns)
        steady.append(dataclasses.replace(e, t_ns=clock))
    return steady


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("launched", [False, True])
def test_t02_a_copy_to_l2_of_a_node_that_had_left_l1(again: bool, launched: bool) -> None:
    late = clocked(backed_up_late(again=again, launched=launched))
    assert verdict_of(late, "c").grade not in PROVEN


@pytest.mark.parametrize("launched", [False, True])
def test_t03_a_chunk_that_is_copied_before_it_is_computed(launched: bool) -> None:
    s = server(l1=192)
    long = tuple(range(129))
    s.serve([("a", long)], chunked=True)
    s.serve([("fill", fill(1, 177))])
    s.serve([("c", long)])
    events = s.events
    assert verdict_of(events, "c").grade in PROVEN
    second = [e for e in events if isinstance(e, ev.Prefill) and e.req == number(events, "a")][1]
    queued = next(e for e in events if isinstance(e, ev.BackupQueued) and e.start == second.start)
    alloc = events[events.index(queued) - 1]
    early = [alloc, queued]
    rest = [e for e in events if e not in early]
    at = rest.index(second)
    early = [dataclasses.replace(e, t_ns=second.t_ns) for e in early]
    too_soon = [*rest[:at], *early, *rest[at:]]
    if launched:
        started = next(e for e in events if isinstance(e, ev.TransferStarted) and e.direction == ev.Direction.D2H)
        whole = [e for e in too_soon if e is not started]
        at = next(i for i, e in enumerate(whole) if isinstance(e, ev.Prefill) and e.batch == second.batch)
        too_soon = [*whole[:at], dataclasses.replace(started, t_ns=second.t_ns), *whole[at:]]
    assert verdict_of(too_soon, "c").grade not in PROVEN


# --- T04, T05: ranks ---------------------------------------------------------------------------------


def rank_of_two(rank: int, events: Events, start: str = "s1", release: str = "0.5.23") -> Journal:
    ranks = {"tp_rank": rank, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_tp_size": 2}
    process = {"role": "scheduler", "sglang": release, "arguments": {"model_path": "m"}, "start": start, "key": "k"}
    facts = [e for e in events if not (isinstance(e, ev.Facts) and e.kind == ev.FactKind.PROCESS)]
    at = next(i for i, e in enumerate(facts) if isinstance(e, ev.Facts) and e.kind == ev.FactKind.INSTANCE) + 1
    told = ev.Facts(0, facts[at - 1].t_ns, ev.FactKind.PROCESS, json.dumps(process))
    whole = renumbered(with_facts([*facts[:at], told, *facts[at:]], ranks=ranks))
    return journal_of(whole, name=f"scheduler-{rank + 1}-{rank + 1}.kvwj")


def used_twice() -> tuple[Events, Events]:
    """c is used for two requests; the second rank recorded only the second of them."""
    s = server(l1=192)
    s.serve([("a", A)])
    s.serve([("c", A)])
    s.serve([("x", fill(3, 33))])
    s.serve([("c", A)])
    events = s.events
    req = number(events, "c")
    released = next(i for i, e in enumerate(events) if isinstance(e, ev.Released) and e.req == req)
    return events, [e for i, e in enumerate(events) if i > released or getattr(e, "req", None) != req]


def test_t04_uses_of_an_id_are_the_same_when_they_are_not_when_they_count_the_same() -> None:
    one, other = used_twice()
    whole = judge([rank_of_two(0, one), rank_of_two(1, one)]).verdicts
    assert [v.grade for v in whole if v.rid == "c"] == [Grade.CONFIRMED, Grade.CONFIRMED]
    verdicts = [v for v in judge([rank_of_two(0, one), rank_of_two(1, other)]).verdicts if v.rid == "c"]
    verdicts.sort(key=lambda v: v.queued_ns or 0)
    assert [v.grade in PROVEN for v in verdicts] == [False, True]
    assert verdicts[0].reason is Reason.INCONCLUSIVE


@pytest.mark.parametrize("release", ["0.5.23", "0.5.17"])
def test_t05_ranks_of_two_servers_are_no_group(release: str) -> None:
    events = read_from_l2()
    mine = rank_of_two(0, events)
    together = judge([mine, rank_of_two(1, events)]).verdict("c")
    assert together is not None and together.grade is Grade.CONFIRMED
    apart = judge([mine, rank_of_two(1, events, "s2", release)]).verdicts
    assert not [v for v in apart if v.grade in PROVEN]
    again = msgspec.structs.replace(rank_of_two(1, events, "s0"), wall_ns=mine.wall_ns - 10**12)
    assert not [v for v in judge([mine, again]).verdicts if v.grade in PROVEN]


# --- T06, T07, T08: digests and facts ----------------------------------------------------------------


def test_t06_digests_of_other_cells_than_the_pages_make() -> None:
    """The grid is told to be 64 where cells are of 16, and a's node serves another prompt."""
    s = server(l1=400)
    s.serve([("a", A)])
    s.serve([("d", A)])
    events = s.events
    assert proven(events, "d")
    wide: Events = [dataclasses.replace(e, grid=64) if isinstance(e, ev.PrefixDigests) else e for e in events]
    assert not proven(wide, "d")
    other = only(events, ev.PrefixDigests, "d")
    strange = (*other.digests[:1], *(bytes([9]) * 8 for _ in other.digests[1:]))
    mixed = [dataclasses.replace(e, digests=strange) if e is other else e for e in events]
    mixed = [dataclasses.replace(e, grid=64) if isinstance(e, ev.PrefixDigests) else e for e in mixed]
    assert not proven(mixed, "d")


@pytest.mark.parametrize(
    "facts",
    [{"page_size": 32}, {"page_size": 1}, {"bytes_per_token": 0}, {"bytes_per_token": 2048}, {"host_tokens": 32},
     {"layers": 0}, {"pools": []}],
    ids=str,
)  # fmt: skip
def test_t07_facts_that_contradict_the_events(facts: dict[str, Any]) -> None:
    told = with_facts(read_from_l2(), **facts)
    assert not proven(told, "c")


def later(events: Events, kind: int, facts: dict[str, Any], rid: str = "d") -> Events:
    """One more facts event, after everything that a request did."""
    at = events.index(only(events, ev.Released, rid)) + 1
    more = ev.Facts(0, events[at - 1].t_ns, kind, json.dumps(facts))
    return [*events[:at], more, *events[at:]]


def test_t08_a_later_fact_does_not_take_an_earlier_one_back() -> None:
    events = read_from_l2()
    first = next(json.loads(e.json) for e in events if isinstance(e, ev.Facts) and e.kind == ev.FactKind.INSTANCE)
    two = with_facts(events, ranks={**first["ranks"], "tp_size": 2, "attn_tp_size": 2})
    assert not proven(later(two, ev.FactKind.INSTANCE, first), "c")


def test_t08_a_hook_sees_nothing_before_it_is_installed() -> None:
    events = read_from_l2()
    coverage = next(e for e in events if isinstance(e, ev.Facts) and e.kind == ev.FactKind.COVERAGE)
    hooks = json.loads(coverage.json)["hooks"]
    pending = json.dumps({"hooks": [{**hook, "status": "pending"} for hook in hooks]})
    told = later(bent(events, coverage, json=pending), ev.FactKind.COVERAGE, {"hooks": hooks})
    assert not proven(told, "c") and not proven(told, "d")


# --- T09: storage ------------------------------------------------------------------------------------


def read_from_l3() -> Events:
    s = server(l1=192, stored=True)
    s.serve([("a", A)])
    s.flush()
    s.serve([("c", A)])
    verdict = verdict_of(s.events, "c")
    assert verdict.grade is Grade.CONFIRMED and verdict.tier is Tier.L3
    return s.events


def test_t09_without_a_look_up_nothing_is_read_from_storage() -> None:
    events = read_from_l3()
    assert not proven([e for e in events if not isinstance(e, ev.StorageLookedUp)], "c")


def test_t09_a_look_up_after_the_end_is_none() -> None:
    events = read_from_l3()
    told, done = only(events, ev.StorageLookedUp, "c"), only(events, ev.PrefetchDone, "c")
    late = moved(events, [told], done)
    assert not proven(late, "c")
    at = next(i for i, e in enumerate(late) if isinstance(e, ev.StorageLookedUp) and e.req == told.req)
    assert not proven([*late[:at], dataclasses.replace(late[at], tokens=0), *late[at + 1 :]], "c")  # type: ignore[call-arg]


def test_t09_a_transfer_that_failed_brings_nothing() -> None:
    events = read_from_l3()
    done = only(events, ev.PrefetchDone, "c")
    at = events.index(done)
    failed = ev.StorageFailed(0, done.t_ns, ev.StorageWork.READ, done.req, "OSError: told")
    assert not proven([*events[:at], failed, *events[at:]], "c")


# --- T10: attached -----------------------------------------------------------------------------------


def attached() -> Events:
    s = server(l1=192)
    s.serve([("a", A)])
    s.serve([("fill", fill(1, 177))])
    s.attach()
    s.serve([("c", A)])
    assert verdict_of(s.events, "c").sentence == "L2 read confirmed (resident at attach)"
    return s.events


@pytest.mark.parametrize("launched", [0, 1])
@pytest.mark.parametrize("before", [True, False])
def test_t10_what_is_being_copied_is_not_resident(launched: int, before: bool) -> None:
    events = attached()
    node = next(e for e in events if isinstance(e, ev.ResidentNode) and e.l2 and not e.l1)
    flight = ev.InFlight(0, node.t_ns, 77 * launched, ev.Direction.D2H, 64, launched, (node.node,))
    at = events.index(node) + (not before)
    if before and isinstance(events[at - 1], ev.ResidentDigests):
        at -= 1
    assert not proven([*events[:at], flight, *events[at:]], "c")


@pytest.mark.parametrize("values", [{"nodes": 9}, {"l1_tokens": 0}, {"l2_tokens": 16}], ids=str)
def test_t10_the_end_of_the_look_counts_what_was_found(values: dict[str, int]) -> None:
    events = attached()
    assert not proven(bent(events, only(events, ev.SnapshotEnd), **values), "c")


# --- T11: what one event says twice ------------------------------------------------------------------


def _demoted(events: Events) -> Events:
    out = next(e for e in events if isinstance(e, ev.EvictedL1) and e.node == 2)
    return bent(events, out, unbacked=out.tokens)


def _decided(events: Events) -> Events:
    return bent(events, only(events, ev.LoadBackDecided), reason=ev.Refusal.NO_DEVICE_SLOTS)


@pytest.mark.parametrize("contradict", [_demoted, _decided])
def test_t11_an_event_that_contradicts_itself(contradict: Callable[[Events], Events]) -> None:
    events = read_from_l2()
    assert proven(events, "c")
    assert not proven(contradict(events), "c")


def test_t11_more_was_inserted_than_was_generated() -> None:
    """One output token, and 64 tokens behind the prompt in the cache."""
    s = server(l1=400)
    s.serve([("a", A)])
    long = (*A, *range(500, 563))
    s.serve([("d", long)])
    events = s.events
    a = number(events, "a")
    insert = only(events, ev.Inserted, "d")
    more = only(events, ev.PrefixDigests, "d")
    released = only(events, ev.Released, "a")
    at = events.index(released)
    path = tuple(step._replace(node=step.node if step.end <= 64 else 90) for step in insert.path)
    tail = ev.PrefixDigests(0, released.t_ns, a, 16, 4, more.digests[4:8])
    extra = dataclasses.replace(insert, req=a, t_ns=released.t_ns, existing=64, node=90, path=path)
    told = [*events[:at], tail, extra, *events[at:]]
    match = only(told, ev.Matched, "d")
    assert match.path
    assert not proven(told, "d")
