"""Why a prefix was not in L1, and why not in L2: the displacing request, the victims, the room that there was."""

from __future__ import annotations

import dataclasses
import lzma
from pathlib import Path

import pytest
from journal_tools import ABC, journal_of, renumbered
from scenarios.evicting import EvictingServer, prompt

from kvwitness.collectors.journal import Journal, parse_journal, read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.model import Reason
from kvwitness.tracer.verdicts.view import InstanceView
from kvwitness.tracer.verdicts.why import Because, Why, why_absent

DATA = Path(__file__).parents[1] / "adapters" / "data"
A, X, Y, Z = (prompt(seed, 64) for seed in (1, 2, 3, 4))


def answers(journal: Journal) -> list[Why]:
    view = InstanceView(derive(journal))
    return [why_absent(view, request) for request in view.instance.requests]


# --- L1 ------------------------------------------------------------------------------------------------


def test_an_eviction_names_the_request_that_forced_it_and_its_victims_in_order() -> None:
    server = EvictingServer(l1=144, l2=400)
    for rid, tokens in (("a", A), ("x", X), ("y", Y), ("again", (*A, 7))):
        server.send(rid, tokens)
    why = server.why("again")
    assert (why.prior_rid, why.known, why.in_l1, why.in_l2) == ("a", 64, 0, 64)
    (piece,) = why.l1
    assert (piece.start, piece.end, piece.because) == (0, 64, Because.EVICTED)
    assert piece.answer == "evicted, its copy in L2 stayed"
    eviction = piece.eviction
    assert eviction is not None
    assert (eviction.cause, eviction.rids) == ("prefill allocation", ("y",))
    assert (eviction.asked, eviction.freed, eviction.free) == (48, 64, 16)
    assert [(v.owner, v.start, v.end, v.outcome) for v in eviction.victims] == [("a", 0, 64, "demoted")]
    assert piece.places == (1,)
    assert piece.before_match_ns is not None and piece.before_match_ns > 0
    (there,) = why.l2
    assert (there.because, there.answer) == (Because.THERE, "it was in L2, and was loaded from there")


def test_what_was_dropped_without_a_copy_is_lost() -> None:
    server = EvictingServer(l1=144, l2=32)  # too small a host pool for any copy
    for rid, tokens in (("a", A), ("x", X), ("y", Y), ("again", (*A, 7))):
        server.send(rid, tokens)
    why = server.why("again")
    assert [(p.because, p.answer) for p in why.l1] == [(Because.LOST, "dropped without a backup: lost")]
    assert [p.because for p in why.l2] == [Because.REJECTED]
    assert "64 tokens to store, 32 free" in why.l2[0].answer
    verdict = server.verdict("again")
    lost = next(piece for piece in verdict.ranges if piece.reason is Reason.NEVER_BACKED_UP)
    assert "64 tokens to store, 32 free" in lost.detail


def test_a_demotion_without_a_copy_is_no_comfort() -> None:
    """The tree demoted a node whose copy nobody saw acknowledged."""
    server = EvictingServer(l1=144, l2=400)
    for rid, tokens in (("a", A), ("x", X), ("y", Y)):
        server.send(rid, tokens)
    server.nodes()[0].parent = server.root
    gone = next(n for n in server.nodes() if n.tokens == A)
    server._drop(gone)
    server.send("again", (*A, 7))
    events = [e for e in server.events if not isinstance(e, ev.BackupAcked | ev.HostFree)]
    why = answers(journal_of(renumbered(events)))[-1]
    assert [p.because for p in why.l1] == [Because.LOST]
    assert "no acknowledged copy in L2 was recorded" in why.l1[0].answer
    assert [p.because for p in why.l2] == [Because.UNFINISHED]


def test_a_flush_is_the_reason_in_both_tiers() -> None:
    server = EvictingServer(l1=144, l2=400)
    server.send("a", A)
    server.flush()
    server.send("again", (*A, 7))
    why = server.why("again")
    assert {p.because for p in (*why.l1, *why.l2)} == {Because.RESET}


def test_nothing_is_asked_of_what_was_in_l1_or_never_there() -> None:
    server = EvictingServer(l1=400, l2=400)
    server.send("a", A)
    server.send("again", (*A, 7))
    assert server.why("a") == Why("a", "scheduler-1-1", None, 0, 0, 0, (), ())
    again = server.why("again")
    assert (again.known, again.in_l1, again.l1, again.l2) == (64, 64, (), ())


def test_a_victim_that_was_not_recorded_is_not_guessed() -> None:
    server = EvictingServer(l1=144, l2=400)
    for rid, tokens in (("a", A), ("x", X), ("y", Y), ("again", (*A, 7))):
        server.send(rid, tokens)
    events = [e for e in server.events if not isinstance(e, ev.EvictedL1 | ev.EvictBegin | ev.EvictEnd | ev.L1Room)]
    why = answers(journal_of(renumbered(events)))[-1]
    assert all(p.eviction is None for p in why.l1)
    assert {p.because for p in why.l1} <= {Because.UNKNOWN, Because.NOT_FOUND}


# --- L2 ------------------------------------------------------------------------------------------------


def displaced() -> EvictingServer:
    """L2 holds two prompts of 64; A is pushed out of L1 by Y, and out of L2 by the backup of Z."""
    server = EvictingServer(l1=144, l2=144)
    for rid, tokens in (("a", A), ("x", X), ("y", Y), ("z", Z), ("again", (*A, 7))):
        server.send(rid, tokens)
    return server


def test_an_eviction_from_l2_names_the_request_whose_copy_needed_room() -> None:
    server = displaced()
    why = server.why("again")
    (piece,) = why.l2
    assert (piece.start, piece.end, piece.because) == (0, 64, Because.EVICTED)
    eviction = piece.eviction
    assert eviction is not None
    assert (eviction.cause, eviction.rids, eviction.asked, eviction.freed, eviction.free) == (
        "backup",
        ("y",),
        48,
        64,
        16,
    )
    assert [(v.owner, v.start, v.end) for v in eviction.victims] == [("a", 0, 64)]
    lost = next(r for r in server.verdict("again").ranges if r.reason is Reason.LEFT_L2_BEFORE_READ)
    assert lost.detail.endswith("displaced by the backup of request y")


def test_the_eviction_that_took_the_copy_is_named_and_not_another_one_of_the_same_slots() -> None:
    server = EvictingServer(l1=144, l2=144)
    for rid, seed in (("p", 11), ("q", 12), ("r", 13), ("s", 14)):
        server.send(rid, prompt(seed, 64))  # the same slots are given up and taken again before A is there
    for rid, tokens in (("a", A), ("x", X), ("y", Y), ("z", Z), ("again", (*A, 7))):
        server.send(rid, tokens)
    (piece,) = server.why("again").l2
    assert piece.eviction is not None
    lost = next(r for r in server.verdict("again").ranges if r.reason is Reason.LEFT_L2_BEFORE_READ)
    assert lost.detail.endswith(f"displaced by the backup of request {piece.eviction.rids[0]}")
    assert piece.eviction.rids[0] in ("y", "z")


def test_journals_without_the_beginning_of_an_l2_eviction_still_name_it() -> None:
    server = displaced()
    events = [e for e in server.events if not isinstance(e, ev.EvictHostBegin | ev.L1Room)]
    why = answers(journal_of(renumbered(events)))[-1]
    assert why.l2[0].eviction is not None
    assert (why.l2[0].eviction.rids, why.l2[0].eviction.free) == (("y",), None)
    assert all(p.eviction.needed is None for p in why.l1 if p.eviction is not None)


# --- recorded runs -------------------------------------------------------------------------------------


def recorded(path: Path) -> Journal:
    raw = path.read_bytes()
    return parse_journal(lzma.decompress(raw) if path.suffix == ".xz" else raw, path.name)


@pytest.mark.parametrize("path", [ABC, *sorted(DATA.glob("*.xz"))], ids=lambda path: path.name)
def test_every_recorded_release_says_who_pushed_the_prefix_out_of_l1(path: Path) -> None:
    asked = [why for why in answers(recorded(path)) if why.in_l2]
    assert asked
    for why in asked:
        (piece,) = why.l1
        assert (piece.start, piece.end, piece.because) == (0, 1488, Because.EVICTED)
        assert piece.eviction is not None
        assert len(piece.eviction.rids) == 1
        assert piece.eviction.freed is not None and piece.eviction.freed >= piece.eviction.asked
        (place,) = piece.places
        ours = piece.eviction.victims[place - 1]
        assert (ours.start, ours.end) == (0, 1488)
        assert ours.outcome in ("demoted", "written back, then demoted")
        if "write_back" in path.name:
            assert ours.outcome == "written back, then demoted"
        assert [p.because for p in why.l2] == [Because.THERE]


def test_victims_that_were_written_back_are_counted_once() -> None:
    journal = recorded(DATA / "0.5.17-write_back-hiradix.kvwj.xz")
    view = InstanceView(derive(journal))
    for why in (why_absent(view, request) for request in view.instance.requests):
        for eviction in (p.eviction for p in why.l1 if p.eviction is not None):
            assert sum(victim.tokens for victim in eviction.victims) == eviction.freed


@pytest.mark.parametrize("name", ["attach-0.5.17.kvwj", "attach-0.5.23-rust.kvwj"])
def test_what_was_found_at_attach_is_answered_for_too(name: str) -> None:
    asked = [why for why in answers(read_journal(ABC.with_name(name))) if why.in_l2]
    assert [p.because for p in asked[0].l1] == [Because.EVICTED]
    assert asked[0].prior_rid is None


def test_any_recorded_event_may_be_missing() -> None:
    """Answers come from what is left; nothing raises."""
    events = list(read_journal(ABC).events)
    for seq in range(1, len(events) + 1, 3):
        for why in answers(journal_of([dataclasses.replace(e) for e in events if e.seq != seq])):
            assert all(p.start < p.end for p in (*why.l1, *why.l2))
