"""How rules are declared, and how those of one event type become one function.

A *guard* says what must hold before an event; it reads the state and the event and changes nothing. Where it does not
hold, the record contradicts itself: the guard names the place. An *effect* says what holds after the event. Both run in
the order in which they are declared, for a guard may speak of what an earlier effect has taken in.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from kvwitness.patches.schema.events import Event
from kvwitness.tracer.ledger.facts import Contradiction, Moment
from kvwitness.tracer.ledger.state import FOREVER, State

E = TypeVar("E", bound=Event)


class Broken(msgspec.Struct, frozen=True):
    """Why a guard does not hold, and since which event (None: the one before) until which (None: this one)."""

    text: str
    since: int | None = None
    until: int | None = None


Check = Callable[[State, E], "Broken | str | None"]
Apply = Callable[[State, E, Moment], None]


@dataclass(frozen=True)
class Rule:
    """One guard or effect of one event type."""

    kind: type[Event]
    name: str
    says: str
    """In words, for people: what must hold, or what holds from then on."""
    run: Callable[..., Any]
    guard: bool
    reads: frozenset[str]
    """The fields of the event that it reads."""
    content: bool = False
    """A guard of what the digests of pages rest on, and no other claim."""


class Rules:
    """Declared rules, in their order."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.all: list[Rule] = list(rules)

    def guard(
        self, kind: type[E], name: str, also: str = "", *, content: bool = False
    ) -> Callable[[Check[E]], Check[E]]:
        """Declare what must hold before events of a type. The docstring is the rule; ``name`` is unique.

        ``also``: fields that it reads beside those that its own source names. ``content``: nothing but the comparison
        of pages rests on it.
        """

        def declare(check: Check[E]) -> Check[E]:
            self._add(kind, name, check, True, also, content)
            return check

        return declare

    def effect(self, kind: type[E], also: str = "") -> Callable[[Apply[E]], Apply[E]]:
        """Declare what holds after events of a type. The docstring says it."""

        def declare(apply: Apply[E]) -> Apply[E]:
            self._add(kind, apply.__name__.strip("_").replace("_", " "), apply, False, also)
            return apply

        return declare

    def within(self, kind: type[Event], low: int, high: int | None, *names: str) -> None:
        """Declare a guard for each of these fields: a number from ``low`` to ``high`` (None: any)."""
        for name in names:
            self._add(kind, f"{name} is possible", _possible(kind, name, low, high), True, name)

    def _add(
        self, kind: type[Event], name: str, run: Callable[..., Any], guard: bool, also: str, content: bool = False
    ) -> None:
        full = f"{kind.__name__}: {name}"
        if any(rule.name == full for rule in self.all):
            raise ValueError(f"two rules are called {full!r}")
        says = inspect.getdoc(run)
        if not says:
            raise ValueError(f"{full} does not say what it demands")
        names = frozenset(field.name for field in fields(kind)[2:])
        found = names & (fields_read(run, 1) | frozenset(also.split()))
        self.all.append(Rule(kind, full, " ".join(says.split()), run, guard, found, content))

    def joined(self, *others: Rules) -> Rules:
        """All of these rules."""
        return Rules([*self.all, *(rule for other in others for rule in other.all)])

    def without(self, name: str) -> Rules:
        """The rules but one: for tests that a guard is needed."""
        left = [rule for rule in self.all if rule.name != name]
        if len(left) == len(self.all):
            raise KeyError(name)
        return Rules(left)

    @property
    def guards(self) -> tuple[Rule, ...]:
        """Those that can be broken."""
        return tuple(rule for rule in self.all if rule.guard)

    @cached_property
    def step(self) -> dict[type[Event], Callable[[State, Any, Moment], None]]:
        """One function for each event type."""
        kinds = dict.fromkeys(rule.kind for rule in self.all)
        return {kind: _compiled([rule for rule in self.all if rule.kind is kind]) for kind in kinds}


def _compiled(rules: Sequence[Rule]) -> Callable[[State, Any, Moment], None]:
    """The rules of one event type as one function: its text is written out, so that no loop runs for each event."""
    lines: list[str] = []
    names: dict[str, Any] = {"contradicted": _contradicted}
    for number, rule in enumerate(rules):
        names[f"run{number}"], names[f"name{number}"] = rule.run, rule.name
        if rule.guard:
            lines.append(f"broken = run{number}(state, event)")
            lines.append(f"if broken is not None: contradicted(state, event, name{number}, broken, {rule.content})")
        else:
            lines.append(f"run{number}(state, event, moment)")
    exec("def step(state, event, moment):\n" + textwrap.indent("\n".join(lines), "    "), names)
    step: Callable[[State, Any, Moment], None] = names["step"]
    return step


def _contradicted(state: State, event: Event, rule: str, broken: Broken | str, content: bool) -> None:
    if isinstance(broken, str):
        broken = Broken(broken)
    since = state.before if broken.since is None else broken.since
    until = event.seq if broken.until is None else broken.until
    state.contradictions.append(Contradiction(rule, since, until, broken.text, content))
    number = getattr(event, "req", 0)
    request = state.request(number) if number and not content else None
    if request is not None:
        # What is recorded of it cannot all be true: nothing rests on any of it.
        request.wrong = request.wrong or broken.text


def _possible(kind: type[Event], name: str, low: int, high: int | None) -> Check[Any]:
    def check(_: State, event: Event) -> str | None:
        value = getattr(event, name)
        if value >= low and (high is None or value <= high):
            return None
        return f"{kind.__name__} says {name} {value}"

    check.__doc__ = f"``{name}`` is at least {low}" + ("." if high is None else f" and at most {high}.")
    return check


def always(text: str, since: int = 0) -> Broken:
    """From this event on to the record's end: what was told is used all the time."""
    return Broken(text, since, FOREVER)


def fields_read(function: Callable[..., Any], parameter: int) -> frozenset[str]:
    """The attributes that a function's source reads of one of its parameters, also of a part of it that it looks at."""
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source).body[0]
    if not isinstance(tree, ast.FunctionDef):
        return frozenset()
    arguments = tree.args.args
    if len(arguments) <= parameter:
        return frozenset()
    return frozenset(_attributes(tree, arguments[parameter].arg))


def _attributes(tree: ast.AST, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
            yield node.attr
