"""Questions of the user's own, from a YAML file::

questions:                       # asked by A, and by C again
  - ask: What is the capital of France?
    contains: Paris              # or exact, regex, numeric (with tolerance), custom (module:function)
new_questions:                   # asked by B; left out: the next of the questions
  - ask: And of Spain?
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from kvwitness.tracer.protocol.quality import BadReference, Kind, Reference, check_reference

_KEYS: Final = frozenset({"ask", "tolerance", *Kind})


class BadQuestions(ValueError):
    """The file cannot be used; the message says where and why, in one line."""


class Question(msgspec.Struct, frozen=True):
    """One question, and what the answer should be (None: not known)."""

    ask: str
    reference: Reference | None = None


class Questions(msgspec.Struct, frozen=True):
    """What A and C ask, and what B asks. Neither is empty."""

    known: tuple[Question, ...]
    new: tuple[Question, ...]

    def of_a(self, number: int) -> Question:
        """The question of A in round ``number``."""
        return self.known[number % len(self.known)]

    def of_b(self, number: int) -> Question:
        """The question of B in round ``number``, another one than that of A."""
        return self.new[number % len(self.new)]


def read_questions(path: Path) -> Questions:
    """Read the file at ``path``. Raises :class:`BadQuestions`."""
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadQuestions(f"it cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise BadQuestions(f"it is no YAML: {' '.join(str(error).split())}") from error
    return parse_questions(found)


def parse_questions(found: Any) -> Questions:
    """The questions in what a YAML file holds. Raises :class:`BadQuestions`."""
    if not isinstance(found, dict) or "questions" not in found:
        raise BadQuestions("it has no list `questions`")
    if unknown := found.keys() - {"questions", "new_questions"}:
        raise BadQuestions(
            f"it has {sorted(map(str, unknown))[0]!r}, and only `questions` and `new_questions` are known"
        )
    known = _list("questions", found["questions"])
    if "new_questions" in found:
        return Questions(known, _list("new_questions", found["new_questions"]))
    if len(known) < 2:
        raise BadQuestions("B needs another question than A: add a second one, or `new_questions`")
    return Questions(known, (*known[1:], known[0]))


def _list(name: str, found: Any) -> tuple[Question, ...]:
    if not isinstance(found, list) or not found:
        raise BadQuestions(f"`{name}` is no list of questions")
    return tuple(_question(f"{name}[{number}]", one) for number, one in enumerate(found))


def _question(where: str, found: Any) -> Question:
    if isinstance(found, str):
        found = {"ask": found}
    if not isinstance(found, dict) or not isinstance(found.get("ask"), str) or not found["ask"].strip():
        raise BadQuestions(f"{where} has no text under `ask`")
    if unknown := found.keys() - _KEYS:
        raise BadQuestions(
            f"{where} has {sorted(map(str, unknown))[0]!r}, which is not one of {', '.join(sorted(_KEYS))}"
        )
    kinds = [kind for kind in Kind if kind.value in found]
    if len(kinds) > 1:
        raise BadQuestions(f"{where} has more than one reference: {', '.join(kinds)}")
    if not kinds:
        return Question(found["ask"])
    value, tolerance = found[kinds[0].value], found.get("tolerance", 0)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadQuestions(f"{where}.{kinds[0]} is no text and no number")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or tolerance < 0:
        raise BadQuestions(f"{where}.tolerance is no number from 0 on")
    reference = Reference(kinds[0], str(value), float(tolerance))
    try:
        check_reference(reference)
    except BadReference as error:
        raise BadQuestions(f"{where}: {error}") from error
    return Question(found["ask"], reference)
