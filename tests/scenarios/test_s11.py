"""S11 (sglang#37103): the client goes away while the load-back for its request is under way."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from journal_tools import journal_of, renumbered, to_bytes

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.cli.application import application
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade
from kvwitness.tracer.verdicts.leaks import leaks_of

from .evicting import EvictingServer, prompt

A, X, Y = (prompt(seed, 64) for seed in range(3))


def aborted(*, leaking: bool, then: tuple[str, ...] = (), lost: bool = False) -> list[ev.Event]:
    """ "gone" is aborted during its load-back. ``leaking``: that never ends; ``lost``: an event after it is missing."""
    server = EvictingServer(l1=160, l2=400)
    for rid, tokens in (("a", A), ("x", X), ("y", Y)):
        server.send(rid, tokens)
    begun = len(server.events)
    server.send("gone", (*A, 1))
    ended = len(server.events)
    if leaking:
        # Nobody unlocks what is being loaded.
        server.locks["gone"] = set(server.walk(A))
    for rid in then:
        server.send(f"fill {rid}", prompt(ord(rid), 65))
        server.send(rid, (*X, ord(rid)))
    tail: list[ev.Event] = []
    for event in server.events[begun:ended]:
        if leaking and isinstance(event, ev.LoadDone):
            continue
        if isinstance(event, ev.Prefill):
            tail.append(ev.Released(0, event.t_ns, event.req, ev.ReleaseState.ABORTED, 0, 64, 0, 64, 0))
        elif not isinstance(event, ev.PrefillDone | ev.Inserted | ev.Released):
            tail.append(event)
    events = renumbered([*server.events[:begun], *tail, *server.events[ended:]])
    return [event for event in events if not (lost and event.seq == begun + len(tail) + 1)]


def test_nothing_is_claimed_for_a_request_that_was_aborted_during_its_load_back() -> None:
    verdict = judge([journal_of(aborted(leaking=False, then=("c",)))]).verdict("gone")
    assert verdict is not None
    assert verdict.grade is Grade.UNKNOWN
    assert verdict.tokens.l2 == verdict.tokens.l1 == 0
    assert not any("leak" in note for note in verdict.notes)


def test_slots_that_stay_taken_are_reported_by_name() -> None:
    judgement = judge([journal_of(aborted(leaking=True, then=("c",)))])
    verdict = judgement.verdict("gone")
    assert verdict is not None and verdict.grade is Grade.UNKNOWN
    (leak,) = leaks_of(judgement.instances[0])
    assert (leak.rid, leak.tokens) == ("gone", 64)
    assert verdict.notes[-1] == str(leak)
    assert str(leak).startswith("leak: the load-back of 64 tokens for request gone (event ")
    assert "its 64 slots of L1 and the 64 host slots that it reads stay taken until the next flush" in str(leak)


def test_a_load_back_that_may_still_end_or_whose_end_may_be_missing_is_no_leak() -> None:
    for events in (aborted(leaking=True), aborted(leaking=True, then=("c",), lost=True)):
        assert not list(leaks_of(judge([journal_of(events)]).instances[0]))


def test_the_leak_is_shown(tmp_path: Path) -> None:
    (tmp_path / "scheduler-1-1.kvwj").write_bytes(to_bytes(aborted(leaking=True, then=("c",))))
    for arguments in (("show", str(tmp_path)), ("explain", str(tmp_path), "gone")):
        shown = CliRunner().invoke(application, arguments, prog_name="kvwitness")
        assert "leak: the load-back of 64 tokens" in " ".join(shown.output.split()), shown.output
