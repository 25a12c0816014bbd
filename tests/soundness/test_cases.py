"""Situations that no mutation of a recorded run makes: product, oracle and truth must agree on each."""

from __future__ import annotations

import dataclasses

import pytest
from journal_tools import to_bytes

from kvwitness.collectors.journal import parse_journal
from kvwitness.patches.schema import events as ev
from kvwitness.patches.schema import format as fmt
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Tier
from soundness.compare import compare, journal_as_read
from soundness.oracle import Oracle, Recorded
from soundness.search import one
from soundness.simulate import Server, simulated
from soundness.sources import bases

A = tuple(range(65))
"""64 tokens in four pages, and one that is always computed."""
FILL = tuple(range(1000, 1097))
Claims = set[tuple[str, str, int, int]]


def server(page: int = 16, l1: int = 96, l2: int = 800) -> Server:
    return Server(0, page=page, l1=l1, l2=l2, quiet=True)


def confirmed(events: list[ev.Event]) -> Claims:
    """What the product confirms, neighbours of one tier joined; the oracle must agree with each."""
    outcome = compare(events)
    assert outcome.false == ()
    found: Claims = set()
    for verdict in judge([journal_as_read(events)]).verdicts:
        start = end = 0
        tier = None
        for r in verdict.ranges:
            if r.grade is not Grade.CONFIRMED or r.tier is Tier.RECOMPUTED:
                continue
            if (r.tier, r.start) != (tier, end):
                start, tier = r.start, r.tier
            found.discard((verdict.rid, r.tier.value, start, end))
            end = r.end
            found.add((verdict.rid, r.tier.value, start, end))
    return found


def test_from_l1_and_from_l2() -> None:
    s = server()
    for rid, tokens in (("a", A), ("b", A), ("fill", FILL), ("c", A), ("d", A)):
        s.serve([(rid, tokens)])
    assert confirmed(s.events) == {("b", "L1", 0, 64), ("c", "L2", 0, 64), ("d", "L1", 0, 64)}


def test_a_node_that_is_split_between_backup_and_load() -> None:
    s = server(l1=160)
    s.serve([("a", A)])
    s.serve([("other", (*A[:32], *range(2000, 2033)))])
    s.serve([("fill", tuple(range(3000, 3160)))])
    s.serve([("c", A)])
    assert {c for c in confirmed(s.events) if c[0] == "c"} == {("c", "L2", 0, 64)}


def test_two_requests_in_one_transfer() -> None:
    s = server(l1=160)
    other = tuple(range(500, 549))
    s.serve([("a", A), ("x", other)])
    s.serve([("fill", tuple(range(3000, 3160)))])
    s.serve([("c", A), ("y", other)])
    assert {c for c in confirmed(s.events) if c[1] == "L2"} == {("c", "L2", 0, 64), ("y", "L2", 0, 48)}


def test_two_requests_with_one_prefix_in_one_batch() -> None:
    """The second finds in L1 what the first one's load-back is still bringing: that is not seen to be complete."""
    s = server()
    s.serve([("a", A)])
    s.serve([("fill", FILL)])
    s.serve([("c", A), ("d", (*A[:64], 7))])
    assert confirmed(s.events) == {("c", "L2", 0, 64)}


def test_a_node_that_is_split_while_it_is_loaded() -> None:
    """Both parts are in L1 when the load-back is complete, also the one that no path of it has."""
    s = server(l1=160)
    s.serve([("a", A)])
    s.serve([("fill", tuple(range(3000, 3160)))])
    s.serve([("c", A), ("d", (*A[:32], 7, 8, 9))])
    s.serve([("e", A)])
    assert confirmed(s.events) == {("c", "L2", 0, 64), ("e", "L1", 0, 64)}


def test_a_split_of_a_node_that_took_the_place_of_a_lost_one() -> None:
    """The first node for this prefix has left both tiers: a later one in its place is the one that is split."""
    s = server(l1=128, l2=96)
    s.serve([("a", A)])
    s.serve([("fill", FILL)])
    s.serve([("fill2", tuple(range(4000, 4097)))])
    assert not any(n.tokens[:1] == A[:1] for n in s.nodes())
    s.serve([("again", A)])
    s.serve([("b", (*A[:32], *range(700, 710)))])
    s.serve([("c", A)])
    assert confirmed(s.events) == {("b", "L1", 0, 32), ("c", "L1", 0, 64)}


def _after_a_refused_admission(rid: str) -> Server:
    """A load-back is queued and completes, the request is not admitted, and is matched again, now in L1."""
    s = server()
    s.serve([("a", A)])
    s.serve([("fill", FILL)])
    number = s.req(rid)
    s.emit(ev.Queued, number, len(A), 0)
    s.digests(rid, A)
    s.emit(ev.PrefixPoint, s.req(rid), len(A), (s.digest(A),))
    path = s.match(rid, A)
    s.make_room(64, ev.Cause.LOAD_BACK, (number,))
    slots = [slot for n in path for slot in n.slots or ()]
    s.emit(ev.LoadQueued, number, path[-1].number, 0, 64, 64, s.runs(slots))
    s.loading.append((path[-1].number, 64))
    for node in path:
        node.device = True
    s.emit(ev.LoadBackDecided, number, path[-1].number, 64, 64, 64, 0)
    s.emit(ev.Admission, number, 0, 64, -1, 64)
    return s


def test_a_load_back_for_a_match_that_was_not_admitted() -> None:
    """L2 served these tokens, for an earlier match of the same request: "L1" would be wrong."""
    s = _after_a_refused_admission("c")
    s._finish_loads(s._launch_loads())
    s.match("c", A)
    number = s.req("c")
    s.emit(ev.Admission, number, 1, 64, 65, 0)
    s.emit(ev.Prefill, number, 9, 64, 65, 1)
    s.emit(ev.PrefillDone, number, 9, 1)
    assert confirmed(s.events) == set()


def test_a_load_back_of_an_aborted_request_serves_another_one() -> None:
    s = _after_a_refused_admission("c")
    s.emit(ev.AbortedInQueue, s.req("c"))
    s._finish_loads(s._launch_loads())
    s.serve([("d", A)])
    assert confirmed(s.events) == {("d", "L1", 0, 64)}


def test_a_load_back_that_never_completes() -> None:
    s = _after_a_refused_admission("c")
    s.emit(ev.AbortedInQueue, s.req("c"))
    s._launch_loads()
    s.loading.clear()
    s.serve([("d", A)])
    assert confirmed(s.events) == set()


def test_a_request_id_used_twice_for_other_prompts() -> None:
    s = server(l1=160)
    other = tuple(range(500, 549))
    for rid, tokens in (("x", A), ("x", other), ("y", A), ("z", other)):
        s.serve([(rid, tokens)])
    assert confirmed(s.events) == {("y", "L1", 0, 64), ("z", "L1", 0, 48)}


def test_a_request_id_in_use_twice_at_a_time() -> None:
    s = server()
    s.serve([("a", A)])
    at = len(s.events)
    s.serve([("b", A)])
    queued = next(e for e in s.events[at:] if isinstance(e, ev.Queued))
    matched = next(i for i, e in enumerate(s.events) if i > at and isinstance(e, ev.Matched))
    events = [*s.events[:matched], dataclasses.replace(queued, t_ns=s.events[matched].t_ns), *s.events[matched:]]
    assert confirmed([dataclasses.replace(e, seq=i) for i, e in enumerate(events, 1)]) == set()


@pytest.mark.parametrize("page", [1, 4])
def test_a_range_that_ends_inside_a_digest_cell(page: int) -> None:
    """Where the digests end, the path must lead to the node that was written: here it does, also after a split."""
    s = server(page=page, l1=120)
    prompt = A[:45]
    s.serve([("a", prompt)])
    s.serve([("split", (*A[:40], *range(700, 720)))])
    s.serve([("fill", tuple(range(3000, 3120)))])
    s.serve([("c", (*A[:40], 9, 9, 9, 9))])
    assert {c for c in confirmed(s.events) if c[0] == "c"} == {("c", "L2", 0, 40)}


def test_slots_of_a_sibling_inside_the_digest_cell_are_not_the_request_s() -> None:
    """Two prompts differ behind the last whole cell. Reading the other one's slots looks the same by digest."""
    s = server(page=1, l1=100)
    s.serve([("a", (*A[:32], 50, 51, 52, 53))])
    s.serve([("b", (*A[:32], 60, 61, 62, 63))])
    s.serve([("fill", tuple(range(3000, 3100)))])
    s.serve([("c", (*A[:32], 60, 61, 62, 63, 64))])
    assert ("c", "L2", 0, 36) in confirmed(s.events)
    written = [e for e in s.events if isinstance(e, ev.BackupQueued)]
    first = next(e for e in written if (e.start, e.end) == (0, 36))
    load = next(e for e in s.events if isinstance(e, ev.LoadQueued))
    tail = first.slots[0].start + 32
    wrong = dataclasses.replace(load, slots=(ev.Run(first.slots[0].start, 32), ev.Run(tail, 4)))
    found = confirmed([wrong if e is load else e for e in s.events])
    assert not any(rid == "c" and end > 32 for rid, _, _, end in found)


def test_a_chunked_prefill() -> None:
    s = server()
    s.serve([("a", A)], chunked=True)
    s.serve([("b", A)])
    s.serve([("fill", FILL)], chunked=True)
    s.serve([("c", (*A[:64], *range(600, 630)))], chunked=True)
    assert confirmed(s.events) == {("b", "L1", 0, 64), ("c", "L2", 0, 64)}


def test_a_chunk_that_was_lost_makes_no_birth() -> None:
    s = server()
    s.serve([("a", A)], chunked=True)
    s.serve([("b", A)])
    second = [e for e in s.events if isinstance(e, ev.Prefill) and e.req == 1][1]
    events = [dataclasses.replace(e, seq=i) for i, e in enumerate((e for e in s.events if e is not second), 1)]
    assert not any(end > 32 for _, _, _, end in confirmed(events))


def test_matched_again_with_another_answer() -> None:
    s = server()
    s.serve([("a", A)])
    number = s.req("b")
    s.emit(ev.Queued, number, len(A), 0)
    s.digests("b", A)
    s.emit(ev.PrefixPoint, s.req("b"), len(A), (s.digest(A),))
    s.match("b", A)
    s.emit(ev.Admission, number, 0, 64, -1, 0)
    s.serve([("fill", FILL)])
    prefix, loaded = s.admit("b", A)
    assert (prefix, loaded) == (64, 64)
    s._finish_loads(s._launch_loads())
    s.emit(ev.Prefill, number, 9, 64, 65, 1)
    s.emit(ev.PrefillDone, number, 9, 1)
    assert confirmed(s.events) == {("b", "L2", 0, 64)}


def test_recomputed_after_a_refused_load_back_it_is_in_l1_again() -> None:
    s = server()
    s.serve([("a", A)])
    s.serve([("fill", FILL)])
    s.serve([("c", A)], refuse=True)
    s.serve([("d", A)])
    assert confirmed(s.events) == {("d", "L1", 0, 64)}


def test_a_flush_between_backup_and_repeat() -> None:
    s = server()
    s.serve([("a", A)])
    s.flush()
    s.serve([("c", A)])
    assert confirmed(s.events) == set()


def test_a_text_number_with_a_second_meaning() -> None:
    s = server()
    s.serve([("a", A)])
    s.emit(ev.Text, s.req("a"), "other")
    s.serve([("b", A)])
    assert confirmed(s.events) == set()


def test_two_threads_write_their_own_chunks() -> None:
    """Two lanes: the reader puts them together by number, and a hole stays a hole whatever lane it is in."""
    s = server()
    for rid, tokens in (("a", A), ("fill", FILL), ("c", A)):
        s.serve([(rid, tokens)])
    lanes = [[e for e in s.events if (e.seq % 3 == 0) == turn] for turn in (False, True)]
    assert _grade(lanes, "c") is Grade.CONFIRMED
    oracle = Oracle([Recorded(lanes)])
    attempt = next(a for a in oracle.attempts() if a.use.rid == "c")
    assert oracle.refusal(attempt, "L2", 0, 64) is None
    acked = next(e for e in s.events if isinstance(e, ev.BackupAcked))
    assert _grade([[e for e in lane if e.seq != acked.seq + 1] for lane in lanes], "c") is not Grade.CONFIRMED
    late = [[e for e in lane if e is not acked] for lane in lanes]
    late[acked.seq % 3 == 0].append(acked)
    assert _grade(late, "c") is not Grade.CONFIRMED


def _grade(lanes: list[list[ev.Event]], rid: str) -> Grade:
    raw = to_bytes(lanes[0]) + to_bytes(lanes[1])[fmt.HEADER_BYTES :]
    verdict = judge([parse_journal(raw, "scheduler-1-1.kvwj")]).verdict(rid)
    assert verdict is not None
    return verdict.grade


@pytest.mark.parametrize("stored", [False, True], ids=["", "with storage"])
@pytest.mark.parametrize("seed", range(40))
def test_the_truth_of_a_simulated_server(seed: int, stored: bool) -> None:
    s = simulated(seed, stored=stored)
    for rid, tier, start, end in confirmed(s.events):
        known = [t for t in s.truths if t.rid == rid]
        if tier == "L1":
            assert any(end <= t.l1 for t in known)
        else:
            assert any(t.l1 <= start and end <= t.l1 + t.l2 for t in known)
        if tier == "L3":
            assert any(end - start <= t.l3 for t in known)
        elif tier == "L2":
            assert any(end - start <= t.l2 - t.l3 for t in known)


def test_mutants_are_the_same_on_every_run() -> None:
    base = bases(1)["simulated-0"]
    assert one("simulated-0", base, 5, 7) == one("simulated-0", base, 5, 7)


@pytest.mark.parametrize("released", [True, False])
def test_aborted_between_two_chunks(released: bool) -> None:
    """SGLang aborts it in the queue, and it gives its row back after that: no contradiction, and nothing served."""
    s = server()
    s.serve([("a", A)])
    number = s.req("b")
    prompt = (*A[:64], *range(500, 540))
    s.emit(ev.Queued, number, len(prompt), 0)
    s.digests("b", prompt)
    s.emit(ev.PrefixPoint, number, len(prompt), (s.digest(prompt),))
    s.match("b", prompt)
    s.emit(ev.Admission, number, 1, 64, 80, 0)
    s.emit(ev.Prefill, number, 9, 64, 80, 0)
    s.emit(ev.PrefillDone, number, 9, 0)
    s.emit(ev.AbortedInQueue, number)
    if released:
        s.emit(ev.Released, number, ev.ReleaseState.ABORTED, 0, 64, 64, 0, 0)
    assert judge([journal_as_read(s.events)]).instances[0].contradictions == ()
    assert confirmed(s.events) == set()
    s.emit(ev.Prefill, number, 12, 80, len(prompt), 1)
    s.emit(ev.PrefillDone, number, 12, 1)
    s.emit(ev.Released, number, ev.ReleaseState.FINISHED, 1, 64, 64, 0, 0)
    assert not any(rid == "b" for rid, *_ in confirmed(s.events))
