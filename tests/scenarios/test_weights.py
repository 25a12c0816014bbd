"""T12: what was computed by other weights is read as ever, and the sentence says by which.

A real SGLang 0.5.23 with storage attached: p is computed; the weights are changed with a flush, and p is read from L3;
q is computed; the first weights come back without a flush, and q is found in L1; a third change fails.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from journal_tools import journal_of, renumbered
from soundness import sources
from soundness.compare import compare
from soundness.simulate import Habits, simulated
from soundness.verdicts import read

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Reason, RequestVerdict, Tier

RECORDED = list(read(sources.DIGESTED / "weights" / "disk-0.5.23-rust.kvwj.xz").events)


def verdict_of(events: list[ev.Event], rid: str) -> RequestVerdict:
    assert compare(events).false == ()
    verdict = judge([journal_of(events)]).verdict(rid)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    ("rid", "tier", "before", "now"),
    [("p-from-l3", Tier.L3, 0, 1), ("q-from-l1", Tier.L1, 1, 2), ("q-again", Tier.L1, 1, 3)],
)
def test_t12_the_tier_stays_and_both_weights_are_named(rid: str, tier: Tier, before: int, now: int) -> None:
    verdict = verdict_of(RECORDED, rid)
    assert (verdict.tier, verdict.grade, verdict.reason) == (tier, Grade.CONFIRMED, Reason.OTHER_WEIGHTS)
    assert verdict.sentence == (
        f"{tier.value} read confirmed (computed by other weights: version {before}, the request ran with version {now})"
    )
    assert [note.split(" ", 3)[:3] for note in verdict.notes if note.startswith("other_weights")]


def test_the_notes_say_how_the_weights_came_and_whether_the_cache_was_kept() -> None:
    (flushed,) = [note for note in verdict_of(RECORDED, "p-from-l3").notes if note.startswith("other_weights")]
    assert "version 1 of the weights (second) came from disk" in flushed and "the cache was to be emptied" in flushed
    notes = [note for note in verdict_of(RECORDED, "q-again").notes if note.startswith("other_weights")]
    assert "the cache was kept" in notes[0] and "SGLang says that it failed" in notes[1]


@pytest.mark.parametrize("rid", ["p", "q"])
def test_what_its_own_weights_computed_says_nothing_of_weights(rid: str) -> None:
    verdict = verdict_of(RECORDED, rid)
    assert verdict.reason is Reason.RECOMPUTED and "weights" not in verdict.sentence


def test_an_adapter_is_no_change_of_the_model_s_weights() -> None:
    events = [
        dataclasses.replace(e, kind=ev.WeightsKind.LORA_LOADED) if isinstance(e, ev.WeightsUpdated) else e
        for e in RECORDED
    ]
    assert verdict_of(events, "q-from-l1").reason is Reason.L1_HIT


def test_a_missing_change_is_noticed_by_its_number() -> None:
    first = next(e for e in RECORDED if isinstance(e, ev.WeightsUpdated))
    events = renumbered([e for e in RECORDED if e is not first])
    (facts,) = judge([journal_of(events)]).instances
    assert any("the first change of the weights that was recorded is change 2" in text for _, _, text in facts.gaps)


@pytest.mark.parametrize("seed", range(24))
def test_the_simulator_s_truth_about_weights(seed: int) -> None:
    """Said where other weights computed what was reused, and nowhere else."""
    server = simulated(seed, habits=Habits(weights=True), stored=seed % 3 == 0)
    verdicts = [v for v in judge([journal_of(server.events)]).verdicts if v.finished]
    last = {truth.rid: truth for truth in server.truths}
    uses = Counter(verdict.rid for verdict in verdicts)
    for verdict in (v for v in verdicts if uses[v.rid] == 1):
        proven = all(r.grade is Grade.CONFIRMED for r in verdict.ranges if r.tier is not Tier.RECOMPUTED)
        truth = last.get(verdict.rid)
        if truth is None or not proven or verdict.tier is Tier.RECOMPUTED:
            continue
        unknown = any("is not known" in note for note in verdict.notes)
        said = any(r.reason is Reason.OTHER_WEIGHTS for r in verdict.ranges)
        assert said == bool(truth.others) or unknown, (verdict.rid, verdict.sentence, truth)
