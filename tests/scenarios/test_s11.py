"""S11 (sglang#37103): the client goes away while the load-back for its request is under way."""

from __future__ import annotations

from journal_tools import journal_of, renumbered

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade

from .evicting import EvictingServer, prompt

A, X, Y = (prompt(seed, 64) for seed in range(3))


def test_nothing_is_claimed_for_a_request_that_was_aborted_during_its_load_back() -> None:
    server = EvictingServer(l1=160, l2=400)
    for rid, tokens in (("a", A), ("x", X), ("y", Y)):
        server.send(rid, tokens)
    begun = len(server.events)
    server.send("gone", (*A, 1))
    tail: list[ev.Event] = []
    for event in server.events[begun:]:
        if isinstance(event, ev.Prefill):
            tail.append(ev.Released(0, event.t_ns, event.req, ev.ReleaseState.ABORTED, 0, 64, 0, 64, 0))
        elif not isinstance(event, ev.PrefillDone | ev.Inserted | ev.Released):
            tail.append(event)
    verdict = judge([journal_of(renumbered([*server.events[:begun], *tail]))]).verdict("gone")
    assert verdict is not None
    assert verdict.grade is Grade.UNKNOWN
    assert verdict.tokens.l2 == verdict.tokens.l1 == 0
