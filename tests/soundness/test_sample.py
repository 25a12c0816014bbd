"""A fixed sample of mutated journals: the product never confirms what an independent checker refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from journal_tools import FIXTURES

from kvwitness.collectors.journal import read_journal
from soundness.compare import compare
from soundness.run import search


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.kvwj")), ids=lambda path: path.stem)
def test_what_was_recorded_is_judged_alike(path: Path) -> None:
    outcome = compare(list(read_journal(path).events))
    assert outcome.false == ()
    assert outcome.agreed


def test_no_mutant_is_wrongly_confirmed() -> None:
    tally = search(range(400), seed=1)
    assert tally.agreed > 400, "the sample still holds reads that are confirmed"
    assert tally.false == []
