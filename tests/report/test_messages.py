"""Every text is there in every language, with the same placeholders, and the page uses no other."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

import kvwitness.tracer.report as package
from kvwitness.tracer.model import Grade, Link, RangeVerdict, Reason, Tier
from kvwitness.tracer.report.breakeven import Standing as Sweep
from kvwitness.tracer.report.control import ControlStanding
from kvwitness.tracer.report.messages import LANGUAGES, words_for
from kvwitness.tracer.report.outcome import Cause
from kvwitness.tracer.report.page import SECTIONS
from kvwitness.tracer.report.wording import remedy_in, sentence_in
from kvwitness.tracer.verdicts.links import REMEDY
from kvwitness.tracer.verdicts.sentences import sentence

FOLDER = Path(package.__path__[0])
ENGLISH = words_for("en")
NAMED = re.compile(r"""(?:words|\bt)\(\s*["']([a-z0-9_.]+)["']""")
CHOSEN = re.compile(r'"([a-z_]+\.[a-z0-9_]+)" if|else t?\(?"([a-z_]+\.[a-z0-9_]+)"')
CONTROL_WITHOUT_LINE = (ControlStanding.ABSENT, ControlStanding.RECOMPUTED)
WORKED_OUT = {
    *(f"grade.{grade.value}" for grade in Grade),
    "grade.failed",
    "grade.unverified",
    *(f"sentence.{grade.value}" for grade in Grade),
    "sentence.none",
    "sentence.corrupted",
    *(f"tier.{tier.value}" for tier in Tier),
    *(f"link.{link.value}" for link in Link),
    *(f"remedy.{link.value}" for link in Link),
    *(f"{table}.{cause.value}" for table in ("cause", "change") for cause in Cause),
    *(f"claim.{name}" for name in ("unverified", "proven", "controlled", "failed", "control", "traffic")),
    *(f"claim.{name}" for name in ("right", "wrong")),
    *(f"sweep.{standing.value}" for standing in Sweep),
    *(f"control.{standing.value}" for standing in ControlStanding if standing is not ControlStanding.ABSENT),
    *(f"not.control_{standing.value}" for standing in ControlStanding if standing not in CONTROL_WITHOUT_LINE),
    *(f"control.{name}" for name in ("by_events", "by_answers", "by_both")),
    *(f"claim.weak_{name}" for name in ("reported", "consistent", "unknown")),
    *(f"residency.{name}" for name in ("still", "evicted", "freed", "reset")),
    *(f"witnesses.{name}" for name in ("agrees", "explained", "disagrees", "not_comparable")),
    "chain.range",
    "chain.range_recomputed",
    "claim.answers_same",
    "claim.answers_differ",
}
"""Keys that are put together from parts."""

NO_WORDS = {"DOCTYPE", "html", "kvwitness", "verify", "explain", "rid", "sha", "sum", "manifest"}


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def used() -> set[str]:
    found = set(WORKED_OUT)
    for path in (*FOLDER.glob("*.py"), *FOLDER.glob("*.j2")):
        text = path.read_text()
        found.update(NAMED.findall(text))
        found.update(key for pair in CHOSEN.findall(text) for key in pair if key)
    found.update(f"head.{name}" for name in SECTIONS)
    return {key for key in found if "." in key and not key.endswith(".")}


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_text_is_missing(language: str) -> None:
    words = words_for(language)
    assert words.keys == ENGLISH.keys
    for key in words.keys:
        assert words.raw(key).strip(), key
        assert placeholders(words.raw(key)) == placeholders(ENGLISH.raw(key)), key


def test_the_page_uses_the_catalogue_and_all_of_it() -> None:
    assert used() == ENGLISH.keys


def test_templates_hold_no_words_of_their_own() -> None:
    """What stands between the tags of a template comes from the catalogue."""
    for name in ("report.html.j2", "report.md.j2"):
        text = (FOLDER / name).read_text()
        text = re.sub(r"\{%.*?%\}|\{\{.*?\}\}|<[^>]*>|`[^`]*`", " ", text, flags=re.DOTALL)
        left = set(re.findall(r"[A-Za-z]{3,}", text))
        assert left <= {"DOCTYPE", "html", "kvwitness", "verify", "explain", "rid", "sha", "sum", "manifest"}, (
            name,
            left,
        )


@pytest.mark.parametrize("language", [one for one in LANGUAGES if one != "en"])
def test_translations_are_translations(language: str) -> None:
    same = {key for key in ENGLISH.keys if words_for(language).raw(key) == ENGLISH.raw(key)}
    assert same == set()


@pytest.mark.parametrize("tier", [Tier.L1, Tier.L2, Tier.L3])
@pytest.mark.parametrize("grade", [Grade.CONFIRMED, Grade.VERIFIED, Grade.REPORTED, Grade.CONSISTENT])
def test_sentences_of_verdicts_are_known(tier: Tier, grade: Grade) -> None:
    said = sentence(tier, grade, [RangeVerdict(0, 1, tier, grade, Reason.L2_READ, "")])
    assert sentence_in(ENGLISH, said) == (said, "")
    text, rest = sentence_in(words_for("ru"), f"{said} (more)")
    assert tier.value in text and rest == " (more)"


def test_other_sentences_are_kept_as_recorded() -> None:
    assert sentence_in(words_for("ru"), "recomputed: prefix changed") == ("вычислено заново", ": prefix changed")
    assert sentence_in(words_for("ru"), "something new") == ("", "something new")


def test_remedies_are_those_of_the_verdicts() -> None:
    for link, remedy in REMEDY.items():
        assert remedy_in(ENGLISH, link, remedy) == (remedy, "")
    assert remedy_in(words_for("ru"), Link.READ, "another way") == ("", "another way")


@pytest.mark.parametrize(
    ("sentence", "begin", "rest"),
    [
        ("L2 read verified", "чтение из L2 проверено по содержимому", ""),
        (
            "L2 read verified (6 of 94 pages sampled), with 64 tokens of L2",
            "чтение из L2 проверено по содержимому (проверено страниц: 6 из 94)",
            ", with 64 tokens of L2",
        ),
        ("L2 read corrupted: the page of ...", "чтение из L2: данные искажены", ": the page of ..."),
    ],
)
def test_sentences_about_content_are_translated(sentence: str, begin: str, rest: str) -> None:
    assert sentence_in(words_for("ru"), sentence) == (begin, rest)
    english = sentence_in(words_for("en"), sentence)
    assert "".join(english) == sentence
