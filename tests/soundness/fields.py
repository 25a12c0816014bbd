"""Every field of every event, bent one at a time; every element of a tail and every leaf of a fact is a field as well.

A value becomes zero, one more, one less, the maximum of its type, what another object has in a field of that name, or
what the same object had before. A tail as a whole loses its last element, repeats it or is emptied; a leaf of a fact is
also left out, null, and of another type.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvwitness.patches.schema import events as ev
from kvwitness.patches.schema.format import RECORD_HEAD
from soundness.steps import Events, Step, told

Place = tuple[Any, ...]
"""Where a value is: the field, then the element of its tail and that element's field, or the way to a leaf of facts."""

RANGES = {"B": (0, 2**8 - 1), "b": (-(2**7), 2**7 - 1), "H": (0, 2**16 - 1), "I": (0, 2**32 - 1)}
RANGES |= {"Q": (0, 2**64 - 1), "q": (-(2**63), 2**63 - 1)}
TUPLES: dict[str, type[Any]] = {"path": ev.PathNode, "slots": ev.Run}
SAME = {"nodes[]": "node", "path[].node": "node", "best_node": "node", "device_node": "node", "parent": "node"}
SAME |= {"reqs[]": "req", "path[].start": "start", "path[].end": "end", "id": "req"}
"""Fields of other names that are the same kind of thing."""
IDENTITIES = ("req", "node", "transfer", "call", "slot", "id", "update")
ABSENT = object()


@dataclass(frozen=True)
class FieldChange:
    """Which event (its index in the record), which of its fields, and how it was bent."""

    index: int
    kind: str
    path: str
    """With the numbers of elements: ``path[2].end``, ``json.ranks.tp_size``."""
    mutator: str
    words: str = ""

    @property
    def field(self) -> str:
        """The field without the numbers of elements."""
        return re.sub(r"\[\d+\]", "[]", self.path)

    @property
    def step(self) -> Step:
        """As a step of a recipe."""
        return Step(self.kind, self.field, self.mutator, self.words[:260])


def single_field_mutants(
    events: Sequence[ev.Event], elements: int | None = None, only: Collection[int] | None = None
) -> Iterator[tuple[Events, FieldChange]]:
    """Every mutant of a record that differs from it in one field of one event.

    ``elements``: of a longer tail or list so many elements, spread over it. ``only``: events at these indices.
    """
    base = list(events)
    known = Values(base)
    for at, event in enumerate(base):
        if only is not None and at not in only:
            continue
        for place in places(event, elements):
            for mutator, bent in bent_values(known, at, place):
                mutant = base.copy()
                mutant[at] = bent
                yield mutant, change_of(event, at, place, mutator, bent)


def random_field(rng: random.Random, events: Events) -> Step | None:
    """One field of one event: every kind as often as every other, and every field of it."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index, each in enumerate(events):
        by_kind[type(each).__name__].append(index)
    at = rng.choice(by_kind[rng.choice(sorted(by_kind))])
    return bend_at(rng, events, at)


def bend_at(rng: random.Random, events: Events, at: int) -> Step | None:
    """One field of the event at this index, by one mutator."""
    event = events[at]
    by_name: dict[str, list[Place]] = defaultdict(list)
    for place in places(event):
        # Of what hooks there are, any leaf; else a field for what it is called.
        by_name[_name(place)].append(place)
    place = rng.choice(by_name[rng.choice(sorted(by_name))])
    found = list(bent_values(Values(events), at, place))
    if not found:
        return None
    mutator, bent = rng.choice(found)
    events[at] = bent
    return change_of(event, at, place, mutator, bent).step


@cache
def fields_of(kind: type[ev.Event]) -> tuple[str, ...]:
    """The names of an event's fields, those of a tail's elements with it (``path[].end``)."""
    found: list[str] = []
    for field in dataclasses.fields(kind):
        found.append(field.name)
        if field.name in TUPLES:
            found += [f"{field.name}[].{name}" for name in TUPLES[field.name]._fields]
        elif _is_tail(kind, field.name) and kind.READ_TAIL is not ev.Tail.read_text:
            found.append(f"{field.name}[]")
    return tuple(found)


def leaves_of(text: str) -> tuple[str, ...]:
    """The names of all that the JSON of a fact says, without the numbers of elements."""
    found = dict.fromkeys(
        re.sub(r"\[\d+\]", "[]", _dotted(place)) for place in _ways(json.loads(text), ("json",), None)
    )
    return tuple(found)


def change_of(event: ev.Event, at: int, place: Place, mutator: str, bent: ev.Event) -> FieldChange:
    """The change of ``event`` to ``bent``, in words as well."""
    words = f"{told(event)}: {_dotted(place)} becomes {_short(_get(bent, place))} ({mutator})"
    return FieldChange(at, type(event).__name__, _dotted(place), mutator, words)


# --- where values are --------------------------------------------------------------------------------


def places(event: ev.Event, elements: int | None = None) -> Iterator[Place]:
    """All of an event's fields, elements and leaves."""
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if isinstance(event, ev.Facts) and field.name == "json":
            yield from _ways(_parsed(value), ("json",), elements)
            continue
        yield (field.name,)
        if isinstance(value, tuple):
            for index in _spread(len(value), elements):
                if field.name in TUPLES:
                    yield from ((field.name, index, name) for name in TUPLES[field.name]._fields)
                else:
                    yield (field.name, index)


def _ways(value: Any, way: Place, elements: int | None) -> Iterator[Place]:
    if len(way) > 1 or not isinstance(value, dict | list):
        yield way
    if isinstance(value, dict):
        for name in value:
            yield from _ways(value[name], (*way, name), elements)
    elif isinstance(value, list):
        for index in _spread(len(value), elements):
            yield from _ways(value[index], (*way, index), elements)


def _spread(length: int, elements: int | None) -> Sequence[int]:
    if elements is None or length <= elements:
        return range(length)
    return sorted({round(i * (length - 1) / (elements - 1)) for i in range(elements)})


def _dotted(place: Place) -> str:
    return str(place[0]) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place[1:])


def _name(place: Place) -> str:
    return re.sub(r"\[\d+\]", "[]", _dotted(place))


def _is_tail(kind: type[ev.Event], name: str) -> bool:
    return kind.READ_TAIL is not None and dataclasses.fields(kind)[-1].name == name


def _parsed(text: str) -> Any:
    return json.loads(text)


def _get(event: ev.Event, place: Place) -> Any:
    value = getattr(event, place[0])
    if isinstance(event, ev.Facts) and place[0] == "json":
        value = _parsed(value)
    for step in place[1:]:
        if (isinstance(value, dict) and step not in value) or (isinstance(value, list) and step >= len(value)):
            return ABSENT
        value = getattr(value, step) if isinstance(value, ev.PathNode | ev.Run) else value[step]
    return value


def _set(event: ev.Event, place: Place, value: Any) -> ev.Event:
    if isinstance(event, ev.Facts) and place[0] == "json":
        return dataclasses.replace(event, json=json.dumps(_with(_parsed(event.json), place[1:], value)))
    if len(place) > 1:
        tail = list(getattr(event, place[0]))
        tail[place[1]] = tail[place[1]]._replace(**{place[2]: value}) if len(place) > 2 else value
        value = tuple(tail)
    return dataclasses.replace(event, **{place[0]: value})


def _with(facts: Any, way: Place, value: Any) -> Any:
    if not way:
        return value
    holder = facts
    for step in way[:-1]:
        holder = holder[step]
    if value is ABSENT:
        del holder[way[-1]]
    else:
        holder[way[-1]] = value
    return facts


def _short(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, bytes):
        return value.hex()
    return str(value)[:60]


# --- what they become --------------------------------------------------------------------------------


class Values:
    """What the fields of one name are in the whole record, and whose."""

    def __init__(self, events: Sequence[ev.Event]) -> None:
        self.events = events
        self._by_name: dict[tuple[str, ...], list[tuple[int, Any]]] = {}
        self._owners = [_owners(event) for event in events]

    def anothers(self, at: int, place: Place, value: Any) -> Any:
        """The nearest other value of a field of that name that is of another object; ABSENT: there is none."""
        mine = self._owners[at]
        others = [(abs(i - at), i, v) for i, v in self._named(at, place) if i != at and v != value]
        for _, index, found in sorted(others, key=lambda each: each[:2]):
            if not mine & self._owners[index]:
                return found
        return others[0][2] if others else ABSENT

    def earlier(self, at: int, place: Place, value: Any) -> Any:
        """The last other value that the same object had before; ABSENT: there is none."""
        mine = self._owners[at]
        for index, found in reversed(self._named(at, place)):
            if index < at and found != value and mine & self._owners[index]:
                return found
        return ABSENT

    def _named(self, at: int, place: Place) -> list[tuple[int, Any]]:
        event = self.events[at]
        name = _name(place)
        if isinstance(event, ev.Facts) and place[0] == "json":
            key: tuple[str, ...] = ("json", str(event.kind), str(place[-1]))
        else:
            key = (SAME.get(name, name),)
        if key not in self._by_name:
            self._by_name[key] = list(self._search(key))
        return self._by_name[key]

    def _search(self, key: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
        for index, event in enumerate(self.events):
            if key[0] == "json":
                if isinstance(event, ev.Facts) and str(event.kind) == key[1]:
                    ways = _ways(_parsed(event.json), ("json",), None)
                    yield from ((index, _get(event, way)) for way in ways if str(way[-1]) == key[2])
                continue
            for name in fields_of(type(event)):
                if SAME.get(name, name) != key[0]:
                    continue
                field, _, rest = name.partition("[]")
                value = getattr(event, field)
                if rest:
                    yield from ((index, getattr(each, rest[1:])) for each in value)
                elif name.endswith("[]"):
                    yield from ((index, each) for each in value)
                else:
                    yield index, value


def _owners(event: ev.Event) -> frozenset[tuple[str, Any]]:
    if isinstance(event, ev.Facts):
        return frozenset({("facts", event.kind)})
    found = {(SAME.get(n, n), getattr(event, n)) for n in IDENTITIES if getattr(event, n, None)}
    nodes = getattr(event, "nodes", ())
    found |= {("node", number) for number in (nodes if isinstance(nodes, tuple) else ())}
    return frozenset(found or {("kind", type(event).__name__)})


def bent_values(known: Values, at: int, place: Place) -> Iterator[tuple[str, ev.Event]]:
    """The event with every other value that the field is tried with, each value once."""
    event = known.events[at]
    value = _get(event, place)
    seen = {repr(value)}
    for mutator, new in _candidates(known, at, place, value):
        if repr(new) not in seen:
            seen.add(repr(new))
            yield mutator, _set(event, place, new)


def _candidates(known: Values, at: int, place: Place, value: Any) -> Iterator[tuple[str, Any]]:
    event = known.events[at]
    if isinstance(event, ev.Facts) and place[0] == "json":
        yield from _leaf(place, value)
    elif isinstance(value, tuple) and len(place) == 1:
        yield "empty", ()
        yield "one more", (*value, *value[-1:])
        yield "one less", value[:-1]
        yield "turned round", value[::-1]
    elif isinstance(value, int):
        low, high = _range(type(event), place)
        yield "zero", 0
        yield from (
            (name, new) for name, new in (("one more", value + 1), ("one less", value - 1)) if low <= new <= high
        )
        yield "maximum", high
    elif isinstance(value, bytes):
        number, bits = int.from_bytes(value, "big"), 8 * len(value)
        yield "zero", bytes(len(value))
        yield "one more", ((number + 1) % 2**bits).to_bytes(len(value), "big")
        yield "one less", ((number - 1) % 2**bits).to_bytes(len(value), "big")
        yield "maximum", b"\xff" * len(value)
    else:
        yield from _text(value)
    for mutator, new in (("another's", known.anothers(at, place, value)), ("earlier", known.earlier(at, place, value))):
        # Fields of one name can be of two types: how many nodes there are, and which.
        alike = isinstance(event, ev.Facts) or (type(new) is type(value) and _fits(type(event), place, new))
        if new is not ABSENT and alike:
            yield mutator, new


def _leaf(place: Place, value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case bool():
            yield "one more", not value
        case int() | float():
            yield from (("zero", 0), ("one more", value + 1), ("one less", value - 1), ("maximum", 2**63 - 1))
        case str():
            yield from _text(value)
        case None:
            yield from (("zero", 0), ("one more", 1), ("maximum", "x"))
        case dict() | list():
            yield "empty", type(value)()
            if isinstance(value, list) and value:
                yield "one more", [*value, value[-1]]
                yield "one less", value[:-1]
    if len(place) > 1:
        yield "absent", ABSENT
        yield "null", None
        yield "another type", 0 if isinstance(value, str | dict | list) else "x"


def _text(value: str) -> Iterator[tuple[str, str]]:
    yield from (("zero", ""), ("one more", value + "x"), ("one less", value[:-1]), ("maximum", "x" * 300))


@cache
def _formats(kind: type[ev.Event]) -> dict[str, str]:
    layout = kind.PACK.format.removeprefix(RECORD_HEAD)
    names = [field.name for field in dataclasses.fields(kind)[2:]]
    return {"seq": "Q", "t_ns": "Q", **dict(zip(names, layout, strict=False))}


def _range(kind: type[ev.Event], place: Place) -> tuple[int, int]:
    """Of a field of the record's head, or an element of a tail."""
    return RANGES[_formats(kind).get(place[0], "q") if len(place) == 1 else "q"]


def _fits(kind: type[ev.Event], place: Place, value: Any) -> bool:
    if not isinstance(value, int):
        return True
    low, high = _range(kind, place)
    return low <= value <= high
