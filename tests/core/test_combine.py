"""One request id in several journals: ranks of one server, replicas, and servers that came one after the other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import msgspec
from journal_tools import ABC

from kvwitness.collectors.journal import Journal, read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, RequestVerdict

RECORDED = read_journal(ABC)
C = "a30c069e"


def rank_of(pid: int, started_s: int = 0, **ranks: Any) -> Journal:
    """The recorded journal as another process wrote it."""
    events = tuple(_with_ranks(event, ranks) for event in RECORDED.events)
    return msgspec.structs.replace(
        RECORDED,
        events=events,
        pid=pid,
        instance=f"scheduler-{pid}-{started_s}",
        wall_ns=RECORDED.wall_ns + started_s * 10**9,
    )


def _with_ranks(event: ev.Event, ranks: Mapping[str, Any]) -> ev.Event:
    if not isinstance(event, ev.Facts) or event.kind != ev.FactKind.INSTANCE:
        return event
    facts = json.loads(event.json)
    facts["ranks"] = {**facts.get("ranks", {}), **ranks}
    return dataclasses.replace(event, json=json.dumps(facts))


def verdicts(*journals: Journal) -> list[RequestVerdict]:
    return [verdict for verdict in judge(journals).verdicts if verdict.rid.startswith(C)]


def test_an_id_used_again_after_a_restart_is_of_two_requests() -> None:
    found = verdicts(rank_of(10), rank_of(20, started_s=60))
    assert [verdict.grade for verdict in found] == [Grade.CONFIRMED, Grade.CONFIRMED]
    assert len({verdict.instance for verdict in found}) == 2


def test_an_id_used_on_two_data_parallel_ranks_is_of_two_requests() -> None:
    found = verdicts(rank_of(10, dp_size=2, dp_rank=0), rank_of(20, dp_size=2, dp_rank=1))
    assert [verdict.sentence for verdict in found] == ["L2 read confirmed"] * 2


def test_both_tensor_parallel_ranks_make_one_verdict() -> None:
    both = {"tp_size": 2, "attn_tp_size": 2}
    (found,) = verdicts(rank_of(10, tp_rank=0, attn_tp_rank=0, **both), rank_of(20, tp_rank=1, attn_tp_rank=1, **both))
    assert found.sentence == "L2 read confirmed"


def test_two_journals_of_one_rank_do_not_stand_for_two_ranks() -> None:
    first = {"tp_size": 2, "attn_tp_size": 2, "tp_rank": 0, "attn_tp_rank": 0}
    for other in (rank_of(10, started_s=60, **first), rank_of(20, started_s=60, **first)):
        for found in verdicts(rank_of(10, **first), other):
            assert found.grade is Grade.REPORTED
            assert "2 ranks, 1 of them were recorded, not tp 1" in found.sentence
