"""The oracle on journals small enough to check by eye: it accepts what happened, each rule refuses what breaks it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from journal_tools import ABC, changed, journal_of, renumbered

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.schema import events as ev
from soundness import oracle as oracle_module
from soundness.compare import journal_as_read
from soundness.extras import place
from soundness.oracle import Oracle, Recorded, rules
from soundness.simulate import Server, simulated

PROMPT = tuple(range(33))
CELLS = 32
Events = list[ev.Event]


def story(digested: float = 0.0, declined: bool = False) -> Events:
    """A computes a prefix, B reads it from L1, a long one pushes it out, C reads it from L2, D from L1 again."""
    server = Server(0, page=16, l1=96, l2=400, quiet=True, digested=digested)
    server.serve([("a", PROMPT)])
    server.serve([("b", (*PROMPT[:CELLS], 900))])
    server.serve([("fill", tuple(range(1000, 1096)))])
    server.serve([("c", (*PROMPT[:CELLS], 901))], refuse=declined)
    server.serve([("d", (*PROMPT[:CELLS], 902))])
    return server.events


def stored_story() -> Events:
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


def found_story() -> Events:
    """The recorder is attached when A's prefix is in L2 alone: C reads it from there, D from L1."""
    server = Server(0, page=16, l1=96, l2=400, quiet=True)
    server.serve([("a", PROMPT)])
    server.serve([("fill", tuple(range(1000, 1096)))])
    server.attach()
    server.serve([("c", (*PROMPT[:CELLS], 901))])
    server.serve([("d", (*PROMPT[:CELLS], 902))])
    return server.events


STORY, STORED, FOUND, DIGESTED = story(), stored_story(), found_story(), story(digested=1.0)
DECLINED = story(declined=True)
"""C's load-back is refused, and it computes everything."""


def why(
    events: Sequence[ev.Event], rid: str, tier: str, start: int = 0, end: int = CELLS, of: Oracle | None = None
) -> str | None:
    oracle = of or Oracle.of(events)
    attempt = next((a for a in oracle.attempts() if a.use.rid == rid), None)
    return "no such request" if attempt is None else oracle.refusal(attempt, tier, start, end)


@pytest.mark.parametrize(
    ("events", "rid", "tier"),
    [
        (STORY, "b", "L1"),
        (STORY, "c", "L2"),
        (STORY, "d", "L1"),
        (STORED, "c", "L3"),
        (STORED, "d", "L1"),
        (STORED, "e", "L2"),
        (FOUND, "c", "L2"),
        (FOUND, "d", "L1"),
    ],
)
def test_what_happened_is_established_and_nothing_else(events: Events, rid: str, tier: str) -> None:
    assert [t for t in ("L1", "L2", "L3") if why(events, rid, t) is None] == [tier]


@pytest.mark.parametrize("rid", ["a", "fill"])
def test_what_was_computed_was_not_reused(rid: str) -> None:
    assert why(STORY, rid, "L1") is not None and why(STORY, rid, "L2") is not None


def test_no_more_than_was_reused() -> None:
    assert why(STORY, "c", "L2", 0, CELLS + 1) is not None
    assert why(STORY, "c", "L2", CELLS, CELLS) is not None
    assert why(STORY, "c", "memory") is not None


# --- every rule refuses what breaks it ----------------------------------------------------------------

Change = Callable[[Any], Any]
Bend = Callable[[Events], Events]


def numbers(events: Events) -> dict[str, int]:
    return {e.text: e.id for e in events if isinstance(e, ev.Text)}


def change(kind: type[ev.Event], how: Change, rid: str = "", at: int | None = None) -> Bend:
    """Every event of a kind (of one request; the one at a place) is changed; None: it is gone without a hole."""

    def bend(events: Events) -> Events:
        mine = [e for e in events if isinstance(e, kind) and (not rid or e.req == numbers(events)[rid])]  # type: ignore[attr-defined]
        chosen = mine if at is None else [mine[at]]
        return renumbered(changed(events, kind, lambda e: how(e) if e in chosen else e))

    return bend


def gone(kind: type[ev.Event], rid: str = "", at: int | None = None) -> Bend:
    return change(kind, lambda e: None, rid, at)


def bent(kind: type[ev.Event], rid: str = "", at: int | None = None, **fields: Any) -> Bend:
    def how(event: Any) -> Any:
        new = {n: v(getattr(event, n)) if callable(v) else v for n, v in fields.items()}
        return dataclasses.replace(event, **new)

    return change(kind, how, rid, at)


def extra(before: type[ev.Event], make: Callable[[Events], Sequence[ev.Event]], rid: str = "", at: int = 0) -> Bend:
    """More events before one of a kind: numbers, times and the pool's count as if they had been recorded there."""

    def bend(events: Events) -> Events:
        mine = [i for i, e in enumerate(events) if isinstance(e, before)]
        if rid:
            mine = [i for i in mine if events[i].req == numbers(events)[rid]]  # type: ignore[attr-defined]
        copy = list(events)
        place(copy, mine[at], make(events))
        return copy

    return bend


def again(kind: type[ev.Event], rid: str, before: type[ev.Event], before_rid: str = "", at: int = 0) -> Bend:
    """An event once more."""

    def make(events: Events) -> Sequence[ev.Event]:
        known = (e for e in events if isinstance(e, kind) and e.req == numbers(events)[rid])  # type: ignore[attr-defined]
        return [dataclasses.replace(next(known), seq=0)]

    return extra(before, make, before_rid, at)


def moved(kind: type[ev.Event], behind: type[ev.Event], rid: str = "", behind_rid: str = "", at: int = -1) -> Bend:
    """The last event of a kind comes only after another one."""

    def bend(events: Events) -> Events:
        ids = numbers(events)
        what = [e for e in events if isinstance(e, kind) and (not rid or e.req == ids[rid])][at]  # type: ignore[attr-defined]
        rest = [e for e in events if e is not what]
        to = next(
            i
            for i, e in enumerate(rest)
            if isinstance(e, behind) and (not behind_rid or e.req == ids[behind_rid])  # type: ignore[attr-defined]
        )
        late = dataclasses.replace(what, t_ns=rest[to].t_ns)
        return renumbered([*rest[: to + 1], late, *rest[to + 1 :]])

    return bend


def facts(kind: int, how: Callable[[dict[str, Any]], Any]) -> Bend:
    def bend(events: Events) -> Events:
        def one(event: ev.Facts) -> ev.Facts:
            if event.kind != kind:
                return event
            told = json.loads(event.json)
            return dataclasses.replace(event, json=json.dumps(how(told) or told))

        return changed(events, ev.Facts, one)  # type: ignore[arg-type]

    return bend


def later_facts(kind: int, rid: str, **more: Any) -> Bend:
    """The facts are told once more, otherwise, before a request is queued."""

    def make(events: Events) -> Sequence[ev.Event]:
        first = next(e for e in events if isinstance(e, ev.Facts) and e.kind == kind)
        return [ev.Facts(0, 0, kind, json.dumps({**json.loads(first.json), **more}))]

    return extra(ev.Queued, make, rid)


def hook(name: str, status: str) -> Bend:
    def how(told: dict[str, Any]) -> None:
        for each in told["hooks"]:
            each["status"] = status if each["name"] == name else each["status"]

    return facts(ev.FactKind.COVERAGE, how)


def swapped(events: Events) -> Events:
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.LoadQueued))
    return [*events[:at], events[at + 1], events[at], *events[at + 2 :]]


def evicted(events: Events, how: int = ev.Eviction.DEMOTED, **fields: int) -> Sequence[ev.Event]:
    """The node with the shared prefix leaves L1."""
    step = next(e for e in events if isinstance(e, ev.Inserted)).path[0]
    size = step.end - step.start
    victim = ev.EvictedL1(0, 0, 900, step.node, step.start, step.end, how, size, 0)
    return [
        ev.EvictBegin(0, 0, 900, ev.Cause.PREFILL, size, 0, 0, ()),
        dataclasses.replace(victim, **fields),
        ev.EvictEnd(0, 0, 900, fields.get("tokens", size)),
    ]


def first(events: Events, kind: type[ev.Event], rid: str = "") -> Any:
    return next(e for e in events if isinstance(e, kind) and (not rid or e.req == numbers(events)[rid]))  # type: ignore[attr-defined]


def in_flight(events: Events) -> Sequence[ev.Event]:
    there = first(events, ev.ResidentNode)
    return [ev.InFlight(0, 0, 0, ev.Direction.D2H, 32, 0, (there.node,))]


def reused_slots(events: Events) -> Sequence[ev.Event]:
    slots = first(events, ev.LoadQueued).slots
    free = [e for e in events if isinstance(e, ev.HostAlloc)][-1].available
    return [ev.HostAlloc(0, 0, 0, 0, free, slots)]


def long_before(events: Events) -> Events:
    """A's prefill is launched only after the backup of what it computes was queued."""
    return moved(ev.Prefill, ev.BackupQueued, "a", at=0)(events)


def second_backup(events: Events) -> Sequence[ev.Event]:
    """A's node is queued again while it is copied, into other slots."""
    queued = first(events, ev.BackupQueued)
    slots = (ev.Run(320, 32),)
    free = first(events, ev.HostAlloc).available
    return [ev.HostAlloc(0, 0, 0, 0, free - 32, slots), dataclasses.replace(queued, seq=0, slots=slots)]


def other_end(events: Events) -> Sequence[ev.Event]:
    inserted = first(events, ev.Inserted, "b")
    step = inserted.path[0]._replace(end=16)
    return [dataclasses.replace(inserted, seq=0, key_tokens=16, existing=16, path=(step,))]


def aborted(state: int) -> Bend:
    """C is released before its result is processed."""

    def bend(events: Events) -> Events:
        early = moved(ev.Released, ev.Prefill, "c", "c")(events)
        return bent(ev.Released, "c", state=state)(early)

    return bend


def of_less(events: Events) -> Events:
    """Every transfer moves fewer bytes than the facts say."""
    fewer = bent(ev.TransferStarted, bytes=lambda b: b - 1024)(events)
    return bent(ev.LoadDone, bytes=lambda b: b - 1024)(fewer)


def of_another_node(events: Events) -> Events:
    """A's backup is of a node that nobody saw."""
    events = bent(ev.BackupQueued, at=0, node=99)(events)
    events = bent(ev.TransferStarted, at=0, nodes=(99,))(events)
    return bent(ev.BackupAcked, at=0, node=99)(events)


def without_numbers(events: Events) -> Events:
    """The evictions' beginnings are lost, with their numbers."""
    return [e for e in events if not isinstance(e, ev.EvictBegin)]


def never_admitted(events: Events) -> Events:
    """C waits, and computes nothing."""
    events = gone(ev.Prefill, "c")(gone(ev.PrefillDone, "c")(events))
    return bent(ev.Admission, "c", admitted=0)(events)


def evicted_while_loaded(events: Events) -> Events:
    """The end of the copy is seen late, and the node has left L1 before."""
    return extra(ev.LoadDone, evicted)(moved(ev.LoadDone, ev.Queued, "", "d")(events))


def evicted_before_it_was_digested(events: Events) -> Events:
    """The last page is digested late, and the node has left L1 before."""
    return extra(ev.LoadDigested, evicted, at=1)(moved(ev.LoadDigested, ev.Released, "", "c")(events))


def digested_again(events: Events) -> Sequence[ev.Event]:
    return [dataclasses.replace(first(events, ev.LoadDigested), seq=0)]


def detached(events: Events) -> Sequence[ev.Event]:
    return [ev.StorageChanged(0, 0, 0, 1, "told")]


def failed(events: Events) -> Sequence[ev.Event]:
    return [ev.Text(0, 0, 77, "tree.evict"), ev.HookFailed(0, 0, 77, 1, "x")]


CROSSED = (ev.Run(16, 16), ev.Run(0, 16))
Case = tuple[str, Events, str, str, Bend]
BREAKS: list[Case] = [
    # The rule, and what breaks it for which claim.
    ("numbers_have_no_hole", STORY, "c", "L2", without_numbers),
    ("numbers_rise_in_every_thread", STORY, "c", "L2", swapped),
    ("clocks_do_not_run_backwards", STORY, "c", "L2", bent(ev.LoadQueued, t_ns=1)),
    ("texts_have_one_meaning", STORY, "c", "L2", extra(ev.LoadQueued, lambda e: [ev.Text(0, 0, 2, "other")])),
    ("facts_can_be_read", STORY, "b", "L1", extra(ev.Queued, lambda e: [ev.Facts(0, 0, 3, "[]")], "fill")),
    ("facts_do_not_change", STORY, "b", "L1", later_facts(2, "fill", page_size=32)),
    ("slots_are_whole_pages_of_the_pool", STORY, "c", "L2", facts(2, lambda f: f.update(host_tokens=16))),
    ("nodes_are_whole_pages", STORY, "c", "L2", bent(ev.Matched, "fill", path=(ev.PathNode(9, 0, 17, 1),))),
    ("bytes_are_those_of_the_tokens", STORY, "c", "L2", of_less),
    ("the_pool_counts_alike", STORY, "c", "L2", bent(ev.HostAlloc, "fill", available=1)),
    ("evictions_begin_and_end", STORY, "c", "L2", bent(ev.EvictEnd, at=0, freed=16)),
    ("what_leaves_l1_leaves_in_an_eviction", STORY, "c", "L2", gone(ev.EvictBegin, at=0)),
    ("victims_are_what_they_are_told_to_be", STORY, "c", "L2", bent(ev.EvictedL1, at=0, unbacked=32)),
    ("transfers_take_what_waits", STORY, "c", "L2", bent(ev.TransferStarted, at=0, nodes=(50,))),
    ("nothing_is_acknowledged_before_it_is_launched", STORY, "c", "L2", gone(ev.TransferStarted, at=1)),
    ("a_snapshot_does_not_contradict_itself", FOUND, "c", "L2", extra(ev.ResidentNode, in_flight)),
    ("what_was_there_is_told_while_looking", FOUND, "c", "L2", extra(ev.LoadQueued, in_flight)),
    ("one_id_is_one_request_at_a_time", STORY, "c", "L2", again(ev.Queued, "c", ev.Matched, "c")),
    ("digests_fit_pages_and_prompt", STORY, "b", "L1", bent(ev.PrefixDigests, "b", first_cell=1)),
    ("digests_fit_pages_and_prompt", STORY, "b", "L1", bent(ev.Queued, "b", prompt_tokens=65)),
    ("a_path_is_a_path", STORY, "c", "L2", bent(ev.Matched, "c", best_node=99)),
    ("a_path_is_a_path", STORY, "c", "L2", bent(ev.Matched, "c", key_tokens=16)),
    ("admitted_once_on_a_match", STORY, "c", "L2", again(ev.Admission, "c", ev.Prefill, "c")),
    ("loads_are_of_what_the_match_promised", STORY, "c", "L2", bent(ev.LoadQueued, node=99)),
    ("a_decision_says_what_was_queued", STORY, "c", "L2", bent(ev.LoadBackDecided, loaded=16)),
    ("a_decision_says_what_was_queued", STORY, "c", "L2", bent(ev.LoadBackDecided, reason=ev.Refusal.TOO_SHORT)),
    ("a_decision_says_what_was_queued", STORY, "c", "L2", bent(ev.LoadBackDecided, wanted=16)),
    ("passes_begin_behind_the_admitted_prefix", STORY, "c", "L2", bent(ev.Prefill, "c", start=0)),
    ("passes_begin_behind_the_admitted_prefix", STORY, "c", "L2", moved(ev.Admission, ev.Prefill, "c", "c")),
    ("passes_follow_one_another", STORY, "c", "L2", again(ev.Prefill, "c", ev.PrefillDone, "c")),
    ("a_pass_has_one_result", STORY, "c", "L2", again(ev.PrefillDone, "c", ev.Released, "c")),
    ("nothing_comes_after_the_end", STORY, "c", "L2", again(ev.Released, "c", ev.Queued, "d")),
    ("it_was_admitted_on_a_match", STORY, "c", "L2", never_admitted),
    ("the_admission_says_what_was_matched_and_loaded", STORY, "c", "L2", gone(ev.LoadBackDecided)),
    ("it_computed_the_rest", STORY, "c", "L2", bent(ev.Queued, "c", prompt_tokens=34)),
    ("the_results_were_processed", STORY, "c", "L2", gone(ev.PrefillDone, "c")),
    ("the_results_were_processed", STORY, "c", "L2", bent(ev.PrefillDone, "c", output_tokens=0)),
    ("it_was_not_given_up_before", STORY, "c", "L2", aborted(ev.ReleaseState.ABORTED)),
    ("it_was_not_reset_meanwhile", STORY, "b", "L1", extra(ev.PrefillDone, lambda e: [ev.Reset(0, 0, 1)], "b")),
    ("the_server_says_the_same", STORY, "c", "L2", bent(ev.Released, "c", cached_host=0)),
    ("one_node_of_the_path_holds_it", STORY, "b", "L1", lambda e: e),
    ("it_is_a_page", STORY, "b", "L1", lambda e: e),
    ("a_node_has_one_end_and_one_prefix", STORY, "c", "L2", extra(ev.Queued, other_end, "fill")),
    ("it_was_not_computed", DECLINED, "c", "L2", lambda e: e),
    ("it_stayed_in_l1_until_the_result", STORY, "b", "L1", extra(ev.PrefillDone, evicted, "b")),
    ("it_was_matched_in_l1", STORY, "c", "L1", lambda e: e),
    ("it_came_into_l1_and_did_not_leave", STORY, "b", "L1", gone(ev.Prefill, "a")),
    ("it_came_into_l1_and_did_not_leave", STORY, "b", "L1", extra(ev.Queued, evicted, "b")),
    ("it_came_into_l1_and_did_not_leave", STORY, "c", "L2", long_before),
    ("an_insert_is_what_its_path_holds", STORY, "b", "L1", bent(ev.Inserted, "a", key_tokens=16)),
    ("only_what_was_computed_is_inserted", STORY, "b", "L1", bent(ev.Prefill, "a", end=16)),
    ("what_a_load_brought_was_there_before_the_first_pass", STORY, "d", "L1", moved(ev.LoadDone, ev.Prefill, "", "d")),
    ("it_was_matched_in_l2_or_on_its_way_from_there", STORY, "b", "L2", lambda e: e),
    ("it_was_launched_before_the_first_pass", STORY, "c", "L2", moved(ev.TransferStarted, ev.Prefill, "", "c", at=2)),
    ("it_was_launched_and_it_completed", STORY, "c", "L2", gone(ev.LoadDone)),
    ("it_was_launched_and_it_completed", STORY, "c", "L2", bent(ev.LoadDone, tokens=16)),
    ("it_read_whole_pages", STORY, "c", "L2", bent(ev.LoadQueued, slots=(ev.Run(0, 16), ev.Run(0, 16)))),
    ("its_request_was_in_order", STORY, "d", "L1", bent(ev.LoadQueued, node=99)),
    ("the_slots_held_what_was_written_to_the_end_of_the_read", STORY, "c", "L2", gone(ev.HostAlloc, at=0)),
    ("the_slots_held_what_was_written_to_the_end_of_the_read", STORY, "c", "L2", extra(ev.LoadDone, reused_slots)),
    ("it_was_written_for_these_positions", STORY, "c", "L2", bent(ev.LoadQueued, slots=CROSSED)),
    ("what_it_held_was_this_prefix", STORY, "c", "L2", gone(ev.BackupAcked, at=0)),
    ("the_backup_was_acknowledged_in_time", STORY, "c", "L2", moved(ev.BackupAcked, ev.LoadQueued, at=0)),
    ("one_backup_of_the_node_was_under_way", STORY, "c", "L2", extra(ev.TransferStarted, second_backup)),
    ("it_was_written_of_this_prefix", STORY, "c", "L2", of_another_node),
    ("it_was_in_l1_from_queue_to_acknowledgement", STORY, "c", "L2", extra(ev.BackupAcked, evicted)),
    ("it_was_read", STORY, "c", "L2", gone(ev.BackupQueued, at=0)),
    ("it_stayed_until_the_copy_had_ended", STORY, "c", "L2", evicted_while_loaded),
    ("threads_copied_before_it_was_read", STORY, "c", "L2", facts(2, lambda f: f.update(copy_threads=True, layers=2))),
    ("no_prefetch_of_its_own_brought_it", STORED, "c", "L2", lambda e: e),
    ("it_had_left_l1_by_demotion", STORY, "c", "L2", bent(ev.EvictedL1, at=0, how=ev.Eviction.DROPPED)),
    ("a_prefetch_of_its_own_filled_the_slots", STORED, "e", "L3", lambda e: e),
    ("it_was_asked_for", STORED, "c", "L3", bent(ev.PrefetchAsked, "c", issued=0)),
    ("it_was_asked_for", STORED, "c", "L3", bent(ev.PrefetchAsked, "c", tokens=16)),
    ("it_was_asked_for", STORED, "e", "L2", gone(ev.PrefetchAsked, "c")),
    ("it_was_looked_up", STORED, "c", "L3", gone(ev.StorageLookedUp, "c")),
    ("it_was_looked_up", STORED, "e", "L2", bent(ev.StorageLookedUp, "c", tokens=16)),
    ("a_storage_was_attached", STORED, "c", "L3", extra(ev.PrefetchAsked, detached, "c")),
    ("a_storage_was_attached", STORED, "c", "L3", extra(ev.PrefetchDone, detached, "c")),
    ("it_filled_the_slots_with_this_prefix", STORED, "c", "L3", bent(ev.PrefetchDone, "c", completed=16, loaded=16)),
    ("it_was_found_in_use_in_time", FOUND, "c", "L2", bent(ev.ResidentDigests, digests=())),
    ("the_instance_was_described_before", STORY, "b", "L1", facts(2, lambda f: f.update(bytes_per_token=0))),
    ("host_memory_is_a_tier", STORY, "c", "L2", facts(2, lambda f: f.update(host_memory_mode="buffer_only"))),
    ("the_hooks_were_there_all_the_time", STORY, "c", "L2", hook("host_pool.free", "missing")),
    ("no_hook_failed_meanwhile", STORY, "c", "L2", extra(ev.LoadQueued, failed)),
]  # fmt: skip
RANGES = {"one_node_of_the_path_holds_it": (32, 48), "it_is_a_page": (0, 20)}
"""Where the claim is another one."""


@pytest.mark.parametrize(
    ("rule", "events", "rid", "tier", "bend"), BREAKS, ids=[f"{i} {case[0]}" for i, case in enumerate(BREAKS)]
)
def test_a_rule_refuses_what_breaks_it(rule: str, events: Events, rid: str, tier: str, bend: Bend) -> None:
    told = why(bend(events), rid, tier, *RANGES.get(rule, (0, CELLS)))
    assert told is not None and rule in told.rsplit("[", 1)[-1], told


ELSEWHERE = {
    "its_own_events_are_in_order": "the rules of a stay",
    "something_put_it_there": "the rules of how a block came into L1",
    "nothing_of_it_is_in_doubt": "the rules of a record",
}


def test_every_rule_is_tried() -> None:
    tried = {case[0] for case in BREAKS} | ELSEWHERE.keys() | {name for _, names in GROUPED for name in names}
    assert {predicate.__name__ for _, told in rules() for predicate in told} == tried


# --- content -----------------------------------------------------------------------------------------


def unequal(events: Events, pages: int = 2) -> str | None:
    oracle = Oracle.of(events)
    c = next(a for a in oracle.attempts() if a.use.rid == "c")
    assert oracle.refusal(c, "L2", 0, CELLS) is None
    return oracle.unequal(c, 0, CELLS, pages)


def test_equal_digests_at_both_ends_are_equal_bytes() -> None:
    assert unequal(DIGESTED) is None
    assert unequal(DIGESTED, 3) is not None and unequal(STORY, 1) is not None
    flipped = bent(ev.LoadDigested, at=1, digests=lambda d: (d[1], d[0]))(DIGESTED)
    assert "other bytes" in str(unequal(flipped))
    oracle = Oracle.of(flipped)
    c = next(a for a in oracle.attempts() if a.use.rid == "c")
    assert oracle.intact(c, 0, CELLS) is None
    assert oracle.intact(c, 0, 16) is not None


CONTENTS: list[tuple[str, Bend]] = [
    ("a_page_is_digested_once_at_each_end", extra(ev.LoadDigested, digested_again)),
    ("a_digest_is_of_every_layer", bent(ev.LoadDigested, at=0, digests=lambda d: d[:1])),
    ("digests_are_taken_after_the_copies_began", moved(ev.BackupDigested, ev.LoadDigested, at=0)),
    ("a_page_is_in_l1_until_it_is_digested", evicted_before_it_was_digested),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "bend"), CONTENTS, ids=[name for name, _ in CONTENTS])
def test_digests_that_show_nothing_are_refused(rule: str, bend: Bend) -> None:
    assert rule in str(unequal(bend(DIGESTED)))


# --- several journals --------------------------------------------------------------------------------


def rank(events: Events, number: int, size: int = 2, process: dict[str, Any] | None = None, **more: Any) -> Events:
    """The events of one of several ranks."""
    ranks = {"tp_rank": number, "tp_size": size, "pp_rank": 0, "pp_size": 1, "attn_tp_size": size}
    told = facts(ev.FactKind.INSTANCE, lambda f: f.update(ranks=ranks, **more))(events)
    described = {"role": "scheduler", "sglang": "0.5.23", "arguments": {"model_path": "m"}, **(process or {})}
    rest = [e for e in told if not (isinstance(e, ev.Facts) and e.kind == ev.FactKind.PROCESS)]
    return renumbered([ev.Facts(0, 1, ev.FactKind.PROCESS, json.dumps(described)), *rest])


def together(*journals: Events, walls: Sequence[int] = (0, 0, 0)) -> str | None:
    """About C, as the first journal's rank served it."""
    names = [f"scheduler-{at}" for at in range(len(journals))]
    parts = [Recorded([events], *about) for events, *about in zip(journals, names, walls, strict=False)]
    return why((), "c", "L2", of=Oracle(parts))


def test_ranks_of_one_start_confirm_together() -> None:
    start = {"start": "one", "host": "h", "key": "k"}
    assert together(rank(STORY, 0, process=start), rank(STORY, 1, process=start)) is None
    assert together(rank(STORY, 0), rank(STORY, 1)) is None, "older journals: what their facts show is one start"
    assert together(rank(STORY, 0), rank(STORY, 1), STORY) is None, "another server is none of the group"


def in_order(*rids: str) -> Events:
    server = Server(0, page=16, l1=96, l2=400, quiet=True)
    prompts = {"fill": tuple(range(1000, 1096)), "x": tuple(range(2000, 2017))}
    prompts |= {"a": PROMPT, "c": (*PROMPT[:CELLS], 901)}
    for rid in ("a", *rids):
        server.serve([(rid, prompts[rid])])
    return server.events


ONE, OTHER = {"start": "one", "key": "k"}, {"start": "other", "key": "k"}
SECOND = 10**9
GROUPED: list[tuple[str, set[str]]] = [
    ("every rank", {"every_rank_was_recorded_once", "the_ranks_have_one_key_and_one_description"}),
    ("requests", {"every_rank_served_the_request", "the_ranks_agree_on_the_order"}),
    ("content", {name for name, _ in CONTENTS}),
]


@pytest.mark.parametrize(
    ("rule", "journals", "walls"),
    [
        ("every_rank_was_recorded_once", [rank(STORY, 0)], (0,)),
        ("every_rank_was_recorded_once", [rank(STORY, 0, process=ONE), rank(STORY, 1, process=OTHER)], (0, 0)),
        ("every_rank_was_recorded_once", [rank(STORY, 0, process=ONE), rank(STORY, 1)], (0, 0)),
        ("every_rank_was_recorded_once", [rank(STORY, 0), rank(STORY, 1, process={"sglang": "0.5.22"})], (0, 0)),
        ("every_rank_was_recorded_once", [rank(STORY, 0), rank(STORY, 1, layers=9)], (0, 0)),
        ("every_rank_was_recorded_once", [rank(STORY, 0), rank(STORY, 1)], (0, 121 * SECOND)),
        ("every_rank_was_recorded_once", [rank(STORY, 0), rank(STORY, 0)], (0, 0)),
        ("every_rank_was_recorded_once", [rank(STORY, 0), rank(STORY, 1), rank(STORY, 1)], (0, 0, SECOND)),
        (
            "the_ranks_have_one_key_and_one_description",
            [rank(STORY, 0, process=ONE), rank(STORY, 1, process={**ONE, "key": "q"})],
            (0, 0),
        ),
        (
            "the_ranks_have_one_key_and_one_description",
            [rank(STORY, 0, process=ONE), rank(STORY, 1, process={**ONE, "sglang": "0.5.22"})],
            (0, 0),
        ),
        ("every_rank_served_the_request", [rank(STORY, 0), rank(bent(ev.Text, at=3, text="z")(STORY), 1)], (0, 0)),
        (
            "the_ranks_agree_on_the_order",
            [rank(in_order("fill", "x", "c"), 0), rank(in_order("fill", "c", "x"), 1)],
            (0, 0),
        ),
    ],
)
def test_what_is_no_group_confirms_nothing(rule: str, journals: list[Events], walls: Sequence[int]) -> None:
    assert rule in str(together(*journals, walls=walls))


def test_what_one_rank_did_not_see_the_group_does_not_claim() -> None:
    assert "it_was_launched" in str(together(rank(STORY, 0), rank(gone(ev.LoadDone)(STORY), 1)))


def test_an_id_used_twice_is_paired_by_what_the_uses_are() -> None:
    """Rank 1 recorded only the second use of C's id: the first is not on every rank, the second is."""
    server = Server(0, page=16, l1=96, l2=400, quiet=True)
    c = (*PROMPT[:CELLS], 901)
    for rid, tokens in (("a", PROMPT), ("fill", tuple(range(1000, 1096)))):
        server.serve([(rid, tokens)])
    begun = len(server.events)
    server.serve([("c", c)])
    ended = len(server.events)
    server.serve([("fill2", tuple(range(2000, 2096)))])
    server.serve([("c", c)])
    part = [*server.events[:begun], *server.events[ended:]]
    oracle = Oracle([Recorded([rank(server.events, 0)], "0"), Recorded([rank(renumbered(part), 1)], "1")])
    uses = [a for a in oracle.attempts(0) if a.use.rid == "c"]
    told = [oracle.refusal(use, "L2", 0, CELLS) for use in uses]
    assert "every_rank_served_the_request" in str(told[0]) and told[1] is None


# --- the whole ---------------------------------------------------------------------------------------


def test_every_hole_repeat_and_swap_inside_the_chain_is_refused() -> None:
    start = next(i for i, e in enumerate(STORY) if isinstance(e, ev.Prefill))
    last = next(i for i, e in enumerate(STORY) if isinstance(e, ev.LoadDone))
    for at in range(start, last + 1):
        assert why([*STORY[:at], *STORY[at + 1 :]], "c", "L2") is not None, STORY[at]
        assert why([*STORY[: at + 1], *STORY[at:]], "c", "L2") is not None, STORY[at]
        other = list(STORY)
        other[at], other[at + 1] = other[at + 1], other[at]
        assert why(other, "c", "L2") is not None, STORY[at]


def test_what_happens_outside_the_chain_does_not_matter() -> None:
    assert why(STORY[:-2], "c", "L2") is None
    last = max(i for i, e in enumerate(STORY) if isinstance(e, ev.Prefill))
    assert why([*STORY[:last], *STORY[last + 1 :]], "c", "L2") is None


def test_a_release_or_an_abort_after_the_result_takes_nothing_away() -> None:
    assert why(bent(ev.Released, "c", state=ev.ReleaseState.ABORTED)(STORY), "c", "L2") is None
    assert why(bent(ev.Released, "c", state=ev.ReleaseState.RETRACTED)(STORY), "c", "L2") is None


def test_a_look_up_may_be_told_before_the_call_that_asked_for_it_returns() -> None:
    assert why(moved(ev.PrefetchAsked, ev.StorageLookedUp, "c", "c")(STORED), "c", "L3") is None


def test_a_failure_before_the_chain_and_one_for_another_request_cost_nothing() -> None:
    assert why(extra(ev.Queued, failed, "a")(STORY), "c", "L2") is None
    once = [ev.Text(0, 0, 77, "tree.match_prefix"), ev.HookFailed(0, 0, 77, 1, "x")]
    assert why(extra(ev.Queued, lambda e: once, "fill")(STORY), "c", "L2") is None
    assert why(extra(ev.Matched, lambda e: once, "c")(STORY), "c", "L2") is not None
    often = [once[0], ev.HookFailed(0, 0, 77, 4, "x")]
    assert why(extra(ev.Queued, lambda e: often, "fill")(STORY), "c", "L2") is not None, "later ones leave no event"


@pytest.mark.parametrize("where", ["same batch", "while it is loaded"])
def test_several_readers_of_one_load_back(where: str) -> None:
    """The copy was launched for C before D's first pass, and its end was seen only later: D read it from L2 as well."""
    server = Server(0, page=16, l1=96, l2=400, quiet=True)
    c, d = (*PROMPT[:CELLS], 901), (*PROMPT[:CELLS], 902)
    server.serve([("a", PROMPT)])
    server.serve([("fill", tuple(range(1000, 1096)))])
    if where == "same batch":
        server.serve([("c", c), ("d", d)])
        events = server.events
    else:
        server.serve([("c", c)])
        server.serve([("d", d)])
        events = moved(ev.LoadDone, ev.PrefillDone, "", "d")(server.events)
    assert why(events, "c", "L2") is None
    assert why(events, "d", "L2") is None and why(events, "d", "L1") is not None
    for rid in ("c", "d"):
        assert why(gone(ev.LoadDone)(events), rid, "L2") is not None
        assert why(gone(ev.BackupAcked, at=0)(events), rid, "L2") is not None
    late = moved(ev.TransferStarted, ev.Prefill, "", "d")(gone(ev.LoadDone)(events))
    done = [dataclasses.replace(e, seq=0) for e in events if isinstance(e, ev.LoadDone)]
    assert why(extra(ev.Released, lambda e: done, "d")(late), "d", "L2") is not None


@pytest.mark.parametrize("stored", [False, True], ids=["", "with storage"])
@pytest.mark.parametrize("seed", range(24))
def test_what_the_oracle_establishes_about_a_simulated_server_is_true(seed: int, stored: bool) -> None:
    """Every page of every request, for every tier."""
    server = simulated(seed, stored=stored)
    oracle = Oracle.of(server.events)
    truths = {id(t): t for t in server.truths}
    for stay in oracle.attempts():
        own = [t for t in truths.values() if t.rid == stay.use.rid and t.prompt == stay.queued.prompt_tokens]
        for low in range(0, stay.queued.prompt_tokens, server.page):
            high = low + server.page
            told = [tier for tier in ("L1", "L2", "L3") if oracle.refusal(stay, tier, low, high) is None]
            if "L1" in told:
                assert any(high <= t.l1 for t in own)
            elif "L3" in told:
                assert any(t.l1 <= low and high <= t.l1 + t.l2 and t.l3 for t in own)
            elif "L2" in told:
                # In L1 by the tree's word: on its way there by another request's load-back.
                assert any(high <= t.l1 + t.l2 for t in own)
            assert len(told) < 2 or told == ["L1", "L2"]


def test_in_order_the_reader_is_spared_without_a_difference() -> None:
    for events in (STORY, list(read_journal(ABC).events), [*STORY[:9], *STORY[12:]]):
        read = journal_of(events)
        assert journal_as_read(events) == read


def test_the_rules_are_listed() -> None:
    told = subprocess.run(
        [sys.executable, str(Path(oracle_module.__file__)), "--rules"], capture_output=True, text=True, check=True
    ).stdout
    assert "it was launched before the first pass: The copy to L1 was launched before" in told
    assert all(predicate.__doc__ for _, rules_told in rules() for predicate in rules_told)
