"""The mutators: what they are to reach, they reach, and what they leave behind is a record again."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence

import pytest
from journal_tools import ABC, encode_event

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.schema import events as ev
from soundness import exchanges, fields, moves, ranks, told_facts
from soundness.fields import fields_of, leaves_of, single_field_mutants
from soundness.mutate import MUTATIONS, mutant
from soundness.simulate import LIVELY, Server, simulated
from soundness.sources import small
from soundness.steps import Events, Mutation, first_free, free_slots, recount

EVENTS = list(read_journal(ABC).events)
STORED = simulated(3, stored=True, habits=LIVELY).events
A = (*range(64), 7777)


def mutants(mutation: Mutation, base: Sequence[ev.Event], tries: int = 300) -> Iterator[Events]:
    for number in range(tries):
        events = list(base)
        if mutation(random.Random(number), events) is not None:
            yield events


def read_from_l2() -> Events:
    """a computed, evicted, read again by c."""
    server = Server(0, page=16, l1=96, l2=800, quiet=True)
    server.serve([("a", A)])
    server.serve([("fill", tuple(range(1000, 1097)))])
    server.serve([("c", A)])
    return server.events


def index(events: Sequence[ev.Event], kind: type[ev.Event], last: bool = False) -> int:
    found = [i for i, e in enumerate(events) if isinstance(e, kind)]
    return found[-1] if last else found[0]


# --- single fields -----------------------------------------------------------------------------------


def test_every_field_of_every_event_is_bent_and_nothing_else() -> None:
    reached: set[tuple[str, str]] = set()
    for events, change in single_field_mutants(STORED, elements=3):
        different = [i for i, (a, b) in enumerate(zip(STORED, events, strict=True)) if a != b]
        assert different == [change.index]
        old, new = STORED[change.index], events[change.index]
        names = [f.name for f in dataclasses.fields(old) if getattr(old, f.name) != getattr(new, f.name)]
        assert names == [change.field.split(".")[0].split("[")[0]]
        assert change.kind == type(old).__name__
        encode_event(new)
        reached.add((change.kind, change.field))
    for kind in {type(event) for event in STORED}:
        for name in fields_of(kind):
            full = any(getattr(e, name.split("[")[0]) for e in STORED if type(e) is kind)
            if full and (kind, name) != (ev.Facts, "json"):
                assert (kind.__name__, name) in reached, name
    for event in STORED:
        if isinstance(event, ev.Facts):
            assert {("Facts", leaf) for leaf in leaves_of(event.json)} <= reached


def test_the_mutators_of_a_field() -> None:
    at = index(EVENTS, ev.Released, last=True)
    bent = {
        change.mutator: events[at].cached_device
        for events, change in single_field_mutants(EVENTS, only={at})
        if change.path == "cached_device"
    }
    assert bent == {"zero": 0, "one more": 1489, "one less": 1487, "maximum": 2**63 - 1}
    requests = {c.mutator: e[at].req for e, c in single_field_mutants(EVENTS, only={at}) if c.path == "req"}
    assert requests == {"zero": 0, "one more": 11, "one less": 9, "maximum": 2**32 - 1}
    at = index(EVENTS, ev.Inserted, last=True)
    known = fields.Values(EVENTS)
    assert known.earlier(at, ("key_tokens",), 1488) == 1504, "what the insert before it says, of the same request"
    assert known.anothers(at, ("node",), 3) == 4


def test_a_value_of_another_type_is_no_value_of_a_field() -> None:
    """Two events have a field ``nodes``: which ones, and how many."""
    events = [ev.SnapshotEnd(1, 1, 4, 64, 64, 1), ev.TransferStarted(2, 2, 1, 1, 64, 64, 0, (7,))]
    for mutant_events, change in single_field_mutants(events):
        assert type(mutant_events[change.index]) is type(events[change.index])
        for event in mutant_events:
            encode_event(event)


def test_the_names_of_fields_and_leaves() -> None:
    assert fields_of(ev.LoadQueued)[-3:] == ("slots", "slots[].start", "slots[].length")
    assert fields_of(ev.EvictBegin)[-2:] == ("reqs", "reqs[]")
    assert fields_of(ev.Text) == ("seq", "t_ns", "id", "text")
    assert leaves_of('{"a": {"b": [1, 2]}, "c": null}') == ("json.a", "json.a.b", "json.a.b[]", "json.c")


def test_random_fields_leave_no_field_out() -> None:
    base = small()["simulated stored, lively"]
    reached = set()
    for number in range(12_000):
        step = fields.random_field(random.Random(number), list(base))
        reached |= {(step.event, step.field)} if step is not None else set()
    wanted = [("SnapshotEnd", "nodes"), ("EvictBegin", "reqs[]"), ("Admission", "host_loaded")]
    wanted += [("EvictedL1", "unbacked"), ("LoadBackDecided", "wanted"), ("PrefixDigests", "grid"), ("Queued", "t_ns")]
    wanted += [("PrefetchDone", "deadline"), ("EvictBegin", "asked"), ("WeightsUpdated", "flushed")]
    there = {type(event).__name__ for event in base}
    assert {each for each in wanted if each[0] in there} <= reached
    assert "Facts" in {event for event, _ in reached}


# --- moves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutation", list(dict.fromkeys(MUTATIONS)), ids=lambda mutation: mutation.__name__)
def test_a_mutation_does_what_it_says_or_nothing(mutation: Mutation) -> None:
    changed = 0
    for number in range(60):
        events = list(STORED)
        step = mutation(random.Random(number), events)
        assert (step is None) <= (events == STORED)
        changed += events != STORED
    assert changed


@pytest.mark.parametrize("mutation", [*moves.MOVES, exchanges.change_contents], ids=lambda mutation: mutation.__name__)
def test_a_move_leaves_no_trace_in_numbers_clocks_and_counts(mutation: Mutation) -> None:
    for events in mutants(mutation, STORED, 60):
        assert [e.seq for e in events] == list(range(1, len(STORED) + 1))
        assert sorted(e.t_ns for e in events) == [e.t_ns for e in events] == [e.t_ns for e in STORED]
        again = list(events)
        recount(again, first_free(STORED))
        assert again == events


def test_the_count_of_a_healthy_record_is_its_own() -> None:
    for base in (EVENTS, STORED):
        again = list(base)
        recount(again, first_free(base))
        assert again == base
        free = free_slots(base)
        told = [(e.available, free[i]) for i, e in enumerate(base) if isinstance(e, ev.HostAlloc | ev.HostFree)]
        assert all(available == counted for available, counted in told)


def test_a_load_back_begins_and_ends_behind_the_pass_its_result_and_the_release() -> None:
    base, reached = read_from_l2(), set()
    for events in mutants(moves.moving("load", moves.loads), base):
        started = max(i for i, e in enumerate(events) if isinstance(e, ev.TransferStarted) and e.direction == 2)
        ended = index(events, ev.LoadDone)
        for kind in (ev.Matched, ev.Prefill, ev.PrefillDone, ev.Released):
            if index(events, kind, last=True) < started < ended:
                reached.add(kind)
    assert reached == {ev.Matched, ev.Prefill, ev.PrefillDone, ev.Released}


def test_a_node_leaves_l1_before_its_backup_is_queued_or_launched() -> None:
    base, reached = read_from_l2(), set()
    for mutation in (moves.moving("backup", moves.backups), moves.moving("eviction", moves.evictions)):
        for events in mutants(mutation, base):
            left = index(events, ev.EvictedL1)
            node = events[left].node  # type: ignore[attr-defined]
            queued = next(i for i, e in enumerate(events) if isinstance(e, ev.BackupQueued) and e.node == node)
            started = next(i for i, e in enumerate(events) if isinstance(e, ev.TransferStarted) and node in e.nodes)
            inserted = next(i for i, e in enumerate(events) if isinstance(e, ev.Inserted) and e.node == node)
            if inserted < left:
                reached |= {"queued"} if left < queued < started else set()
                reached |= {"launched"} if queued < left < started else set()
    assert reached == {"queued", "launched"}


def test_a_backup_of_a_chunk_comes_before_the_pass_that_computes_it() -> None:
    server = Server(0, page=16, l1=96, l2=800, quiet=True)
    server.serve([("a", tuple(range(81)))], chunked=True)

    def early(events: Events) -> bool:
        chunk = [i for i, e in enumerate(events) if isinstance(e, ev.Prefill)][-1]
        of_it = [i for i, e in enumerate(events) if isinstance(e, ev.BackupQueued) and e.start >= 32]
        return bool(of_it) and of_it[0] < chunk

    assert not early(server.events)
    assert any(early(events) for events in mutants(moves.moving("backup", moves.backups), server.events))


# --- exchanges, renames, facts -----------------------------------------------------------------------


def test_two_requests_change_places_consistently() -> None:
    for events in mutants(exchanges.change_places, EVENTS, 40):
        assert len(events) == len(EVENTS)
        for old, new in zip(EVENTS, events, strict=True):
            assert type(old) is type(new) and (old.seq, old.t_ns) == (new.seq, new.t_ns)


def test_texts_under_other_numbers_say_the_same() -> None:
    def spelled(events: Sequence[ev.Event]) -> list[tuple[str, str]]:
        texts = {e.id: e.text for e in events if isinstance(e, ev.Text)}
        return [(type(e).__name__, texts[e.req]) for e in events if getattr(e, "req", 0)]

    for events in mutants(exchanges.all_texts_again, EVENTS, 5):
        assert spelled(events) == spelled(EVENTS)
    for events in mutants(exchanges.another_text, EVENTS, 5):
        assert len(events) == len(EVENTS) + 1 and spelled(events) == spelled(EVENTS)


def test_facts_are_taken_back_and_change_later() -> None:
    told = {e.kind: e.json for e in EVENTS if isinstance(e, ev.Facts)}
    lasts = set()
    for events in mutants(told_facts.later, EVENTS):
        facts = [e for e in events if isinstance(e, ev.Facts)]
        extra = len(facts) - sum(isinstance(e, ev.Facts) for e in EVENTS)
        assert extra in (1, 2)
        changed = next(e.kind for e in facts if e.json not in [f.json for f in EVENTS if isinstance(f, ev.Facts)])
        last = [e.json for e in facts if e.kind == changed][-1]
        lasts.add((changed, extra, last == told[changed]))
    assert {(kind, 1, False) for kind in (1, 2, 3)} | {(kind, 2, True) for kind in (1, 2, 3)} <= lasts


# --- several journals --------------------------------------------------------------------------------


def test_two_ranks_of_one_server_differ_in_their_place_alone() -> None:
    for number in range(12):
        first, second = ranks.pair(number, number=number)
        assert len(first) == len(second)
        places = []
        for a, b in zip(first, second, strict=True):
            if isinstance(a, ev.Facts) and isinstance(b, ev.Facts) and a.json != b.json:
                places.append((json.loads(a.json)["ranks"]["tp_rank"], json.loads(b.json)["ranks"]["tp_rank"]))
            else:
                assert dataclasses.replace(a, t_ns=b.t_ns) == b
        assert places == [(0, 1)]


def start_of(events: Sequence[ev.Event]) -> str:
    (process,) = [e for e in events if isinstance(e, ev.Facts) and e.kind == ev.FactKind.PROCESS]
    return str(json.loads(process.json)["start"])


def test_groups_of_every_kind() -> None:
    groups = [ranks.group(random.Random(number), number, number) for number in range(250)]
    kinds = {group.recipe[0].mutator for group in groups if group.recipe}
    assert {"rank of another server", "rank of an earlier start", "rank missing", "rank twice", "no start"} <= kinds
    assert {"a use of an id missing on one rank", "places exchanged", "no start on one rank", "rank cut short"} <= kinds
    starts = [
        {
            json.loads(e.json)["start"]
            for events in group.journals
            for e in events
            if isinstance(e, ev.Facts) and e.kind == 3
        }
        for group in groups
        if group.recipe and group.recipe[0].mutator in ("rank of another server", "rank of an earlier start")
    ]
    assert starts and all(len(each) == 2 for each in starts)
    assert all(group.nothing for group in groups if len(group.journals) == 1)


def test_a_mutant_can_be_written() -> None:
    for number in range(300):
        events, _ = mutant(random.Random(number), STORED)
        for event in events:
            encode_event(event)
