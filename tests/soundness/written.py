"""Mutants as files: what was found is judged again from them, event by event as the mutators left it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvwitness.patches.schema import events as ev
from soundness.fields import TUPLES

KINDS = {kind.__name__: kind for kind in ev.REGISTRY.values()}


@dataclass(frozen=True)
class Mutant:
    """Journals, what they were made of, and how."""

    name: str
    recipe: tuple[str, ...]
    journals: tuple[list[ev.Event], ...]
    claim: str
    nothing: bool = False
    """Whether anything at all may be claimed from them."""


def write(path: Path, mutant: Mutant) -> None:
    """One JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = dataclasses.asdict(dataclasses.replace(mutant, journals=()))
    told["journals"] = [[_plain(event) for event in events] for events in mutant.journals]
    path.write_text(json.dumps(told), "utf-8")


def read(path: Path) -> Mutant:
    """What :func:`write` wrote."""
    told = json.loads(path.read_text("utf-8"))
    journals = tuple([_event(each) for each in events] for events in told["journals"])
    return Mutant(told["name"], tuple(told["recipe"]), journals, told["claim"], told["nothing"])


def _plain(event: ev.Event) -> list[Any]:
    values = [getattr(event, field.name) for field in dataclasses.fields(event)]
    return [type(event).__name__, *(_as_hex(value) for value in values)]


def _as_hex(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], bytes):
        return {"hex": [each.hex() for each in value]}
    return value


def _event(plain: Sequence[Any]) -> ev.Event:
    kind = KINDS[plain[0]]
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(*(_value(name, value) for name, value in zip(names, plain[1:], strict=True)))


def _value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(bytes.fromhex(each) for each in value["hex"])
    if not isinstance(value, list):
        return value
    if name in TUPLES:
        return tuple(TUPLES[name](*each) for each in value)
    return tuple(value)
