"""What an instance says of itself: read as typed structs, or not at all."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import msgspec
import pytest
from journal_tools import ABC, renumbered

from kvwitness.collectors.journal import Journal, read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.ledger import described
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.ledger.described import Attach, Described
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import Grade

RECORDED = read_journal(ABC)


def test_the_structs_do_not_change_within_a_schema_version() -> None:
    """Facts recorded today must mean the same tomorrow: a change here needs a new SCHEMA, and a new list."""
    found = [
        f"{name} {field} {annotation}"
        for name, kind in inspect.getmembers(described, inspect.isclass)
        if issubclass(kind, msgspec.Struct) and kind.__module__ == described.__name__
        for field, annotation in kind.__annotations__.items()
    ]
    expected = Path(__file__).parent / f"described-{described.SCHEMA}.txt"
    assert found == expected.read_text().splitlines()


def recorded(*facts: tuple[int, str]) -> InstanceFacts:
    """The ledger of a journal of these facts."""
    return derive(_journal([ev.Facts(0, 0, kind, text) for kind, text in facts]))


def _journal(events: list[ev.Event]) -> Journal:
    return msgspec.structs.replace(RECORDED, events=renumbered(events))


def _with(kind: int, text: str) -> Journal:
    """The recorded run, with other facts of a kind."""
    return _journal(
        [
            ev.Facts(event.seq, event.t_ns, kind, text) if isinstance(event, ev.Facts) and event.kind == kind else event
            for event in RECORDED.events
        ]
    )


UNREADABLE = (
    "[]",
    "null",
    "1",
    '"x"',
    "{",
    '{"x": ' * 1500 + "1" + "}" * 1500,
    '{"x": ' * 40 + "1" + "}" * 40,
    '{"x": "\\ud800"}',
    '{"x\\ud800": 1}',
)
WRONG_TYPES = {
    ev.FactKind.COVERAGE: '{"hooks": [{"name": "a", "target": "b", "status": 1, "links": []}]}',
    ev.FactKind.INSTANCE: '{"ranks": {"tp_size": "2"}}',
    ev.FactKind.PROCESS: '{"role": "scheduler", "arguments": []}',
    ev.FactKind.ATTACH: '{"way": "live", "stopped_us": "long"}',
}
KINDS = (*WRONG_TYPES, ev.FactKind.PROFILE)


@pytest.mark.parametrize("text", UNREADABLE)
@pytest.mark.parametrize("kind", KINDS)
def test_facts_that_cannot_be_read_are_an_anomaly_and_count_as_not_recorded(kind: int, text: str) -> None:
    found = recorded((kind, text))
    assert (found.facts, found.hooks) == (Described(), ())
    (anomaly,) = found.anomalies
    assert anomaly.startswith("the facts in event 1 are not ") and ": " in anomaly


@pytest.mark.parametrize("kind", WRONG_TYPES)
def test_fields_of_another_type_are_an_anomaly_and_count_as_not_recorded(kind: int) -> None:
    found = recorded((kind, WRONG_TYPES[kind]))
    assert (found.facts, found.hooks, len(found.anomalies)) == (Described(), (), 1)


@pytest.mark.parametrize("text", (*UNREADABLE, *WRONG_TYPES.values()))
@pytest.mark.parametrize("kind", (ev.FactKind.COVERAGE, ev.FactKind.INSTANCE))
def test_without_readable_facts_nothing_is_confirmed(kind: int, text: str) -> None:
    verdicts = judge([_with(kind, text)]).verdicts
    assert verdicts and not {v.grade for v in verdicts} & {Grade.CONFIRMED, Grade.VERIFIED}


def test_what_cannot_be_read_leaves_what_was_said_before() -> None:
    said = json.dumps({"page_size": 16, "components": ["full"]})
    found = recorded((ev.FactKind.INSTANCE, said), (ev.FactKind.INSTANCE, '{"page_size": "64", "layers": 4}'))
    assert (found.facts.instance.page_size, found.facts.instance.layers) == (16, None)
    assert found.facts.shown == {"page_size": 16, "components": ["full"]}


def test_facts_are_shown_as_they_were_recorded_and_read_as_far_as_they_are_known() -> None:
    found = recorded(
        (ev.FactKind.INSTANCE, '{"page_size": 16, "new": {"a": 1}}'),
        (ev.FactKind.INSTANCE, '{"layers": 4}'),
        (ev.FactKind.PROCESS, '{"sglang": "0.5.23", "arguments": {"model_path": "m", "random_seed": 3}}'),
        (ev.FactKind.PROFILE, '{"calls": 2}'),
        (ev.FactKind.ATTACH, '{"way": "live", "stopped_us": 5}'),
        (ev.FactKind.ATTACH, '{"pause_us": 7}'),
    ).facts
    assert (found.instance.page_size, found.instance.layers, found.arguments.model_path) == (16, 4, "m")
    assert found.attach == Attach(way="live", stopped_us=5)
    assert found.shown == {
        "page_size": 16,
        "new": {"a": 1},
        "layers": 4,
        "process": {"sglang": "0.5.23", "arguments": {"model_path": "m", "random_seed": 3}},
        "profile": {"calls": 2},
        "attach": {"way": "live", "stopped_us": 5, "pause_us": 7},
    }


def test_a_hook_says_since_when_it_has_its_status() -> None:
    def coverage(*statuses: str) -> tuple[int, str]:
        hooks = [{"name": f"h{i}", "target": "t", "status": s, "links": []} for i, s in enumerate(statuses)]
        return ev.FactKind.COVERAGE, json.dumps({"hooks": hooks})

    found = recorded(
        coverage("installed", "installed", "pending"),
        coverage("installed", "failed", "installed"),
        coverage("installed", "installed", "installed"),
    )
    assert [(hook.status, hook.since) for hook in found.hooks] == [("installed", 1), ("installed", 3), ("installed", 2)]
