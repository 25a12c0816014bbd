"""Journals that begin with a snapshot: it stands in for what came before, and for nothing else.

Both runs were recorded on real servers: A computed a prefix and B shared it, then kvwitness was attached; four
fills pushed the prefix out of L1, C read it from L2 and C again from L1.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest
from journal_tools import FIXTURES, journal_of, renumbered
from soundness.simulate import Server

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Link, RequestVerdict, Tier

RUNS = ["attach-0.5.23-rust", "attach-0.5.17"]
EVENTS = {name: list(read_journal(FIXTURES / f"{name}.kvwj").events) for name in RUNS}


def verdicts(events: Sequence[ev.Event]) -> tuple[RequestVerdict, ...]:
    return judge([journal_of(events)]).verdicts


def from_l2(events: Sequence[ev.Event]) -> RequestVerdict | None:
    """What is said of C."""
    rid = _rids(events)[-2]
    return next((v for v in verdicts(events) if v.rid == rid), None)


def counted(events: Sequence[ev.Event]) -> list[ev.Event]:
    """The events, the end of the look with the counts of what was found."""
    found = [e for e in events if isinstance(e, ev.ResidentNode)]
    l1, l2 = (sum(e.end - e.start for e in found if getattr(e, tier) == ev.AtAttach.RESIDENT) for tier in ("l1", "l2"))
    return [dataclasses.replace(e, l1_tokens=l1, l2_tokens=l2) if isinstance(e, ev.SnapshotEnd) else e for e in events]


def _rids(events: Sequence[ev.Event]) -> list[str]:
    texts = {e.id: e.text for e in events if isinstance(e, ev.Text)}
    return [texts[e.req] for e in events if isinstance(e, ev.Queued) and e.req in texts]


def confirmed(verdict: RequestVerdict | None) -> bool:
    return verdict is not None and verdict.grade in (Grade.CONFIRMED, Grade.VERIFIED)


@pytest.mark.parametrize("run", RUNS)
def test_what_was_resident_is_confirmed_and_says_so(run: str) -> None:
    *fills, c, again = verdicts(EVENTS[run])
    assert {v.sentence for v in fills} == {"recomputed"} and len(fills) == 4
    assert (c.tier, c.grade, c.sentence) == (Tier.L2, Grade.CONFIRMED, "L2 read confirmed (resident at attach)")
    assert (again.tier, again.sentence) == (Tier.L1, "L1 read confirmed (resident at attach)")
    assert c.tokens.l2 == 1488 and all(check.agrees for check in c.checks)
    links = {link.link: link for r in c.ranges if r.tier is Tier.L2 for link in r.links}
    assert "when kvwitness was attached" in links[Link.BORN].detail
    assert links[Link.BORN].events[0].kind == links[Link.BACKED_UP].events[0].kind == "ResidentNode"
    # It left L1 after the attaching, which was seen.
    assert links[Link.LEFT_L1].events[0].kind == "EvictedL1"


@pytest.mark.parametrize("run", RUNS)
def test_every_event_that_the_claim_names_is_needed(run: str) -> None:
    events = EVENTS[run]
    c = from_l2(events)
    assert c is not None
    named = {ref.seq for r in c.ranges if r.tier is Tier.L2 for link in r.links for ref in link.events}
    assert len(named) > 8
    for seq in sorted(named):
        gone = renumbered(event for event in events if event.seq != seq)
        assert not confirmed(next((v for v in verdicts(gone) if v.rid == c.rid), None)), events[seq - 1]


@pytest.mark.parametrize("run", RUNS)
def test_without_the_digests_nothing_says_whose_prefix_it_is(run: str) -> None:
    gone = renumbered(event for event in EVENTS[run] if not isinstance(event, ev.ResidentDigests))
    assert not confirmed(from_l2(gone))


def bent(run: str, **values: object) -> list[ev.Event]:
    """With other values in what was said of the largest nodes."""
    return [
        dataclasses.replace(e, **values) if isinstance(e, ev.ResidentNode) and e.end == 1488 else e for e in EVENTS[run]
    ]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"l2": ev.AtAttach.UNDER_WAY}, id="backup-not-acknowledged"),
        pytest.param({"l2": ev.AtAttach.ABSENT, "slots": ()}, id="not-in-l2"),
        pytest.param({"parent": 999}, id="unknown-parent"),
        pytest.param({"start": 16}, id="other-positions"),
        pytest.param({"slots": (ev.Run(8000, 1488),)}, id="other-slots"),
        pytest.param({"slots": (ev.Run(0, 1472),)}, id="fewer-slots"),
    ],
)
def test_what_the_snapshot_does_not_say_is_not_claimed(run: str, values: dict[str, object]) -> None:
    assert not confirmed(from_l2(bent(run, **values)))


@pytest.mark.parametrize("run", RUNS)
def test_other_tokens_are_another_prefix(run: str) -> None:
    events = [
        dataclasses.replace(e, digests=(*e.digests[:-1], b"\0" * 8)) if isinstance(e, ev.ResidentDigests) else e
        for e in EVENTS[run]
    ]
    assert not confirmed(from_l2(events))


@pytest.mark.parametrize("run", RUNS)
def test_a_load_under_way_is_not_residency_in_l1(run: str) -> None:
    """C's chain needs the copy in L2 and the eviction; a claim of L1 alone would need L1."""
    c = from_l2(counted(bent(run, l1=ev.AtAttach.UNDER_WAY)))
    assert confirmed(c)
    story = Server(0, page=16, l1=96, l2=400, quiet=True)
    story.serve([("a", tuple(range(33)))])
    story.attach()
    story.serve([("b", (*range(32), 900))])
    (whole,) = verdicts(story.events)
    assert whole.sentence == "L1 read confirmed (resident at attach)"
    loading = [dataclasses.replace(e, l1=2) if isinstance(e, ev.ResidentNode) else e for e in story.events]
    (unsure,) = verdicts(counted(loading))
    assert not confirmed(unsure) and "missing link born" in unsure.sentence


def test_a_node_that_had_left_l1_before_is_confirmed_as_well() -> None:
    story = Server(0, page=16, l1=96, l2=400, quiet=True)
    story.serve([("a", tuple(range(33)))])
    story.serve([("fill", tuple(range(1000, 1096)))])
    story.attach()
    story.serve([("c", (*range(32), 901))])
    (c,) = verdicts(story.events)
    assert c.sentence == "L2 read confirmed (resident at attach)"
    left = next(link for r in c.ranges for link in r.links if link.link is Link.LEFT_L1)
    assert "not in L1 when kvwitness was attached" in left.detail


def with_flight(*extra: ev.Event) -> list[ev.Event]:
    """A story with events right behind the beginning of its snapshot."""
    story = Server(0, page=16, l1=192, l2=400, quiet=True)
    story.serve([("a", tuple(range(33)))])
    story.attach()
    story.serve([("b", (*range(32), 900))])
    at = next(i for i, e in enumerate(story.events) if isinstance(e, ev.SnapshotBegin)) + 1
    time = story.events[at].t_ns
    return list(
        renumbered([*story.events[:at], *(dataclasses.replace(e, t_ns=time) for e in extra), *story.events[at:]])
    )


def test_ends_of_copies_that_were_under_way_are_no_gap() -> None:
    flight = ev.InFlight(0, 0, 77, ev.Direction.D2H, 16, 1, (50,))
    load = ev.InFlight(0, 0, 78, ev.Direction.H2D, 16, 1, (51,))
    ends = (ev.BackupAcked(0, 0, 77, 50, -1), ev.LoadDone(0, 0, 78, 16, 16384, -1, (51,)))
    seen = judge([journal_of(with_flight(flight, load, *ends))])
    assert seen.instances[0].gaps == ()
    assert confirmed(seen.verdict("b"))
    unknown = judge([journal_of(with_flight(*ends))])
    assert len(unknown.instances[0].gaps) == 2


def test_a_launch_of_what_was_queued_unseen_is_no_gap_and_must_take_all_of_it() -> None:
    queued = ev.InFlight(0, 0, 0, ev.Direction.D2H, 32, 0, (50, 51))
    start = ev.TransferStarted(0, 0, 77, ev.Direction.D2H, 32, 32768, 0, (50, 51))
    acks = (ev.BackupAcked(0, 0, 77, 50, -1), ev.BackupAcked(0, 0, 77, 51, -1))
    assert judge([journal_of(with_flight(queued, start, *acks))]).instances[0].gaps == ()
    half = dataclasses.replace(start, nodes=(50,))
    assert judge([journal_of(with_flight(queued, half, acks[0]))]).instances[0].gaps


def test_a_request_that_was_waiting_is_judged() -> None:
    events = EVENTS["attach-0.5.17"]
    changed = [
        ev.WaitingAtAttach(e.seq, e.t_ns, e.req, e.prompt_tokens, 0) if isinstance(e, ev.Queued) else e for e in events
    ]
    rid = _rids(events)[-2]
    assert confirmed(next(v for v in verdicts(changed) if v.rid == rid))


# --- who recorded --------------------------------------------------------------------------------


def with_ranks(run: str, **ranks: int | None) -> list[ev.Event]:
    """The run as a server of more ranks would have recorded it."""
    changed: list[ev.Event] = []
    for event in EVENTS[run]:
        if isinstance(event, ev.Facts) and event.kind == ev.FactKind.INSTANCE:
            facts = json.loads(event.json)
            facts["ranks"] = {**facts["ranks"], **ranks}
            event = dataclasses.replace(event, json=json.dumps(facts))
        changed.append(event)
    return changed


@pytest.mark.parametrize("run", RUNS)
def test_a_tensor_parallel_rank_that_was_left_out_is_named_and_nothing_is_confirmed(run: str) -> None:
    verdict = from_l2(with_ranks(run, tp_size=2, tp_rank=0, attn_tp_size=2))
    assert verdict is not None and not confirmed(verdict)
    assert "1 of them were recorded, not tp 1" in verdict.sentence


@pytest.mark.parametrize("run", RUNS)
def test_a_replica_that_was_left_out_is_named_beside_what_the_other_served(run: str) -> None:
    """Which of them it is, is only said where the one that recorded says which it is."""
    verdict = from_l2(with_ranks(run, dp_size=2, dp_rank=1))
    assert confirmed(verdict) and verdict is not None
    assert "not recorded: dp 0, nor what it served" in verdict.notes
    unknown = from_l2(with_ranks(run, dp_size=2, dp_rank=None))
    assert confirmed(unknown) and unknown is not None and not [note for note in unknown.notes if "dp" in note]


@pytest.mark.parametrize("run", RUNS)
def test_how_long_the_process_stood_still_is_said(run: str) -> None:
    first = next(i for i, e in enumerate(EVENTS[run]) if isinstance(e, ev.Facts))
    about = json.dumps({"way": "live", "tool": "gdb 13.1", "stopped_us": 213_000})
    events = list(EVENTS[run])
    events[first:first] = [dataclasses.replace(EVENTS[run][first], kind=ev.FactKind.ATTACH, json=about)]  # type: ignore[call-arg]
    verdict = from_l2(renumbered(events))
    assert confirmed(verdict) and verdict is not None
    assert any("(gdb 13.1): it stood still for 0.21 s" in note for note in verdict.notes)
    assert not any("stood still" in note for note in from_l2(EVENTS[run]).notes)  # type: ignore[union-attr]
