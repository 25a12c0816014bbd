"""S10 (sglang#40748): L1 has free slots, and the evictor removes as much as the whole request needs all the same."""

from __future__ import annotations

from kvwitness.tracer.model import Grade
from kvwitness.tracer.verdicts.why import Because, Why

from .evicting import EvictingServer, prompt

VICTIMS = tuple((f"victim-{seed}", prompt(seed, 64)) for seed in range(1, 6))
BIG = prompt(9, 192)


def run(*, ignores_room: bool) -> tuple[EvictingServer, Why]:
    """Five prompts of 64 tokens are held and 128 are free; then comes one of 192."""
    server = EvictingServer(l1=448, l2=32, ignores_room=ignores_room)
    for rid, tokens in (*VICTIMS, ("big", BIG)):
        server.send(rid, tokens)
    server.send("again", (*VICTIMS[2][1], 7))
    return server, server.why("again")


def test_the_displacing_request_and_the_over_eviction_are_named() -> None:
    server, why = run(ignores_room=True)
    assert server.verdict("again").grade is Grade.RECOMPUTED
    (piece,) = why.l1
    assert piece.because is Because.LOST
    eviction = piece.eviction
    assert eviction is not None
    assert (eviction.rids, eviction.cause) == (("big",), "prefill allocation")
    assert (eviction.asked, eviction.free, eviction.freed) == (192, 128, 192)
    # A page beyond what the request computes is reserved.
    assert (eviction.needed, eviction.overasked, eviction.surplus) == (80, 112, 112)
    assert [victim.owner for victim in eviction.victims] == ["victim-1", "victim-2", "victim-3"]
    assert piece.places == (3,)


def test_an_evictor_that_counts_what_is_free_takes_no_more() -> None:
    server, why = run(ignores_room=False)
    assert (why.in_l1, why.l1) == (64, ())
    assert server.verdict("again").sentence == "L1 read confirmed"
