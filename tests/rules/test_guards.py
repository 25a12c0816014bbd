"""Every guard of the model: a record that breaks it, and that nothing but this guard names the break."""

from __future__ import annotations

import json

import pytest

from kvwitness.tracer.rules.model import MODEL
from rules.cases import KEPT, broken, kept, record, records

GUARDS = [rule.name for rule in MODEL.guards]
CASES = kept()


@pytest.mark.parametrize("guard", GUARDS)
def test_guard(guard: str) -> None:
    """The record breaks the guard; without the guard nothing says so."""
    events = CASES[guard].made()
    assert guard in broken(events)
    assert guard not in broken(events, MODEL.without(guard))


def test_no_case_is_of_a_guard_that_is_gone() -> None:
    assert sorted(json.loads(KEPT.read_text("utf-8"))) == sorted(GUARDS)


@pytest.mark.parametrize("name", records())
def test_a_healthy_record_breaks_none(name: str) -> None:
    assert broken(record(name)) == set()
