"""Which journals are ranks of one server, and which of their requests are the same: what does not belong together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
from journal_tools import ABC, renumbered

from kvwitness.collectors.journal import Gap, Journal, read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Reason, RequestVerdict

RECORDED = read_journal(ABC)
TEXTS = {event.id: event.text for event in RECORDED.events if isinstance(event, ev.Text)}
WARM, WARM2, A, B, *FILLS, C, C2 = [TEXTS[event.req] for event in RECORDED.events if isinstance(event, ev.Queued)]
"""The ids of the recorded requests, in their order. B and C2 read the same prefix from L1, C from L2."""

OF_A_REQUEST = (
    ev.Queued,
    ev.Matched,
    ev.LoadBackDecided,
    ev.Admission,
    ev.Prefill,
    ev.PrefillDone,
    ev.Released,
)
PROCESS = ev.FactKind.PROCESS
INSTANCE = ev.FactKind.INSTANCE


def rank(
    tp: int,
    *,
    size: int = 2,
    pid: int = 0,
    begun_s: float = 0,
    process: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    instance: Mapping[str, Any] | None = None,
    ids: Mapping[str, str] | None = None,
    without: Iterable[str] = (),
) -> Journal:
    """The recorded run as tensor-parallel rank ``tp`` would have written it.

    ``ids``: requests under other ids; ``without``: requests that it did not record.
    """
    ranks = {"tp_size": size, "attn_tp_size": size, "tp_rank": tp, "attn_tp_rank": tp}
    left_out = {number for number, text in TEXTS.items() if text in without}
    events: list[ev.Event] = []
    for event in RECORDED.events:
        if isinstance(event, OF_A_REQUEST) and event.req in left_out:
            continue
        if isinstance(event, ev.Text) and ids and event.text in ids:
            event = dataclasses.replace(event, text=ids[event.text])
        if isinstance(event, ev.Facts) and event.kind in (PROCESS, INSTANCE):
            said = json.loads(event.json)
            if event.kind == INSTANCE:
                said |= {"ranks": said["ranks"] | ranks} | dict(instance or {})
            else:
                said |= {"arguments": said["arguments"] | dict(arguments or {})} | dict(process or {})
            event = dataclasses.replace(event, json=json.dumps(said))
        events.append(event)
    pid = pid or 100 + tp
    return msgspec.structs.replace(
        RECORDED,
        events=renumbered(events),
        pid=pid,
        instance=f"scheduler-{pid}-{begun_s}",
        wall_ns=RECORDED.wall_ns + int(begun_s * 10**9),
    )


def of(rid: str, *journals: Journal) -> list[RequestVerdict]:
    return [verdict for verdict in judge(journals).verdicts if verdict.rid == rid]


def sentences(rid: str, *journals: Journal) -> list[str]:
    return [verdict.sentence for verdict in of(rid, *journals)]


def inconclusive(*journals: Journal) -> str:
    """That nothing is confirmed: why C is not, in words."""
    verdicts = judge(journals).verdicts
    assert not {v.grade for v in verdicts} & {Grade.CONFIRMED, Grade.VERIFIED, Grade.RECOMPUTED}
    found = {v.sentence for v in verdicts if v.rid == C}
    assert {v.reason for v in verdicts if v.rid == C} == {Reason.INCONCLUSIVE}
    return " ".join(sorted(found))


START = {"start": "s1", "host": "h", "key": "k"}


@pytest.mark.parametrize("process", [{}, START], ids=["before start ids", "with start ids"])
def test_the_ranks_of_one_start_are_one_group(process: Mapping[str, str]) -> None:
    assert sentences(C, rank(0, process=process), rank(1, process=process)) == ["L2 read confirmed"]
    assert sentences(C, rank(0, process=process), rank(1, process=process, begun_s=30)) == ["L2 read confirmed"]


def test_a_journal_that_is_there_twice_counts_once() -> None:
    assert sentences(C, rank(0), rank(1), rank(0)) == ["L2 read confirmed"]
    alone = rank(0, size=1)
    assert len(judge([alone, alone]).verdicts) == len(judge([alone]).verdicts)


# --- T05: ranks of different servers ---------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"process": START | {"start": "s2"}},
        {"process": START | {"start": "s2", "sglang": "0.5.22"}, "arguments": {"model_path": "another"}},
        # Before its restart, also under the same process number.
        {"process": START | {"start": "s0"}, "begun_s": -600},
        {"process": START | {"start": "s0"}, "begun_s": -600, "pid": 100},
        # One of the two recorded before start ids existed.
        {},
    ],
)
def test_ranks_of_different_starts_are_no_group(other: dict[str, Any]) -> None:
    why = inconclusive(rank(0, process=START), rank(1, **other))
    assert "not tp 0" in why and "not tp 1" in why


@pytest.mark.parametrize(
    "other",
    [
        {"process": {"host": "another"}},
        {"process": {"sglang": "0.5.22"}},
        {"arguments": {"model_path": "another"}},
        {"arguments": {"random_seed": 7}},
        {"instance": {"load_back_threshold": 99}},
        {"instance": {"write_policy": "write_back"}},
        {"size": 4},
        {"begun_s": 121},
        {"begun_s": -600, "pid": 100},
    ],
)
def test_journals_from_before_start_ids_are_of_different_starts_where_anything_differs(other: dict[str, Any]) -> None:
    why = inconclusive(rank(0), rank(1, **other))
    assert "not tp 0" in why and "not tp 1" in why


def test_ranks_that_are_not_alike_are_no_group() -> None:
    assert "different keys" in inconclusive(rank(0, process=START), rank(1, process=START | {"key": "k2"}))
    assert "not of the same size" in inconclusive(rank(0), rank(1, instance={"host_tokens": 1}))
    inconclusive(rank(0, process=START), rank(1, process=START, size=4))


@pytest.mark.parametrize("process", [{}, START], ids=["before start ids", "with start ids"])
def test_a_place_that_is_taken_twice_leaves_no_group(process: Mapping[str, str]) -> None:
    twice = rank(1, process=process, pid=200, begun_s=10)
    assert "several journals of tp 1" in inconclusive(rank(0, process=process), rank(1, process=process), twice)
    # The one rank of a server needs no other.
    alone = [rank(0, size=1, process=process, pid=pid, begun_s=pid) for pid in (1, 2)]
    assert sentences(C, *alone) == ["L2 read confirmed"] * 2


def test_journals_that_begin_one_after_the_other_are_not_all_of_one_start() -> None:
    why = inconclusive(*(rank(i, size=3, begun_s=100 * i) for i in range(3)))
    assert "too far apart" in why


def test_two_starts_are_two_groups() -> None:
    first = [rank(tp, process=START, pid=10 + tp) for tp in (0, 1)]
    second = [rank(tp, process=START | {"start": "s2"}, pid=10 + tp, begun_s=60) for tp in (0, 1)]
    old = [rank(tp, pid=10 + tp, begun_s=900) for tp in (0, 1)]
    assert sentences(C, first[0], second[1], first[1], second[0], *old) == ["L2 read confirmed"] * 3


def test_who_was_left_out_is_said_of_each_server() -> None:
    notes = [verdict.notes for verdict in of(C, rank(0, process=START), rank(1, process=START | {"start": "s2"}))]
    assert [[note for note in each if "not recorded" in note] for each in notes] == [
        ["not recorded: tp 1, nor what it served"],
        ["not recorded: tp 0, nor what it served"],
    ]


# --- T04: an id that is used again -----------------------------------------------------------------


TWICE = {C2: B}
"""B's id is used again for C2, which reads as many tokens from the same tier."""


@pytest.mark.parametrize("process", [{}, START], ids=["before start ids", "with start ids"])
def test_an_id_that_both_ranks_recorded_twice_is_of_two_requests(process: Mapping[str, str]) -> None:
    both = rank(0, process=process, ids=TWICE), rank(1, process=process, ids=TWICE)
    assert sentences(B, *both) == ["L1 read confirmed"] * 2


@pytest.mark.parametrize("lacking", [0, 1])
def test_the_use_that_one_rank_did_not_record_is_the_one_that_is_not_confirmed(lacking: int) -> None:
    whole = {tp: rank(tp, ids=TWICE, without=(B,) if tp == lacking else ()) for tp in (0, 1)}
    first, second = sorted(of(B, *whole.values()), key=lambda verdict: verdict.queued_ns or 0)
    assert (first.grade, first.reason) == (Grade.REPORTED, Reason.INCONCLUSIVE)
    assert f"not tp {lacking}" in first.sentence
    assert second.sentence == "L1 read confirmed"


def test_where_the_order_leaves_a_choice_none_is_made() -> None:
    """Between two requests that both ranks know one recorded the id twice, the other once."""
    again = {C: "x", C2: "x"}
    verdicts = of("x", rank(0, ids=again), rank(1, ids=again, without=(C,)))
    assert {verdict.reason for verdict in verdicts} == {Reason.INCONCLUSIVE}
    assert not {verdict.grade for verdict in verdicts} & {Grade.CONFIRMED, Grade.RECOMPUTED}
    assert any("not clear" in verdict.sentence for verdict in verdicts)


def test_an_id_that_was_used_again_is_not_clear_across_a_hole() -> None:
    """A request can be missing in it."""
    one, other = rank(0, ids=TWICE), rank(1, ids=TWICE)
    at = next(e.seq for e in other.events if isinstance(e, ev.Released) and TEXTS[e.req] == B) + 1
    first, _ = of(B, one, msgspec.structs.replace(other, gaps=(Gap(at, at, "lost"),)))
    assert first.reason is Reason.INCONCLUSIVE and "not clear" in first.sentence


def test_requests_that_cross_are_not_the_same() -> None:
    crossed = {B: C2, C2: B}
    for rid in (B, C2):
        (found,) = of(rid, rank(0), rank(1, ids=crossed))
        assert found.grade is Grade.REPORTED and found.reason is Reason.INCONCLUSIVE


def test_the_same_id_with_another_prompt_is_not_the_same_request() -> None:
    changed = rank(1)
    events = [
        dataclasses.replace(event, digests=tuple(bytes(byte ^ 1 for byte in digest) for digest in event.digests))
        if isinstance(event, ev.PrefixDigests | ev.PrefixPoint)
        else event
        for event in changed.events
    ]
    (found,) = of(C, rank(0), msgspec.structs.replace(changed, events=events))
    assert found.reason is Reason.INCONCLUSIVE and "different prompts" in found.sentence


def test_the_same_id_at_another_time_is_not_the_same_request() -> None:
    later = rank(1, process=START, begun_s=600)
    (found,) = of(C, rank(0, process=START), later)
    assert found.reason is Reason.INCONCLUSIVE and "the same time" in found.sentence
