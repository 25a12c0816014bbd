"""Runs recorded on real older releases: the verdicts, and that they rest on what they name.

Each was made on the CPU stand: warm-up, A, B (same prefix), four other prompts that push the prefix out of
L1, C (the prompt of A), C again. ``data/`` holds one journal per release and tree family.

The stand does not run 0.4.6 and 0.4.8 by itself: theirs were made in its environment of 0.4.9, with the imports of
triton's cache folders, the pinned memory and the page kernels of these releases taken out by hand.
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
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Link, RequestVerdict, Tier

DATA = Path(__file__).parent / "data"
RUNS = sorted(path.name.removesuffix(".kvwj.xz") for path in DATA.glob("*.kvwj.xz"))
PREFIX, PROMPT = 1488, 1503


@cache
def recorded(run: str) -> tuple[ev.Event, ...]:
    raw = lzma.decompress((DATA / f"{run}.kvwj.xz").read_bytes())
    return tuple(parse_journal(raw, "scheduler-1-1.kvwj").events)


def verdicts(events: Sequence[ev.Event]) -> list[RequestVerdict]:
    """About A, B, C and C again."""
    return [v for v in judge([journal_of(events)]).verdicts if v.prompt_tokens == PROMPT]


@pytest.mark.parametrize("run", RUNS)
def test_a_is_recomputed_b_read_from_l1_c_from_l2(run: str) -> None:
    a, b, c, c2 = verdicts(recorded(run))
    assert [v.sentence for v in (a, b, c, c2)] == [
        "recomputed",
        "L1 read confirmed",
        "L2 read confirmed",
        "L1 read confirmed",
    ]
    assert (b.tokens.l1, b.tokens.recomputed) == (PREFIX, PROMPT - PREFIX)
    assert (c.tokens.l2, c.tokens.l1, c.tokens.recomputed) == (PREFIX, 0, PROMPT - PREFIX)
    assert all(check.agrees is not False for v in (a, b, c, c2) for check in v.checks)


@pytest.mark.parametrize("run", RUNS)
def test_the_run_left_no_failure_and_no_hole(run: str) -> None:
    (facts,) = judge([journal_of(recorded(run))]).instances
    assert facts.hook_failures == {} and facts.gaps == () and facts.anomalies == ()
    assert f"-{facts.facts.instance.family}" == run[run.rindex("-") :]


@pytest.mark.parametrize("run", RUNS)
def test_every_event_that_cs_claim_names_is_needed(run: str) -> None:
    events = recorded(run)
    c = verdicts(events)[2]
    named = {r.seq for x in c.ranges if x.tier is Tier.L2 for link in x.links for r in link.events}
    assert len(named) >= 8
    for seq in sorted(named):
        rest = [v for v in verdicts(renumbered(e for e in events if e.seq != seq)) if v.rid == c.rid]
        if rest and rest[0].grade is Grade.CONFIRMED:
            # A second insert of the same prefix says the same.
            assert isinstance(events[seq - 1], ev.Inserted), events[seq - 1]


@pytest.mark.parametrize("run", RUNS)
def test_a_copy_that_left_a_layer_out_takes_the_claim(run: str) -> None:
    events = recorded(run)
    (facts,) = judge([journal_of(events)]).instances
    said = facts.facts.instance
    assert said.bytes_per_token is not None and said.layers is not None
    layer = said.bytes_per_token * PREFIX // said.layers
    bent = [
        dataclasses.replace(e, bytes=e.bytes - layer)
        if isinstance(e, ev.LoadDone) or (isinstance(e, ev.TransferStarted) and e.direction == ev.Direction.H2D)
        else e
        for e in events
    ]
    c = verdicts(bent)[2]
    assert c.grade is not Grade.CONFIRMED
    assert Link.READ in {link.link for r in c.ranges for link in r.missing}
