"""Reference answers and the file that they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwitness.tracer.protocol.quality import BadReference, Kind, Reference, check_reference, compare
from kvwitness.tracer.protocol.questions import BadQuestions, parse_questions, read_questions


def long_enough(answer: str) -> bool:
    return len(answer) > 3


def raises(answer: str) -> bool:
    raise RuntimeError("no")


HERE = f"{__name__}"


@pytest.mark.parametrize(
    ("kind", "value", "answer", "right"),
    [
        (Kind.EXACT, "Paris", " Paris\n", True),
        (Kind.EXACT, "Paris", "paris", False),
        (Kind.CONTAINS, "paris", "It is PARIS.", True),
        (Kind.CONTAINS, "Paris", "It is London.", False),
        (Kind.REGEX, r"\b4\d\b", "about 42 or so", True),
        (Kind.REGEX, r"^42$", "about 42", False),
        (Kind.NUMERIC, "1200", "That makes 1,200 in all.", True),
        (Kind.NUMERIC, "42", "first 42, then 43", False),
        (Kind.NUMERIC, "42", "none", False),
        (Kind.NUMERIC, "-0.5", "-5e-1", True),
        (Kind.CUSTOM, f"{HERE}:long_enough", "long answer", True),
        (Kind.CUSTOM, f"{HERE}:long_enough", "no", False),
        (Kind.CUSTOM, f"{HERE}:raises", "anything", False),
    ],
)
def test_answers(kind: Kind, value: str, answer: str, right: bool) -> None:
    why = compare(Reference(kind, value), answer)
    assert (why is None) is right
    assert why is None or "\n" not in why


def test_a_tolerance_is_absolute() -> None:
    assert compare(Reference(Kind.NUMERIC, "3.14", 0.01), "3.149") is None
    assert compare(Reference(Kind.NUMERIC, "3.14", 0.001), "3.149") == "expected 3.14, found 3.149"


@pytest.mark.parametrize(
    ("kind", "value"),
    [(Kind.REGEX, "("), (Kind.NUMERIC, "many"), (Kind.CUSTOM, "nowhere"), (Kind.CUSTOM, "no.such.module:f")],
)
def test_references_that_cannot_be_used(kind: Kind, value: str) -> None:
    with pytest.raises(BadReference):
        check_reference(Reference(kind, value))


def test_a_file_of_questions(tmp_path: Path) -> None:
    path = tmp_path / "q.yaml"
    path.write_text("questions:\n  - ask: one?\n    numeric: 3\n    tolerance: 0.5\n  - two?\n")
    found = read_questions(path)
    assert found.known[0].reference == Reference(Kind.NUMERIC, "3", 0.5)
    assert (found.of_a(0).ask, found.of_b(0).ask, found.of_a(2).ask) == ("one?", "two?", "one?")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "no list `questions`"),
        ({"questions": []}, "no list of questions"),
        ({"questions": ["one?"]}, "B needs another question"),
        ({"questions": [{"ask": " "}]}, "questions[0] has no text"),
        ({"questions": [{"ask": "x", "exactly": "y"}]}, "questions[0] has 'exactly'"),
        ({"questions": [{"ask": "x", "exact": "y", "regex": "z"}]}, "more than one reference"),
        ({"questions": [{"ask": "x", "exact": ["y"]}]}, "no text and no number"),
        ({"questions": [{"ask": "x", "numeric": 1, "tolerance": -1}]}, "tolerance"),
        ({"questions": [{"ask": "x", "regex": "("}]}, "no regular expression"),
        ({"questions": ["x"], "new_questions": ["y"], "else": 1}, "'else'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(found: object, said: str) -> None:
    with pytest.raises(BadQuestions) as error:
        parse_questions(found)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadQuestions, match="cannot be read"):
        read_questions(tmp_path / "nothing")
    (tmp_path / "q").write_text("a: [")
    with pytest.raises(BadQuestions, match="no YAML"):
        read_questions(tmp_path / "q")
