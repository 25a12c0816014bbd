"""Everything that was recorded, and a fixed sample of the search for false confirmations (whole: make soundness)."""

from __future__ import annotations

from pathlib import Path

import pytest

from soundness.compare import compare_recording
from soundness.judged import limited
from soundness.search import Conditions, search
from soundness.verdicts import TESTS, read, recordings

MUTANTS = 2_000
RECORDINGS = dict(recordings([TESTS]))


@pytest.mark.parametrize("name", RECORDINGS)
def test_what_was_recorded_is_judged_alike(name: str) -> None:
    """All ranks of a recording together; both say the same of it, and it is not nothing."""
    outcome = compare_recording([read(Path(path)) for path in RECORDINGS[name]])
    assert outcome.false == ()
    assert outcome.agreed


@pytest.mark.parametrize("part", range(6))
def test_nothing_is_confirmed_that_the_events_do_not_establish(part: int) -> None:
    tally = search(range(part, MUTANTS, 6), seed=1, conditions=Conditions(limited=limited))
    assert tally.false == [] and tally.broken == []
    assert tally.agreed > tally.mutants, "a sample that confirms nothing shows nothing"
