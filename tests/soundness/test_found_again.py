"""False confirmations that later searches found: journals begun on a running server, storage, digests, inserts."""

from __future__ import annotations

import dataclasses
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from journal_tools import ABC, renumbered

from kvwitness.collectors.journal import parse_journal, read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Link, RequestVerdict, Tier
from soundness.compare import compare, journal_as_read
from soundness.extras import place
from soundness.simulate import Server, simulated

DATA = Path(__file__).parent / "data"


def recorded(name: str) -> list[ev.Event]:
    return list(parse_journal(lzma.decompress((DATA / name).read_bytes()), "scheduler-1-1.kvwj").events)


def judged(events: Sequence[ev.Event]) -> tuple[RequestVerdict, ...]:
    """The verdicts; the oracle agrees with everything that is confirmed."""
    assert compare(events).false == ()
    return judge([journal_as_read(events)]).verdicts


def confirmed(events: Sequence[ev.Event], tier: Tier) -> set[str]:
    return {v.rid for v in judged(events) for r in v.ranges if r.tier is tier and r.grade is Grade.CONFIRMED}


# --- what was found at attach ------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [(ev.Run(0, 0),), (ev.Run(64, 32),), (ev.Run(0, 12),)], ids=str)
@pytest.mark.parametrize("seed", [6, 8, 19])
def test_nothing_is_built_on_a_node_that_was_found_with_slots_that_are_not_its_tokens(
    seed: int, slots: tuple[ev.Run, ...]
) -> None:
    events = simulated(seed, attached=True).events
    parents = {e.parent for e in events if isinstance(e, ev.ResidentNode)}
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.ResidentNode) and e.l2 and e.node in parents)
    before = confirmed(events, Tier.L1)
    events[at] = dataclasses.replace(events[at], slots=slots)
    assert confirmed(events, Tier.L1) < before


def found(events: Sequence[ev.Event]) -> list[ev.Event]:
    return [e for e in events if isinstance(e, ev.ResidentNode | ev.InFlight | ev.SnapshotBegin)]


@pytest.mark.parametrize("kind", [ev.ResidentNode, ev.SnapshotBegin, ev.InFlight])
def test_what_is_found_when_nobody_looks_is_a_sign_of_missing_events(kind: type[ev.Event]) -> None:
    events = simulated(8, attached=True).events
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.SnapshotEnd)) + 3
    again = next((e for e in found(events) if isinstance(e, kind)), ev.InFlight(0, 0, 0, ev.Direction.D2H, 16, 0, (9,)))
    late = renumbered([*events[:at], dataclasses.replace(again, t_ns=events[at].t_ns), *events[at:]])
    (facts,) = judge([journal_as_read(late)]).instances
    told = [text for _, _, text in facts.gaps]
    assert any("nobody was looking" in text or "looked at twice" in text for text in told), told
    assert judged(late)


def test_a_node_that_is_found_once_more_in_another_epoch_proves_nothing() -> None:
    events = simulated(8, attached=True).events
    there = [e for e in events if isinstance(e, ev.ResidentNode)][2]
    started = [i for i, e in enumerate(events) if isinstance(e, ev.TransferStarted) and e.direction == ev.Direction.H2D]
    at = started[-1]
    assert confirmed(events, Tier.L2)
    late = renumbered([*events[:at], dataclasses.replace(there, t_ns=events[at].t_ns), *events[at:]])
    assert not confirmed(late, Tier.L2)


# --- storage -----------------------------------------------------------------------------------------


def test_what_was_asked_of_storage_before_a_retraction_is_not_answered_after_it() -> None:
    """A request waits again; the prefetch that ends then was asked for by an attempt that is over."""
    events = recorded("storage/mix-0.5.23-rust.kvwj.xz")
    done = [e for e in events if isinstance(e, ev.PrefetchDone) and e.loaded][-1]
    queued = [e for e in events if isinstance(e, ev.Queued) and e.req == done.req][-1]
    begin = done.start + done.existing

    def behind() -> dict[str, list[Tier]]:
        """Confirmed ranges of what that prefetch brought, by request."""
        claims = [(v.rid, r) for v in judged(events) for r in v.ranges if r.grade is Grade.CONFIRMED]
        return {rid: [r.tier for name, r in claims if name == rid and r.start >= begin] for rid, _ in claims}

    assert behind() == {"head": [], "mix": [Tier.L3], "above": [Tier.L1], "below": [Tier.L2]}
    place(events, done.seq - 1, (dataclasses.replace(queued, retracted=1),))
    assert not any(behind().values())


def test_a_prefetch_for_a_request_that_is_served_brings_nothing() -> None:
    """Head has its answer; its slots are freed and filled again, as if it had asked once more."""
    events = recorded("storage/mix-0.5.23-rust.kvwj.xz")
    head = next(e for e in events if isinstance(e, ev.PrefetchDone) and e.loaded)
    asked = next(e for e in events if isinstance(e, ev.PrefetchAsked) and e.req == head.req and e.issued)
    mix = next(e for e in events if isinstance(e, ev.Queued) and e.seq > head.seq and e.prompt_tokens == 1603)
    free = [e for e in events if isinstance(e, ev.HostAlloc) and e.seq < mix.seq][-1].available
    size = sum(run.length for run in head.slots)
    again = (
        dataclasses.replace(asked, seq=0),
        ev.HostFree(0, 0, 0, 0, free + size, head.slots),
        ev.HostAlloc(0, 0, 0, 0, free, head.slots),
        dataclasses.replace(head, seq=0),
    )
    place(events, mix.seq - 1, again)
    for verdict in judged(events):
        if verdict.rid in ("mix", "above", "below"):
            assert all(
                r.grade is not Grade.CONFIRMED for r in verdict.ranges if r.tier in (Tier.L1, Tier.L2) and not r.start
            )


def test_what_storage_said_it_holds_is_part_of_the_chain() -> None:
    """A text told twice, out of order, between the look-up and the end of the prefetch: events may be missing there."""
    events = recorded("storage/mix-0.5.23-rust.kvwj.xz")
    head = next(e for e in events if isinstance(e, ev.PrefetchDone) and e.loaded)
    text = next(e for e in events if isinstance(e, ev.Text) and "the look-up found 0 tokens" in e.text)
    (told,) = [e for e in events if isinstance(e, ev.StorageLookedUp) and e.req == head.req]
    assert "head" in confirmed(events, Tier.L3)
    at = events.index(told) + 1
    assert "head" not in confirmed([*events[:at], text, *events[at:]], Tier.L3)


# --- inserts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inserted", [False, True])
def test_a_backup_is_of_the_prefix_whose_insert_leads_to_its_node(inserted: bool) -> None:
    """C's slots are freed and written again for A, which ended long ago, in a node that no path leads to."""
    events = list(read_journal(ABC).events)
    load = next(e for e in events if isinstance(e, ev.LoadQueued))
    old = next(e for e in events if isinstance(e, ev.BackupQueued) and e.slots == load.slots)
    free = [e for e in events if isinstance(e, ev.HostAlloc) and e.seq < load.seq][-1].available
    match = next(e for e in events if isinstance(e, ev.Matched) and e.req == load.req)
    story: list[ev.Event] = [
        ev.HostFree(0, 0, 0, 0, free + old.tokens, old.slots),
        ev.HostAlloc(0, 0, 0, old.req, free, old.slots),
        dataclasses.replace(old, node=777),
        ev.TransferStarted(0, 0, 900, ev.Direction.D2H, old.tokens, old.tokens * 1024, 0, (777,)),
        ev.BackupAcked(0, 0, 900, 777, -1),
    ]
    if inserted:
        path = (ev.PathNode(777, old.start, old.end, 1),)
        story.insert(3, ev.Inserted(0, 0, old.req, old.tokens, 0, 777, path))
    place(events, match.seq - 1, story)
    assert not confirmed(events, Tier.L2)


# --- content -----------------------------------------------------------------------------------------


def test_corruption_is_no_more_certain_than_the_read_itself() -> None:
    """The server attributes the tokens otherwise: the page differs, and the claim is not made."""
    events = [
        dataclasses.replace(e, cached_host=e.cached_host - 16, cached_device=e.cached_device + 16)
        if isinstance(e, ev.Released) and e.cached_host
        else e
        for e in recorded("byte-flip-0.5.23-rust.kvwj.xz")
    ]
    c = judged(events)[-1]
    assert (c.tier, c.grade) == (Tier.L2, Grade.REPORTED)
    missing = {link.link: link.detail for r in c.ranges for link in r.missing}
    assert "came back with other bytes in layer 2" in missing[Link.CONTENT] and Link.WITNESSES_AGREE in missing


@pytest.mark.parametrize("left", [0, 1])
def test_digests_with_a_hole_are_a_sign_of_missing_events(left: int) -> None:
    """Of a prompt's cells only the first is recorded, and then the digest of its end."""
    server = Server(0, page=16, l1=160, l2=800, quiet=True)
    for name, tokens in (("a", tuple(range(40))), ("b", tuple(range(60))), ("c", tuple(range(40)))):
        server.serve([(name, tokens)])
    assert "c" in confirmed(server.events, Tier.L1)
    of_b = [e for e in server.events if isinstance(e, ev.Queued)][1].req
    events = [
        dataclasses.replace(e, digests=e.digests[:left]) if isinstance(e, ev.PrefixDigests) and e.req == of_b else e
        for e in server.events
    ]
    (facts,) = judge([journal_as_read(events)]).instances
    assert any("whose digests do not reach as far" in text for _, _, text in facts.gaps)
    assert judged(events)


# --- an id that is used again ------------------------------------------------------------------------


@pytest.mark.parametrize("rid", ["other", "again"])
def test_an_earlier_use_of_an_id_gives_birth_to_nothing(rid: str) -> None:
    """The prefill that computed what is read was not recorded; an earlier one under the same id does not replace it."""
    server = Server(0, page=16, l1=96, l2=800, quiet=True)
    first, second, fill = tuple(range(65)), tuple(range(500, 565)), tuple(range(1000, 1097))
    for name, tokens in ((rid, first), ("again", second), ("fill", fill), ("c", second)):
        server.serve([(name, tokens)])
    assert "c" in confirmed(server.events, Tier.L2)
    queued = [e for e in server.events if isinstance(e, ev.Queued)][1]
    hidden = [
        e
        for e in server.events
        if not (isinstance(e, ev.Prefill | ev.PrefillDone) and e.req == queued.req and e.seq > queued.seq)
    ]
    assert "c" not in confirmed(renumbered(hidden), Tier.L2)


def test_a_request_that_has_ended_is_not_matched_any_more() -> None:
    """Its path says that what is claimed to lie in one node lies in another: something is missing, or not as it was."""
    events = list(read_journal(ABC).events)
    load = next(e for e in events if isinstance(e, ev.LoadQueued))
    match = next(e for e in events if isinstance(e, ev.Matched) and e.req == load.req)
    first = next(e for e in events if isinstance(e, ev.Matched) and e.purpose == ev.MatchPurpose.ADMISSION and e.req)
    assert confirmed(events, Tier.L2)
    place(events, match.seq - 2, (dataclasses.replace(first, seq=0),))
    assert not confirmed(events, Tier.L2)


# --- evictions, siblings, passes ---------------------------------------------------------------------


def gaps_of(events: Sequence[ev.Event]) -> list[str]:
    (facts,) = judge([journal_as_read(events)]).instances
    return [text for _, _, text in facts.gaps]


def test_a_prefetch_with_slots_that_are_not_its_tokens_is_a_sign_of_missing_events() -> None:
    """One that brought nothing names the slots that another one has just filled: whose they are is not known."""
    server = simulated(15, stored=True)
    events = server.events
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.PrefetchDone) and not e.completed and e.seq > 200)
    before = [e for e in events[:at] if isinstance(e, ev.PrefetchDone) and e.loaded][-1]
    rid = next(e.text for e in events if isinstance(e, ev.Text) and e.id == before.req)
    assert rid in confirmed(events, Tier.L3)
    events[at] = dataclasses.replace(events[at], slots=before.slots)
    assert rid not in confirmed(events, Tier.L3)


def test_two_nodes_in_l1_that_begin_with_one_page_are_a_sign_of_missing_events() -> None:
    """A match recorded too early shows a node before the one that it is split off from."""
    events = simulated(7).events
    early = next(i for i, e in enumerate(events) if isinstance(e, ev.Admission) and e.req == 2) + 1
    late = next(e for e in events if isinstance(e, ev.Matched) and len(e.path) == 3)
    place(events, early, (dataclasses.replace(late, seq=0, req=1),))
    assert "nodes 5 and 4 begin with the same page" in gaps_of(events)
    assert judged(events)


def test_a_page_that_left_l1_before_it_was_digested_is_not_verified_by_an_eviction_told_again() -> None:
    events = simulated(23, digested=1.0).events
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.EvictBegin) and e.call == 9)
    place(events, at + 40, (dataclasses.replace(events[at], seq=0),))
    assert "eviction 9 began twice" in gaps_of(events)
    assert judged(events)


def test_a_node_that_is_queued_again_while_it_is_copied_is_a_sign_of_missing_events() -> None:
    """Two backups of a node and one acknowledgement: nobody can tell of which."""
    events = recorded("byte-flip-0.5.23-rust.kvwj.xz")
    started = [e for e in events if isinstance(e, ev.TransferStarted) and e.direction == ev.Direction.D2H][-1]
    queued = next(e for e in events if isinstance(e, ev.BackupQueued) and e.node == started.nodes[0])
    free = [e for e in events if isinstance(e, ev.HostAlloc) and e.seq < started.seq][-1].available
    reused: tuple[ev.Event, ...] = (
        ev.HostFree(0, 0, 0, 0, free + queued.tokens, queued.slots),
        ev.HostAlloc(0, 0, 0, queued.req, free, queued.slots),
        dataclasses.replace(queued, seq=0),
    )
    assert judged(events)[-1].grade is Grade.REFUTED
    place(events, started.seq, reused)
    assert judged(events)[-1].grade is not Grade.REFUTED


@pytest.mark.parametrize("how", [ev.Eviction.DEMOTED, ev.Eviction.DROPPED, ev.Eviction.DROPPED_HOST_PRESSURE])
def test_a_node_that_leaves_l1_with_no_positions_may_be_any(how: int) -> None:
    """Also between a match and the end of the prefill that uses what it found."""
    events = simulated(0, attached=True).events
    match = [e for e in events if isinstance(e, ev.Matched) and e.req == 10][-1]
    step = next(s for e in events if isinstance(e, ev.Matched) for s in e.path if s.node == 6)
    taken = (
        ev.EvictBegin(0, 0, 900, ev.Cause.UNKNOWN, 4, 0, 0, ()),
        ev.EvictedL1(0, 0, 900, step.node, step.end + 12, step.end, how, 4, 0),
        ev.EvictEnd(0, 0, 900, 4),
    )
    assert "request-10" in confirmed(events, Tier.L1)
    place(events, match.seq, taken)
    assert "request-10" not in confirmed(events, Tier.L1)


@pytest.mark.parametrize("kind", ["plain", "attached", "stored", "digested"])
def test_a_healthy_record_does_not_contradict_itself(kind: str) -> None:
    options: dict[str, dict[str, Any]] = {"attached": {"attached": True}, "stored": {"stored": True}, "plain": {}}
    for seed in range(1000, 1030):
        assert gaps_of(simulated(seed, **options.get(kind, {"digested": 1.0})).events) == [], seed


def test_an_insert_that_leads_to_a_node_of_another_prefix_is_a_sign_of_missing_events() -> None:
    events = simulated(38).events
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.Inserted) and e.key_tokens == 52 and e.existing == 52)
    events[at] = dataclasses.replace(events[at], req=3)
    assert any("is on the path of another prefix than it has" in text for text in gaps_of(events))
    assert judged(events)


def test_the_result_of_a_pass_that_a_request_did_not_begin_makes_it_doubtful() -> None:
    """Its id is another request's as well: which of the events behind it are whose is not known."""
    events = recorded("storage/mix-0.5.23-rust.kvwj.xz")
    head = next(e for e in events if isinstance(e, ev.PrefetchDone) and e.loaded)
    assert "head" in confirmed(events, Tier.L3)
    asked = next(e for e in events if isinstance(e, ev.PrefetchAsked) and e.req == head.req)
    before = max(i for i, e in enumerate(events) if e.seq < asked.seq and isinstance(e, ev.PrefixPoint)) + 1
    place(events, before, (ev.PrefillDone(0, 0, head.req, 999, 1),))
    assert "head" not in confirmed(events, Tier.L3)


def test_a_node_that_is_found_twice_in_one_look_is_a_sign_of_missing_events() -> None:
    events = simulated(10, attached=True).events
    parents = {e.parent for e in events if isinstance(e, ev.ResidentNode)}
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.ResidentNode) and e.node in parents)
    node = events[at]
    assert isinstance(node, ev.ResidentNode)
    place(events, at + 1, (dataclasses.replace(node, seq=0),))
    assert f"node {node.node} was found twice" in gaps_of(events)
    assert judged(events)


def test_what_is_in_doubt_may_be_what_a_new_node_is_split_off_from() -> None:
    """An insert led another request's prompt to node 9; a node that begins where it does may be a part of it."""
    events = simulated(36).events
    (at,) = [i for i, e in enumerate(events) if isinstance(e, ev.Inserted) and (e.key_tokens, e.existing) == (55, 35)]
    before = confirmed(events, Tier.L1)
    events[at] = dataclasses.replace(events[at], req=5)
    assert "request-10" in before - confirmed(events, Tier.L1)
