"""S01 (sglang#33862): write-through; the host pool is smaller than L1, and full of copies of what L1 still holds."""

from __future__ import annotations

from kvwitness.tracer.model import Reason
from kvwitness.tracer.verdicts.why import Because

from .evicting import EvictingServer, prompt

A, B, C, X, Y = (prompt(seed, 64) for seed in range(5))


def test_the_prefix_was_never_backed_up_for_a_host_pool_full_of_copies() -> None:
    server = EvictingServer(l1=224, l2=128)
    for rid, tokens in (("a", A), ("b", B), ("c", C), ("a2", (*A, 1)), ("b2", (*B, 1)), ("x", X), ("c2", (*C, 1))):
        server.send(rid, tokens)
    verdict = server.verdict("c2")
    assert verdict.tokens.recomputed == 65
    assert verdict.sentence.startswith("recomputed: never backed up to L2 (this prefix of request c: no host slots")
    lost = next(piece for piece in verdict.ranges if piece.reason is Reason.NEVER_BACKED_UP)
    assert (lost.start, lost.end) == (0, 64)
    assert lost.detail == (
        "this prefix of request c: no host slots for its copy: 64 tokens to store, 0 free; "
        "of the 128 tokens that L2 held then, 128 were in L1 as well"
    )
    why = server.why("c2")
    assert [piece.because for piece in why.l1] == [Because.LOST]
    assert why.l1[0].eviction is not None and why.l1[0].eviction.rids == ("x",)
    assert [piece.because for piece in why.l2] == [Because.REJECTED]
