"""What a rule is: a named predicate about a subject that yields why it refuses, and a list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

S = TypeVar("S")
Why = tuple[Any, ...]
"""Why it is refused (in words, or another list's refusal), and the events."""


class Refusal(NamedTuple):
    """A rule's no."""

    rule: str
    why: str
    events: tuple[int, ...]

    def __str__(self) -> str:
        numbers = f" (events {', '.join(map(str, self.events))})" if self.events else ""
        return f"{self.why}{numbers} [{self.rule}]"


class Rules(Generic[S]):
    """A list of rules about one kind of thing."""

    def __init__(self, about: str) -> None:
        self.about = about
        self.all: list[Callable[[S], Iterator[Why]]] = []

    def __call__(self, predicate: Callable[[S], Iterator[Why]]) -> Callable[[S], Iterator[Why]]:
        self.all.append(predicate)
        return predicate

    def refusal(self, subject: S) -> Refusal | None:
        """The first no."""
        for predicate in self.all:
            for why, *events in predicate(subject):
                if isinstance(why, Refusal):
                    return why._replace(rule=f"{predicate.__name__}: {why.rule}")
                return Refusal(predicate.__name__, why, tuple(sorted({e.seq for e in events if e is not None})))
        return None


class At(NamedTuple):
    """An event that is known by its number alone."""

    seq: int
