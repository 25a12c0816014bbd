"""Every guard of the model: a record that breaks it, and that nothing but this guard names the break."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
from soundness.mutate import renumber

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.rules.model import MODEL
from rules.cases import Events, broken, kept, record, records

GUARDS = [rule.name for rule in MODEL.guards]
CASES = kept()


def with_failures(*counts: int, hook: str = "tree.insert") -> Events:
    """A hook failed, and failed again."""
    events = list(record("plain/0"))
    told = [ev.Text(0, 0, 99, hook), *(ev.HookFailed(0, 0, 99, count, "ValueError") for count in counts)]
    return after(events, 6, *told)


def taken_back() -> Events:
    """Its pages have another size than before."""
    events = list(record("plain/0"))
    at, told = next(
        (at, e) for at, e in enumerate(events) if isinstance(e, ev.Facts) and e.kind == ev.FactKind.INSTANCE
    )
    other = json.dumps({**json.loads(told.json), "page_size": 64})
    return after(events, at + 1, dataclasses.replace(told, json=other))


def resident_and_under_way() -> Events:
    """A node that was found in the host pool is found to be on its way there."""
    events = list(record("attached/0"))
    at, node = next((at, e.node) for at, e in enumerate(events) if isinstance(e, ev.ResidentNode) and e.l2)
    return after(events, at + 1, ev.InFlight(0, 0, 0, ev.Direction.D2H, 40, 0, (node,)))


def after(events: Events, at: int, *more: ev.Event) -> Events:
    events[at:at] = [dataclasses.replace(each, t_ns=events[at - 1].t_ns) for each in more]
    renumber(events)
    return events


BUILT: dict[str, Callable[[], Events]] = {
    "Facts: are not taken back": taken_back,
    "HookFailed: count is possible": lambda: with_failures(0),
    "HookFailed: counts upwards": lambda: with_failures(2, 2),
    "HookFailed: names a hook": lambda: with_failures(1, hook="no.hook"),
    "InFlight: moves what is not resident yet": resident_and_under_way,
}
"""Of what is in no recording."""


@pytest.mark.parametrize("guard", GUARDS)
def test_guard(guard: str) -> None:
    """The record breaks the guard; without the guard nothing says so."""
    events = BUILT[guard]() if guard in BUILT else CASES[guard].made()
    assert guard in broken(events)
    assert guard not in broken(events, MODEL.without(guard))


def test_a_hook_that_fails_again_contradicts_nothing() -> None:
    assert broken(with_failures(1, 2, 3)) == set()


def test_no_case_is_of_a_guard_that_is_gone() -> None:
    assert sorted([*CASES, *BUILT]) == sorted(GUARDS)


@pytest.mark.parametrize("name", records())
def test_a_healthy_record_breaks_none(name: str) -> None:
    assert broken(record(name)) == set()
