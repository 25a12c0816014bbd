"""S02 (bytedance-iaas/sglang#768): another request matches pages whose load-back is still under way, and that fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from journal_tools import journal_of
from soundness.compare import compare

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Reason, RequestVerdict, ServerReport, Tier

from .evicting import EvictingServer, prompt

A, X, Y, Z = (prompt(seed, 64) for seed in range(4))
PROVEN = (Grade.CONFIRMED, Grade.VERIFIED)


def two_readers() -> EvictingServer:
    server = EvictingServer(l1=160, l2=400)
    for rid, tokens in (("a", A), ("x", X), ("y", Y)):
        server.send(rid, tokens)
    server.serve([("r1", (*A, 1)), ("r2", (*A, 2))])
    return server


def about(events: Sequence[ev.Event], rid: str) -> RequestVerdict:
    assert compare(events).false == ()
    verdict = judge([journal_of(events)]).verdict(rid)
    assert verdict is not None
    return verdict


def test_a_read_of_a_load_that_is_under_way_is_no_confirmed_l1_read() -> None:
    verdict = two_readers().verdict("r2")
    assert (verdict.grade, verdict.reason) == (Grade.REPORTED, Reason.READ_OF_UNACKNOWLEDGED_LOAD)
    assert "L1 read confirmed" not in verdict.sentence


def test_a_load_that_ends_without_its_tail_is_a_partial_read_and_confirms_neither() -> None:
    events = [
        ev.LoadDone(e.seq, e.t_ns, e.transfer, e.tokens - 16, e.bytes - 16 * 1024, e.duration_ns, e.nodes)
        if isinstance(e, ev.LoadDone)
        else e
        for e in two_readers().events
    ]
    r1, r2 = about(events, "r1"), about(events, "r2")
    assert (r1.tier, r1.reason) == (Tier.L2, Reason.L2_READ_PARTIAL)
    assert r1.sentence == "L2 read unknown: missing link read (the copy from L2 ended with 48 of 64 tokens)"
    assert r2.reason is Reason.READ_OF_UNACKNOWLEDGED_LOAD
    assert r1.grade not in PROVEN and r2.grade not in PROVEN


def in_part(server: EvictingServer, begun: int) -> list[ev.Event]:
    """What was recorded from ``begun`` on, had the scheduler loaded 48 of 64 tokens and computed the others."""
    bent: list[ev.Event] = []
    for e in server.events[begun:]:
        if isinstance(e, ev.LoadQueued):
            e = dataclasses.replace(e, end=48, tokens=48, slots=(ev.Run(e.slots[0].start, 48),))
        elif (isinstance(e, ev.TransferStarted) and e.direction == ev.Direction.H2D) or isinstance(e, ev.LoadDone):
            e = dataclasses.replace(e, tokens=48, bytes=48 * 1024)
        elif isinstance(e, ev.LoadBackDecided):
            e = dataclasses.replace(e, loaded=48)
        elif isinstance(e, ev.Admission):
            e = dataclasses.replace(e, prefix=48, host_loaded=48)
        elif isinstance(e, ev.Prefill):
            e = dataclasses.replace(e, start=48)
        elif isinstance(e, ev.Released):
            e = dataclasses.replace(e, cached_total=48, cached_host=48)
        bent.append(e)
    return [*server.events[:begun], *bent]


def split_prefix() -> EvictingServer:
    """A's prefix is two nodes: the tail is one of its own."""
    server = EvictingServer(l1=176, l2=400)
    server.send("a", A)
    server.send("other", (*A[:48], *prompt(7, 17)))
    for rid, tokens in (("x", X), ("y", Y), ("z", Z)):
        server.send(rid, tokens)
    return server


def test_a_load_back_of_less_than_was_promised_is_confirmed_for_that_part_alone() -> None:
    server = split_prefix()
    begun = len(server.events)
    server.send("r1", (*A, 1))
    verdict = about(in_part(server, begun), "r1")
    assert verdict.reason is Reason.L2_READ_PARTIAL
    by_tier = [(r.tier, r.start, r.end, r.reason) for r in verdict.ranges]
    assert by_tier == [
        (Tier.L2, 0, 48, Reason.L2_READ),
        (Tier.RECOMPUTED, 48, 64, Reason.L2_READ_PARTIAL),
        (Tier.RECOMPUTED, 64, 65, Reason.RECOMPUTED),
    ]
    assert verdict.sentence == (
        "L2 read confirmed, in part (48 of the 64 tokens that L2 promised were loaded, the rest was computed again)"
    )


def test_a_part_that_was_not_loaded_is_not_claimed_when_it_was_not_computed_either() -> None:
    server = split_prefix()
    begun = len(server.events)
    server.send("r1", (*A, 1))
    events = [dataclasses.replace(e, start=64) if isinstance(e, ev.Prefill) and e.start == 48 else e
              for e in in_part(server, begun)]  # fmt: skip
    assert about(events, "r1").grade not in PROVEN


def test_a_server_that_counts_what_was_not_loaded_is_refuted() -> None:
    server = split_prefix()
    begun = len(server.events)
    server.send("r1", (*A, 1))
    report = {"r1": ServerReport("response", 64, 0, 64)}
    verdict = judge([journal_of(in_part(server, begun))], report).verdict("r1")
    assert verdict is not None and verdict.grade is Grade.REFUTED
    assert verdict.sentence.startswith("refuted: the server reports 64 tokens read below L1; 48 of the 64 tokens")
