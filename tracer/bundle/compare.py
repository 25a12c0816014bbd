"""Find the first difference between the verdicts in a bundle and those that its evidence gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvwitness.tracer.model import RequestVerdict

_SHOWN = 80


class Difference(msgspec.Struct, frozen=True):
    """``field`` of request ``rid``: what the bundle says and what its journals say."""

    rid: str
    field: str
    stored: str
    derived: str

    def __str__(self) -> str:
        return f"request {self.rid}, {self.field}: the bundle says {self.stored}, its journals say {self.derived}"


def first_difference(stored: Sequence[RequestVerdict], derived: Sequence[RequestVerdict]) -> Difference | None:
    """The first difference in the order of the stored verdicts; None when there is none."""
    for one, other in zip(stored, derived, strict=False):
        if one != other:
            return _within(one, other)
    if len(stored) > len(derived):
        return Difference(stored[len(derived)].rid, "the verdict", "there is one", "there is none")
    if len(derived) > len(stored):
        return Difference(derived[len(stored)].rid, "the verdict", "there is none", "there is one")
    return None


def _within(stored: RequestVerdict, derived: RequestVerdict) -> Difference:
    place = _first(msgspec.to_builtins(stored), msgspec.to_builtins(derived), "")
    field, one, other = place if place is not None else ("the verdict", stored, derived)
    return Difference(stored.rid, field, _shown(one), _shown(other))


def _first(one: Any, other: Any, place: str) -> tuple[str, Any, Any] | None:
    """Place and values of the first difference between two trees of plain values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            found = _first(one.get(key), other.get(key), f"{place}.{key}" if place else str(key))
            if found is not None:
                return found
        return None
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            found = _first(left, right, f"{place}[{index}]")
            if found is not None:
                return found
        return None if len(one) == len(other) else (f"number of {place}", len(one), len(other))
    return None if one == other else (place, one, other)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
