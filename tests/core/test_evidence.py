"""No false confirmation: take away or bend what a claim rests on, and the claim must go.

Everything starts from a recorded run on SGLang 0.5.23. Request A computed the prefix, B read it from L1,
C from L2 after four other prompts had pushed it out of L1.
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
from kvwitness.tracer.judgement import Judgement, judge
from kvwitness.tracer.model import Grade, Link, Reason, RequestVerdict, ServerReport, Tier

EVENTS = list(read_journal(ABC).events)
A, B, C, C2 = "cfe530e4", "6edfbdb6", "a30c069e", "0984030d"
Change = Callable[[Any], Any]


def judged(events: Sequence[ev.Event], reports: dict[str, ServerReport] | None = None) -> Judgement:
    return judge([journal_of(events)], reports)


def about(judgement: Judgement, rid: str) -> RequestVerdict:
    return next(v for v in judgement.verdicts if v.rid.startswith(rid))


def rid_number(rid: str) -> int:
    return next(e.id for e in EVENTS if isinstance(e, ev.Text) and e.text.startswith(rid))


def reused_grades(verdict: RequestVerdict) -> set[Grade]:
    return {r.grade for r in verdict.ranges if r.tier is not Tier.RECOMPUTED}


def missing(verdict: RequestVerdict) -> set[Link]:
    return {link.link for r in verdict.ranges for link in r.missing}


UNTOUCHED = judged(EVENTS)


def test_the_run_as_recorded() -> None:
    a, b, c, c2 = (about(UNTOUCHED, rid) for rid in (A, B, C, C2))
    assert (a.tier, a.grade, a.sentence) == (Tier.RECOMPUTED, Grade.RECOMPUTED, "recomputed")
    assert (b.tier, b.grade, b.sentence) == (Tier.L1, Grade.CONFIRMED, "L1 read confirmed")
    assert (c.tier, c.grade, c.sentence) == (Tier.L2, Grade.CONFIRMED, "L2 read confirmed")
    assert (c2.tier, c2.grade) == (Tier.L1, Grade.CONFIRMED)
    assert (b.tokens.l1, b.tokens.recomputed) == (1488, 15)
    assert (c.tokens.l2, c.tokens.recomputed, c.tokens.l1) == (1488, 15, 0)
    assert all(check.agrees for verdict in (a, b, c, c2) for check in verdict.checks)


def test_the_eviction_that_the_l2_read_rests_on_names_the_request_that_caused_it() -> None:
    left = next(link for r in about(UNTOUCHED, C).ranges for link in r.links if link.link is Link.LEFT_L1)
    assert "2d535078" in left.detail and "demoted" in left.detail


# --- single events -----------------------------------------------------------------------------------


def _evidence(rid: str) -> set[int]:
    return _evidence_of(about(UNTOUCHED, rid))


def _evidence_of(verdict: RequestVerdict) -> set[int]:
    return {ref.seq for r in verdict.ranges if r.tier is not Tier.RECOMPUTED for link in r.links for ref in link.events}


@pytest.mark.parametrize("rid", [B, C, C2])
def test_every_event_that_a_claim_names_is_needed(rid: str) -> None:
    """Dropped as if its hook had been dead: without a hole in the numbers that would give it away.

    A claim may only survive on other events that say the same (a second insert of the same prefix).
    """
    for seq in sorted(_evidence(rid)):
        gone = renumbered(event for event in EVENTS if event.seq != seq)
        verdict = next((v for v in judged(gone).verdicts if v.rid.startswith(rid)), None)
        if verdict is not None and verdict.grade is Grade.CONFIRMED:
            assert isinstance(EVENTS[seq - 1], ev.Inserted), EVENTS[seq - 1]
            assert any(isinstance(gone[number - 1], ev.Inserted) for number in _evidence_of(verdict))


@pytest.mark.parametrize("rid", [B, C, C2])
def test_any_hole_between_the_first_and_the_last_event_lowers_the_claim(rid: str) -> None:
    evidence = _evidence(rid)
    for seq in range(min(evidence), max(evidence) + 1):
        holed = judged([e for e in EVENTS if e.seq != seq])
        verdict = next((v for v in holed.verdicts if v.rid.startswith(rid)), None)
        if verdict is not None and verdict.grade is Grade.CONFIRMED:
            rests_on = _evidence_of(verdict)
            assert not min(rests_on) <= seq <= max(rests_on), f"confirmed across a hole at {EVENTS[seq - 1]}"


@pytest.mark.parametrize("rid", [B, C])
def test_a_repeated_or_displaced_event_lowers_the_claim(rid: str) -> None:
    for seq in sorted(_evidence(rid)):
        index = seq - 1
        twice = [*EVENTS[: index + 1], EVENTS[index], *EVENTS[index + 1 :]]
        assert about(judged(twice), rid).grade is not Grade.CONFIRMED, EVENTS[index]
        swapped = list(EVENTS)
        swapped[index], swapped[index + 1] = swapped[index + 1], swapped[index]
        assert about(judged(swapped), rid).grade is not Grade.CONFIRMED, EVENTS[index]


def test_a_clock_that_runs_backwards_lowers_the_claim() -> None:
    seq = sorted(_evidence(C))[-1]
    bent = [dataclasses.replace(e, t_ns=1) if e.seq == seq else e for e in EVENTS]
    assert about(judged(bent), C).grade is not Grade.CONFIRMED


@pytest.mark.parametrize("keep", range(0, len(EVENTS), 3))
def test_a_journal_cut_off_anywhere_confirms_nothing_that_it_does_not_show(keep: int) -> None:
    """Cutting may only remove verdicts or lower them: what is confirmed then was confirmed by what is left."""
    cut = judged(EVENTS[:keep])
    for verdict in cut.verdicts:
        if verdict.grade is Grade.CONFIRMED:
            assert max(_evidence(verdict.rid)) <= keep


# --- bent values -------------------------------------------------------------------------------------

BENT: dict[str, tuple[type[ev.Event], Change, Link]] = {
    "backup wrote other slots": (
        ev.BackupQueued,
        lambda e: dataclasses.replace(e, slots=tuple(ev.Run(r.start + 8192, r.length) for r in e.slots)),
        Link.RESIDENT_L2,
    ),
    "backup was for other positions": (
        ev.BackupQueued,
        lambda e: dataclasses.replace(e, start=e.start + 16, end=e.end + 16),
        Link.BACKED_UP,
    ),
    "load read other slots": (
        ev.LoadQueued,
        lambda e: dataclasses.replace(e, slots=tuple(ev.Run(r.start + 16, r.length) for r in e.slots)),
        Link.BACKED_UP,
    ),
    "load was for another request": (ev.LoadQueued, lambda e: dataclasses.replace(e, req=rid_number(B)), Link.READ),
    "transfer moved too few bytes": (
        ev.TransferStarted,
        lambda e: dataclasses.replace(e, bytes=e.bytes // 2),
        Link.READ,
    ),
    "transfer moved too few tokens": (
        ev.TransferStarted,
        lambda e: dataclasses.replace(e, tokens=e.tokens - 16),
        Link.RECORD_COMPLETE,
    ),
    "load-back returned less": (
        ev.LoadBackDecided,
        lambda e: dataclasses.replace(e, loaded=e.loaded - 16),
        Link.READ,
    ),
    "eviction dropped instead of demoted": (
        ev.EvictedL1,
        lambda e: dataclasses.replace(e, how=ev.Eviction.DROPPED),
        Link.LEFT_L1,
    ),
    "the tree held it in L1 at the match": (
        ev.Matched,
        lambda e: dataclasses.replace(e, path=tuple(p._replace(on_device=1) for p in e.path)),
        Link.LEFT_L1,
    ),
    "the match promised nothing": (ev.Matched, lambda e: dataclasses.replace(e, host=0), Link.RESIDENT_L2),
    "the prefill computed everything": (ev.Prefill, lambda e: dataclasses.replace(e, start=0), Link.RECORD_COMPLETE),
    "another batch's result": (ev.PrefillDone, lambda e: dataclasses.replace(e, batch=e.batch + 500), Link.USED),
    "acknowledged for another node": (
        ev.BackupAcked,
        lambda e: dataclasses.replace(e, node=e.node + 500),
        Link.BACKED_UP,
    ),
    "another prefix was written": (
        ev.PrefixDigests,
        lambda e: dataclasses.replace(e, digests=tuple(bytes(8) for _ in e.digests)) if e.req == rid_number(A) else e,
        Link.BACKED_UP,
    ),
}


@pytest.mark.parametrize("name", BENT)
def test_a_bent_event_takes_the_link_that_rests_on_it(name: str) -> None:
    kind, change, link = BENT[name]
    verdict = about(judged(changed(EVENTS, kind, change)), C)
    assert verdict.grade is not Grade.CONFIRMED
    assert link in missing(verdict), (name, missing(verdict), verdict.sentence)


def _with(at: int, *extra: ev.Event) -> list[ev.Event]:
    """The recorded events with others put in before event ``at``, numbered anew."""
    time = EVENTS[at - 1].t_ns
    placed = [dataclasses.replace(event, t_ns=time) for event in extra]
    return renumbered([*EVENTS[: at - 1], *placed, *EVENTS[at - 1 :]])


def _first(kind: type[ev.Event], after: int = 0) -> int:
    return next(e.seq for e in EVENTS if isinstance(e, kind) and e.seq > after)


def _match_of(rid: str) -> int:
    return next(e.seq for e in EVENTS if isinstance(e, ev.Matched) and e.req == rid_number(rid))


def test_slots_that_were_freed_and_written_again_are_not_the_ones_written_for_the_prefix() -> None:
    at = _match_of(C)
    taken = (ev.Run(16, 1488),)
    free = next(e for e in reversed(EVENTS[: at - 1]) if isinstance(e, ev.HostAlloc)).available
    events = _with(
        at,
        ev.HostFree(0, 0, 0, 0, free + 1488, taken),
        ev.HostAlloc(0, 0, 0, 0, free, taken),
        ev.BackupQueued(0, 0, rid_number(B), 900, 0, 1488, 1488, 0, taken),
        ev.TransferStarted(0, 0, 900, ev.Direction.D2H, 1488, 1488 * 1024, 0, (900,)),
        ev.BackupAcked(0, 0, 900, 900, -1),
    )
    verdict = about(judged(events), C)
    assert verdict.grade is not Grade.CONFIRMED
    assert Link.BORN in missing(verdict) or Link.BACKED_UP in missing(verdict)


def test_slots_freed_before_the_read_hold_nothing() -> None:
    at = _match_of(C)
    free = next(e for e in reversed(EVENTS[: at - 1]) if isinstance(e, ev.HostAlloc)).available
    verdict = about(judged(_with(at, ev.HostFree(0, 0, 0, 0, free + 1488, (ev.Run(16, 1488),)))), C)
    assert Link.RESIDENT_L2 in missing(verdict)


def test_a_free_that_no_event_shows_is_noticed_by_the_pools_own_count() -> None:
    """The hook on free is dead and slots were given back: the next allocation's count gives it away."""
    at = next(e.seq for e in EVENTS if isinstance(e, ev.HostAlloc) and e.req == rid_number("37a0e26b"))
    events = [
        dataclasses.replace(e, available=e.available + 1488) if isinstance(e, ev.HostAlloc) and e.seq >= at else e
        for e in EVENTS
    ]
    verdict = about(judged(events), C)
    assert verdict.grade is not Grade.CONFIRMED and Link.RECORD_COMPLETE in missing(verdict)


def test_a_flush_between_backup_and_match_ends_the_epoch() -> None:
    at = _match_of(C) - 3
    verdict = about(judged(_with(at, ev.HostClear(0, 0, 0, 16384), ev.Reset(0, 0, 1))), C)
    assert verdict.grade is not Grade.CONFIRMED


def test_slots_freed_during_the_copy() -> None:
    at = _first(ev.TransferStarted, after=_first(ev.LoadQueued))
    free = next(e for e in reversed(EVENTS[: at - 1]) if isinstance(e, ev.HostAlloc)).available
    verdict = about(judged(_with(at + 1, ev.HostFree(0, 0, 0, 0, free + 16, (ev.Run(16, 16),)))), C)
    assert Link.RESIDENT_L2 in missing(verdict)


def test_read_of_a_load_that_was_not_complete() -> None:
    """C2 matches in L1 what C's load-back brought; without the load's completion that is not confirmed."""
    verdict = about(judged(renumbered(e for e in EVENTS if not isinstance(e, ev.LoadDone))), C2)
    assert verdict.grade is not Grade.CONFIRMED
    assert verdict.reason is Reason.READ_OF_UNACKNOWLEDGED_LOAD


def test_a_node_that_left_l1_before_its_copy_was_usable_is_no_l2_read() -> None:
    acked = next(e for e in EVENTS if isinstance(e, ev.BackupAcked) and e.node == 3)
    rest = [e for e in EVENTS if e is not acked]
    evicted = next(i for i, e in enumerate(rest) if isinstance(e, ev.EvictedL1) and e.node == 3)
    late = dataclasses.replace(acked, t_ns=rest[evicted].t_ns)
    verdict = about(judged(renumbered([*rest[: evicted + 1], late, *rest[evicted + 1 :]])), C)
    assert Link.LEFT_L1 in missing(verdict)


# --- hooks and instance ------------------------------------------------------------------------------


def _with_coverage(change: Callable[[dict[str, Any]], None]) -> list[ev.Event]:
    def bend(event: ev.Facts) -> ev.Facts:
        if event.kind != ev.FactKind.COVERAGE:
            return event
        facts = json.loads(event.json)
        for hook in facts["hooks"]:
            change(hook)
        return dataclasses.replace(event, json=json.dumps(facts))

    return changed(EVENTS, ev.Facts, bend)


@pytest.mark.parametrize(
    "name",
    ["controller.write", "tree.finish_write_through_ack", "host_pool.free", "tree.evict_device_leaf", "tree.insert"],
)
def test_a_hook_that_was_not_installed_takes_its_links(name: str) -> None:
    def lose(hook: dict[str, Any]) -> None:
        if hook["name"] == name:
            hook["status"] = "unknown_signature"

    verdict = about(judged(_with_coverage(lose)), C)
    assert verdict.grade is not Grade.CONFIRMED
    assert any(name in link.detail for r in verdict.ranges for link in r.missing)


def test_a_hook_that_failed_takes_its_links() -> None:
    events = renumbered(
        [
            *EVENTS[:20],
            ev.Text(0, EVENTS[20].t_ns, 999, "controller.write"),
            ev.HookFailed(0, EVENTS[20].t_ns, 999, 1, "RuntimeError: x"),
            *EVENTS[20:],
        ]
    )
    verdict = about(judged(events), C)
    assert Link.BACKED_UP in missing(verdict) and "failed 1 times" in str(verdict.ranges)


def test_without_coverage_nothing_is_confirmed() -> None:
    events = renumbered(e for e in EVENTS if not (isinstance(e, ev.Facts) and e.kind == ev.FactKind.COVERAGE))
    assert all(v.grade is not Grade.CONFIRMED for v in judged(events).verdicts)


def test_buffer_only_host_memory_is_not_a_tier() -> None:
    def mode(event: ev.Facts) -> ev.Facts:
        return dataclasses.replace(
            event, json=event.json.replace('"host_memory_mode":"cache"', '"host_memory_mode":"buffer_only"')
        )

    verdict = about(judged(changed(EVENTS, ev.Facts, mode)), C)
    assert verdict.grade is not Grade.CONFIRMED and "transit" in str(verdict.ranges)


def _rank(number: int) -> list[ev.Event]:
    """The run as rank ``number`` of two would have recorded it."""
    numbers = {"tp_size": 2, "attn_tp_size": 2, "tp_rank": number, "attn_tp_rank": number}

    def of_two(event: ev.Facts) -> ev.Facts:
        if event.kind != ev.FactKind.INSTANCE:
            return event
        facts = json.loads(event.json)
        return dataclasses.replace(event, json=json.dumps(facts | {"ranks": facts["ranks"] | numbers}))

    return changed(EVENTS, ev.Facts, of_two)


def test_a_rank_that_was_not_recorded_caps_the_group() -> None:
    alone = judged(_rank(0))
    assert all(v.grade is not Grade.CONFIRMED for v in alone.verdicts)
    both = judge([journal_of(_rank(0), "scheduler-1-1.kvwj"), journal_of(_rank(1), "scheduler-2-1.kvwj")])
    assert about(both, C).grade is Grade.CONFIRMED


def test_ranks_that_disagree_cap_the_group() -> None:
    short = changed(_rank(1), ev.Prefill, lambda e: dataclasses.replace(e, start=max(e.start - 16, 0)))
    verdict = about(judge([journal_of(_rank(0), "scheduler-1-1.kvwj"), journal_of(short, "scheduler-2-1.kvwj")]), C)
    assert verdict.grade is not Grade.CONFIRMED
    assert verdict.reason is Reason.RANKS_DIVERGE


# --- witnesses ---------------------------------------------------------------------------------------


def full_rid(rid: str) -> str:
    return about(UNTOUCHED, rid).rid


def test_a_server_that_disagrees_caps_at_reported() -> None:
    report = ServerReport("response", cached=1488, device=1488, host=0)
    verdict = about(judged(EVENTS, {full_rid(C): report}), C)
    assert verdict.grade is Grade.REPORTED
    assert Link.WITNESSES_AGREE in missing(verdict)
    assert [check.agrees for check in verdict.checks if "response" in check.witness] == [False]


def test_a_server_that_agrees_is_a_witness_and_no_more() -> None:
    report = ServerReport("response", cached=1488, device=0, host=1488)
    assert about(judged(EVENTS, {full_rid(C): report}), C).grade is Grade.CONFIRMED
    gone = renumbered(e for e in EVENTS if not isinstance(e, ev.BackupAcked))
    assert about(judged(gone, {full_rid(C): report}), C).grade is Grade.REPORTED


def test_without_any_witness_a_broken_chain_is_only_consistent() -> None:
    events = renumbered(e for e in EVENTS if not isinstance(e, ev.BackupAcked | ev.Released))
    verdict = about(judged(events), C)
    assert verdict.grade is Grade.CONSISTENT and "consistent with reuse" in verdict.sentence


def test_a_reported_host_hit_whose_load_was_declined_is_refuted() -> None:
    """SGLang 0.5.9 to 0.5.19 report what the match promised: here the load-back is refused and C computes all."""
    c = rid_number(C)
    decided = next(e for e in EVENTS if isinstance(e, ev.LoadBackDecided))
    events: list[ev.Event] = []
    for e in EVENTS:
        if isinstance(e, ev.LoadQueued | ev.LoadDone) or (
            isinstance(e, ev.TransferStarted) and e.direction == ev.Direction.H2D
        ):
            continue
        if e is decided:
            e = dataclasses.replace(decided, loaded=0, reason=ev.Refusal.TOO_SHORT)
        elif isinstance(e, ev.Prefill) and e.req == c:
            e = dataclasses.replace(e, start=0)
        elif isinstance(e, ev.Admission) and e.req == c:
            e = dataclasses.replace(e, prefix=0, host_loaded=0)
        events.append(e)
    verdict = about(judged(renumbered(events)), C)
    assert verdict.grade is Grade.REFUTED
    assert verdict.reason is Reason.PROMISED_NOT_LOADED
    assert "shorter than the load-back threshold" in verdict.sentence
    capped = [
        dataclasses.replace(e, cached_total=0, cached_host=0) if isinstance(e, ev.Released) and e.req == c else e
        for e in events
    ]
    honest = about(judged(renumbered(capped)), C)
    assert (honest.tier, honest.grade) == (Tier.RECOMPUTED, Grade.RECOMPUTED)
    assert "promised, not loaded" in honest.sentence


def test_judging_is_deterministic() -> None:
    assert judged(EVENTS) == judged(EVENTS)


def test_no_claim_of_reuse_survives_an_aborted_request() -> None:
    c = rid_number(C)
    events = changed(
        EVENTS, ev.Released, lambda e: dataclasses.replace(e, state=ev.ReleaseState.ABORTED) if e.req == c else e
    )
    assert reused_grades(about(judged(events), C)) & {Grade.CONFIRMED, Grade.VERIFIED} == set()
