"""S08 (sglang#11900): after a retraction the server's cached count is larger than the prompt."""

from __future__ import annotations

import dataclasses

from journal_tools import journal_of

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, ServerReport

from .evicting import EvictingServer, prompt

A = prompt(1, 64)


def test_tokens_are_attributed_once_and_to_the_last_admission() -> None:
    server = EvictingServer(l1=400, l2=400)
    server.send("a", A)
    asked = (*A, *prompt(2, 33))
    server.send("r", asked)
    given_back = server.events[-1]
    assert isinstance(given_back, ev.Released)
    server.events[-1] = dataclasses.replace(given_back, state=ev.ReleaseState.RETRACTED)
    server.serve([("r", asked)], retracted=True)
    cached = 2 * len(asked) + 31
    judged = judge([journal_of(server.events)], {"r": ServerReport("response", cached=cached, device=cached)})
    verdicts = [verdict for verdict in judged.verdicts if verdict.rid == "r"]
    assert len(verdicts) == 1
    (verdict,) = verdicts
    assert verdict.attempt == 2
    tokens = verdict.tokens
    assert (tokens.l1, tokens.l2, tokens.recomputed, tokens.unknown) == (96, 0, 1, 0)
    assert tokens.l1 + tokens.recomputed == verdict.prompt_tokens == len(asked)
    assert verdict.grade is Grade.CONFIRMED
    assert any("retracted before" in note for note in verdict.notes)
    (check,) = [check for check in verdict.checks if "response" in check.witness]
    assert check.agrees is not True
