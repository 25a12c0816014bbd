"""The tool itself, on a package of one module: a change that its test notices, one that it misses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="make mutants installs it")

from mutants.changes import changes_of, make

RUN = Path(__file__).with_name("run.py")
CODE = """
def most(numbers):
    found = 0
    for number in numbers:
        if number > found:
            found = number
    return found
"""
SETTINGS = """
[code]
paths = ["small"]
[tests]
paths = ["tests"]
[tree]
leave-out = ["build", "__pycache__"]
"""
TEST = """
from small.code import most


def test_most():
    assert most([2, 3, 3, 1]) == 3
"""
EXPLAINED = """
[[change]]
file = "small/code.py"
function = "most"
line = "if number > found:"
becomes = "if number >= found:"
why = "Two equal numbers are the same number."
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The checkout of a small package."""
    for name, text in {
        "small/__init__.py": "",
        "small/code.py": CODE,
        "tests/test_code.py": TEST,
        "settings.toml": SETTINGS,
        "explained.toml": "",
        "pytest.ini": "[pytest]\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def mutants(root: Path, *more: str) -> subprocess.CompletedProcess[str]:
    options = ["--root", root, "--settings", root / "settings.toml", "--explain", root / "explained.toml", *more]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, str(RUN), *map(str, options)], capture_output=True, text=True, env=environment, check=False
    )


def test_what_the_test_misses_is_shown_and_what_it_notices_is_counted(small: Path) -> None:
    ran = mutants(small)
    assert ran.returncode == 1, ran.stderr
    assert "small/code.py:5 most\n  - if number > found:\n  + if number >= found:\n" in ran.stdout
    assert "small/code.py:5 noticed by tests/test_code.py::test_most" in ran.stdout
    assert (small / "small" / "code.py").read_text("utf-8") == CODE


def test_a_second_run_judges_nothing_again_until_the_code_is_another(small: Path) -> None:
    first = mutants(small)
    second = mutants(small)
    assert "[1/" in first.stdout
    assert "[1/" not in second.stdout
    assert second.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    assert second.returncode == first.returncode
    (small / "tests" / "test_code.py").write_text(TEST + "    assert most([]) == 0\n", "utf-8")
    assert "[1/" in mutants(small).stdout


def test_an_explained_survivor_is_not_held_against_the_tests(small: Path) -> None:
    (small / "tests" / "test_code.py").write_text(
        TEST + "    assert most([]) == 0\n    assert most([1]) == 1\n    assert most([-1]) == 0\n", "utf-8"
    )
    (small / "explained.toml").write_text(EXPLAINED, "utf-8")
    ran = mutants(small)
    assert "changes nothing: Two equal numbers are the same number." in ran.stdout
    assert ran.returncode == 0, ran.stdout


def test_an_explanation_of_a_line_that_is_gone_is_named(small: Path) -> None:
    (small / "explained.toml").write_text(EXPLAINED.replace("number > found", "number > best"), "utf-8")
    assert "Explained, and no longer there: small/code.py most" in mutants(small).stdout


def test_a_change_that_never_ends_is_noticed(small: Path) -> None:
    (small / "small" / "code.py").write_text(
        "def count(end):\n    at = 0\n    while at != end:\n        at += 1\n    return at\n", "utf-8"
    )
    (small / "tests" / "test_code.py").write_text(
        "import pytest\nfrom small.code import count\n\n\n@pytest.mark.timeout(1)\n"
        "def test_count():\n    assert count(2) == 2\n",
        "utf-8",
    )
    ran = mutants(small, "--count", "1000")
    endless = "small/code.py:4 noticed by tests/test_code.py::test_count"
    assert endless in ran.stdout
    assert "noticed (0 by a timeout)" not in ran.stdout


def test_nothing_is_judged_by_tests_that_fail_on_unchanged_code(small: Path) -> None:
    (small / "tests" / "test_code.py").write_text(TEST.replace("== 3", "== 4"), "utf-8")
    ran = mutants(small)
    assert ran.returncode == 2
    assert "The tests fail on unchanged code: tests/test_code.py::test_most" in ran.stderr


def becomes(text: str) -> set[str]:
    """All that the tool makes of a text of one line."""
    return {make(change, text).becomes.replace("  ", " ") for change in changes_of("code.py", text)}


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("a = b < c\n", {"a = b <= c", "a = b >= c"}),
        ("a = b == c\n", {"a = b != c", "a = b <= c", "a = b >= c"}),
        ("a = b == Tier.L1\n", {"a = b != Tier.L1"}),
        ("a = b is None\n", {"a = b is not None"}),
        ("a = b in c\n", {"a = b not in c"}),
        ("a = b not in c\n", {"a = b in c"}),
        ("a = b and not c\n", {"a = b or not c", "a = b and c"}),
        ("a = min(b, c)\n", {"a = max(b, c)"}),
        ("a += b\n", {"a -= b"}),
        ("a = b + c\n", {"a = b - c"}),
        ("a = True\n", {"a = False"}),
        ("a = [b for b in c if b.d]\n", {"a = [b for b in c if not (b.d)]"}),
        ("if a: return b\n", {"if not (a): return b", "if False: return b"}),
        ("class A(B, frozen=True): pass\n", set()),
        ("@c(frozen=True)\ndef a(): pass\n", set()),
        ("a = f'{b + c} of them'\n", set()),
        ("a = zip(b, c, strict=True)\n", set()),
    ],
)
def test_every_kind_of_change(text: str, changed: set[str]) -> None:
    assert becomes(text) == changed
