"""A fixed sample of the search for false confirmations (the whole search: make soundness)."""

from __future__ import annotations

from pathlib import Path

import pytest
from journal_tools import FIXTURES

from kvwitness.collectors.journal import read_journal
from soundness.compare import compare
from soundness.judged import limited
from soundness.search import Conditions, search

MUTANTS = 2_600


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.kvwj")), ids=lambda path: path.stem)
def test_what_was_recorded_is_judged_alike(path: Path) -> None:
    outcome = compare(list(read_journal(path).events))
    assert outcome.false == ()
    assert outcome.agreed


@pytest.mark.parametrize("part", range(6))
def test_nothing_is_confirmed_that_the_events_do_not_establish(part: int) -> None:
    tally = search(range(part, MUTANTS, 6), seed=1, conditions=Conditions(limited=limited))
    assert tally.false == [] and tally.broken == []
    assert tally.agreed > tally.mutants, "a sample that confirms nothing shows nothing"
