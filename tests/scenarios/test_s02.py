"""S02 (bytedance-iaas/sglang#768): another request matches pages whose load-back is still under way, and that fails."""

from __future__ import annotations

from journal_tools import journal_of

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Reason

from .evicting import EvictingServer, prompt

A, X, Y = (prompt(seed, 64) for seed in range(3))


def two_readers() -> EvictingServer:
    server = EvictingServer(l1=160, l2=400)
    for rid, tokens in (("a", A), ("x", X), ("y", Y)):
        server.send(rid, tokens)
    server.serve([("r1", (*A, 1)), ("r2", (*A, 2))])
    return server


def test_a_read_of_a_load_that_is_under_way_is_no_confirmed_l1_read() -> None:
    verdict = two_readers().verdict("r2")
    assert (verdict.grade, verdict.reason) == (Grade.REPORTED, Reason.READ_OF_UNACKNOWLEDGED_LOAD)
    assert "L1 read confirmed" not in verdict.sentence


def test_neither_is_confirmed_when_the_load_ends_with_fewer_tokens() -> None:
    events = [
        ev.LoadDone(e.seq, e.t_ns, e.transfer, e.tokens - 16, e.bytes - 16 * 1024, e.duration_ns, e.nodes)
        if isinstance(e, ev.LoadDone)
        else e
        for e in two_readers().events
    ]
    judged = judge([journal_of(events)])
    for rid in ("r1", "r2"):
        verdict = judged.verdict(rid)
        assert verdict is not None and verdict.grade not in (Grade.CONFIRMED, Grade.VERIFIED)
