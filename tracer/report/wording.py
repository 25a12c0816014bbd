"""What the verdicts say, in the report's language. Words of the evidence that have no translation stay as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from kvwitness.tracer.model import Grade, Link, Tier
from kvwitness.tracer.report.messages import Words, words_for

_READS: Final = (Tier.L1, Tier.L2, Tier.L3)
_WITH_TIER: Final = (Grade.CONFIRMED, Grade.VERIFIED, Grade.REPORTED, Grade.CONSISTENT)
_SAMPLED: Final = re.compile(r" \((\d+) of (\d+) pages sampled\)")
_WITHOUT_TIER: Final = ("recomputed", "refuted", "unknown", "none")


def sentence_in(words: Words, sentence: str) -> tuple[str, str]:
    """A verdict's sentence: its beginning in the report's language, and the rest as recorded (may be empty)."""
    english = words_for("en")
    for key, values in _beginnings():
        begin = english(key, **values)
        if sentence.startswith(begin):
            return _with_sample(words, words(key, **values), sentence[len(begin) :])
    return "", sentence


def _with_sample(words: Words, begin: str, rest: str) -> tuple[str, str]:
    """How many pages were compared stands right behind the beginning."""
    sampled = _SAMPLED.match(rest)
    if sampled is None:
        return begin, rest
    return begin + words("sentence.sampled", compared=sampled[1], pages=sampled[2]), rest[sampled.end() :]


def remedy_in(words: Words, link: Link, remedy: str) -> tuple[str, str]:
    """How to obtain a link: in the report's language where it is the usual way, else as the verdict says it."""
    key = f"remedy.{link.value}"
    return (words(key), "") if remedy == words_for("en")(key) else ("", remedy)


def tier_in(words: Words, tier: Tier) -> str:
    return words(f"tier.{tier.value}")


def grade_in(words: Words, grade: Grade) -> str:
    return words(f"grade.{grade.value}")


def link_in(words: Words, link: Link) -> str:
    return words(f"link.{link.value}")


def _beginnings() -> Iterator[tuple[str, dict[str, str]]]:
    for grade in _WITH_TIER:
        for tier in _READS:
            yield f"sentence.{grade.value}", {"tier": tier.value}
    for tier in _READS:
        yield "sentence.corrupted", {"tier": tier.value}
    for name in _WITHOUT_TIER:
        yield f"sentence.{name}", {}
