"""Runs of a hybrid model (short convolutions and full attention) on HiMambaRadixCache.

Each was made on the CPU stand: warm-up, a first turn, the next turn (it reads the first from L1), four other
prompts that push both out of L1, the next turn again (from L2), and again (from L1).
"""

from __future__ import annotations

import dataclasses
import lzma
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from journal_tools import journal_of, renumbered

from kvwitness.collectors.journal import parse_journal
from kvwitness.patches.contract import HIMAMBA
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, RequestVerdict, Tier

DATA = Path(__file__).parent / "data" / "hybrid"
RUNS = sorted(path.name.removesuffix(".kvwj.xz") for path in DATA.glob("*.kvwj.xz"))
TURN, PREFIX = 1511, 1507
SCOPE = "(full-attention KV only, not mamba)"


@cache
def recorded(run: str) -> tuple[ev.Event, ...]:
    raw = lzma.decompress((DATA / f"{run}.kvwj.xz").read_bytes())
    return tuple(parse_journal(raw, "scheduler-1-1.kvwj").events)


def turns(events: Sequence[ev.Event]) -> list[RequestVerdict]:
    return [v for v in judge([journal_of(events)]).verdicts if v.prompt_tokens == TURN]


@pytest.mark.parametrize("run", RUNS)
def test_reads_are_confirmed_for_full_attention_kv_and_say_so(run: str) -> None:
    events = recorded(run)
    first, again, third = turns(events)
    assert [v.sentence for v in (first, again, third)] == [
        f"L1 read confirmed {SCOPE}",
        f"L2 read confirmed {SCOPE}",
        f"L1 read confirmed {SCOPE}",
    ]
    assert (first.tokens.l1, again.tokens.l2, third.tokens.l1) == (PREFIX, PREFIX, PREFIX)
    assert all("not judged" in v.notes[-1] for v in (first, again, third))
    others = [v for v in judge([journal_of(events)]).verdicts if v.prompt_tokens != TURN]
    assert {(v.sentence, v.notes) for v in others} == {("recomputed", ())}


@pytest.mark.parametrize("run", RUNS)
def test_the_run_left_no_failure_and_no_hole(run: str) -> None:
    (facts,) = judge([journal_of(recorded(run))]).instances
    assert facts.hook_failures == {} and facts.gaps == () and facts.anomalies == ()
    assert (facts.facts.instance.family, facts.facts.instance.tree_class) == (HIMAMBA, "HiMambaRadixCache")
    assert [pool.name for pool in facts.facts.instance.pools] == ["kv", "mamba"]


@pytest.mark.parametrize("run", RUNS)
def test_every_event_that_the_l2_read_names_is_needed(run: str) -> None:
    events = recorded(run)
    again = turns(events)[1]
    named = {r.seq for x in again.ranges if x.tier is Tier.L2 for link in x.links for r in link.events}
    assert len(named) >= 8
    for seq in sorted(named):
        left = [v for v in turns(renumbered(e for e in events if e.seq != seq)) if v.rid == again.rid]
        if left and left[0].grade is Grade.CONFIRMED:
            # A second insert of the same prefix says the same.
            assert isinstance(events[seq - 1], ev.Inserted), events[seq - 1]


@pytest.mark.parametrize("run", RUNS)
def test_kv_that_was_not_copied_whole_takes_the_claim(run: str) -> None:
    """The bytes are those of the anchor pool: what the state pool moved does not make up for them."""
    bent = [
        dataclasses.replace(e, bytes=e.bytes // 2)
        if isinstance(e, ev.LoadDone) or (isinstance(e, ev.TransferStarted) and e.direction == ev.Direction.H2D)
        else e
        for e in recorded(run)
    ]
    again = turns(bent)[1]
    assert again.grade is not Grade.CONFIRMED and SCOPE not in again.sentence


def test_a_state_that_came_back_from_l2_keeps_an_l1_read_from_being_confirmed() -> None:
    """Few slots for states: at the third turn the KV was in L1 and its state in L2 only.

    SGLang 0.5.12 counts the state as one token of L2.
    """
    raw = lzma.decompress((DATA.parent / "hybrid-states" / "0.5.12.post1-himamba.kvwj.xz").read_bytes())
    events = tuple(parse_journal(raw, "scheduler-1-1.kvwj").events)
    judgement = judge([journal_of(events)])
    (facts,) = judgement.instances
    assert facts.hook_failures == {} and facts.gaps == () and facts.anomalies == ()
    _, again, third = (v for v in judgement.verdicts if v.prompt_tokens == 311)
    matched = [e for e in events if isinstance(e, ev.Matched) and e.mamba_host]
    assert [(m.device, m.host) for m in matched] == [(307, 0)]
    assert again.tokens.l1 == 307 and again.grade is Grade.REPORTED and "host 1" in again.sentence
    assert third.sentence == f"L1 read confirmed {SCOPE}"
    # The state's way back is no transfer of KV; its eviction took KV along.
    assert not [e for e in events if isinstance(e, ev.TransferStarted) and e.direction == ev.Direction.H2D]
    evictions = [e for e in events if isinstance(e, ev.EvictBegin)]
    assert evictions and all(e.asked == 0 and e.asked_mamba for e in evictions)
    assert [e for e in events if isinstance(e, ev.EvictedL1)]
