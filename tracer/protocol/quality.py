"""Is an answer right? References from the user's questions, and how answers are held against them.

A run that is faster and wrong is wrong, whichever tier served it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

import msgspec

_NUMBER: Final = re.compile(r"[-+]?(?:\d+(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
_SHOWN: Final = 80


class Kind(StrEnum):
    """How an answer is compared.

    ``exact``: the whole answer, but for space around it. ``contains``: somewhere in it, whatever the case.
    ``regex``: found somewhere in it. ``numeric``: the last number in it, within ``tolerance``. ``custom``: a function
    of the user's, ``module:function``, called with the answer, that returns whether it is right.
    """

    EXACT = "exact"
    CONTAINS = "contains"
    REGEX = "regex"
    NUMERIC = "numeric"
    CUSTOM = "custom"


class Reference(msgspec.Struct, frozen=True):
    """What an answer should be."""

    kind: Kind
    value: str
    tolerance: float = 0.0
    """Of a number, absolute."""


class BadReference(ValueError):
    """A reference that no answer can be held against; the message is one line."""


def check_reference(reference: Reference) -> None:
    """Raise :class:`BadReference` for one that cannot be used, before anything is sent."""
    if reference.kind is Kind.REGEX:
        try:
            re.compile(reference.value)
        except re.error as error:
            raise BadReference(f"{reference.value!r} is no regular expression: {error}") from error
    elif reference.kind is Kind.NUMERIC and _numbers(reference.value) == []:
        raise BadReference(f"{reference.value!r} is no number")
    elif reference.kind is Kind.CUSTOM:
        load_function(reference.value)


def load_function(name: str) -> Callable[[str], Any]:
    """The function ``module:function``. Raises :class:`BadReference`."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise BadReference(f"{name!r} does not name a function as module:function")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of the user's may fail in any way when it is imported
        raise BadReference(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise BadReference(f"{name} is no function")
    return found  # type: ignore[no-any-return]


def compare(reference: Reference, answer: str) -> str | None:
    """Why ``answer`` is wrong, in one line; None when it is right. A custom function that fails makes it wrong."""
    value = reference.value
    if reference.kind is Kind.EXACT:
        return None if answer.strip() == value.strip() else f"expected {_short(value)}, found {_short(answer)}"
    if reference.kind is Kind.CONTAINS:
        return None if value.casefold() in answer.casefold() else f"{_short(value)} is not in it"
    if reference.kind is Kind.REGEX:
        return None if re.search(value, answer) else f"nothing in it matches {_short(value)}"
    if reference.kind is Kind.NUMERIC:
        return _number(reference, answer)
    return _custom(value, answer)


def _number(reference: Reference, answer: str) -> str | None:
    wanted, found = _numbers(reference.value), _numbers(answer)
    if not found:
        return f"expected {reference.value}, found no number"
    if abs(found[-1] - wanted[-1]) <= reference.tolerance:
        return None
    return f"expected {reference.value}, found {found[-1]:g}"


def _numbers(text: str) -> list[float]:
    return [float(one.replace(",", "")) for one in _NUMBER.findall(text) if any(char.isdigit() for char in one)]


def _custom(name: str, answer: str) -> str | None:
    try:
        right = load_function(name)(answer)
    except Exception as error:  # the user's own code: whatever it raises must not end the run
        return f"{name} failed: {type(error).__name__}: {error}"
    return None if right else f"{name} says no"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= _SHOWN else line[:_SHOWN] + "...")
