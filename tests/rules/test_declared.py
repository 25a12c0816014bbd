"""The declaration itself: every rule in words, every field read or free, and the page that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.facts import Moment
from kvwitness.tracer.ledger.state import FOREVER, State
from kvwitness.tracer.rules.declare import Broken, Rules, always
from kvwitness.tracer.rules.fields import Field, event_fields, fact_fields
from kvwitness.tracer.rules.model import MODEL
from kvwitness.tracer.rules.page import page

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
FIELDS = [*event_fields(MODEL), *fact_fields()]


def test_the_page_is_made_from_the_declaration() -> None:
    assert PAGE.read_text("utf-8") == page(MODEL), "make rules"


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"{field.owner}.{field.name}")
def test_a_field_is_read_or_declared_free(field: Field) -> None:
    assert bool(field.guards or field.effects) != bool(field.free)


NEVER_FREE = (
    "slot",
    "node",
    "start",
    "end",
    "token",
    "length",
    "req",
    "digest",
    "grid",
    "position",
    "transfer",
    "call",
)


@pytest.mark.parametrize("field", [f for f in FIELDS if f.free], ids=lambda field: f"{field.owner}.{field.name}")
def test_what_identifies_or_measures_is_never_free(field: Field) -> None:
    assert (
        field.owner == "HttpRequest" or not any(word in field.name for word in NEVER_FREE) or "threshold" in field.name
    )


def test_every_event_of_the_cache_has_rules() -> None:
    without = {kind.__name__ for kind in ev.REGISTRY.values()} - {rule.kind.__name__ for rule in MODEL.all}
    assert without == {"HttpRequest"}


def test_a_rule_says_what_it_demands_and_has_a_name_of_its_own() -> None:
    rules = Rules()

    def silent(s: State, e: ev.Reset) -> None: ...

    with pytest.raises(ValueError, match="does not say"):
        rules.guard(ev.Reset, "silent")(silent)

    @rules.guard(ev.Reset, "known kind")
    def known(s: State, e: ev.Reset) -> str | None:
        """A kind."""
        return "kind" if e.kind else None

    with pytest.raises(ValueError, match="two rules"):
        rules.guard(ev.Reset, "known kind")(known)
    assert [rule.reads for rule in rules.all] == [{"kind"}]


def test_guards_and_effects_run_in_their_order_and_a_break_has_a_place() -> None:
    rules, told = Rules(), list[str]()

    @rules.guard(ev.Reset, "first")
    def first(s: State, e: ev.Reset) -> Broken:
        """Breaks from the start on."""
        told.append("guard")
        return always("broken for ever")

    @rules.effect(ev.Reset)
    def second(s: State, e: ev.Reset, m: Moment) -> None:
        """Happens all the same."""
        told.append("effect")

    @rules.guard(ev.Reset, "third")
    def third(s: State, e: ev.Reset) -> str:
        """Breaks here."""
        told.append("guard again")
        return "broken here"

    state = State()
    state.before = 4
    rules.step[ev.Reset](state, ev.Reset(5, 0, 1), Moment(5, 0, "Reset"))
    assert told == ["guard", "effect", "guard again"]
    found = [(c.rule, c.first, c.last, c.text) for c in state.contradictions]
    assert found == [("Reset: first", 0, FOREVER, "broken for ever"), ("Reset: third", 4, 5, "broken here")]
    with pytest.raises(KeyError):
        rules.without("Reset: fourth")
