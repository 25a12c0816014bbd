"""The claim in words: what is said, what is not, why not more, and what to change. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from kvwitness.tracer.bundle.rows import one_of_series
from kvwitness.tracer.model import Grade, Link
from kvwitness.tracer.report.load import Evidence
from kvwitness.tracer.report.messages import Words
from kvwitness.tracer.report.outcome import Outcome, Standing
from kvwitness.tracer.report.wording import grade_in, link_in, remedy_in
from kvwitness.tracer.verdicts.links import unsound_links
from kvwitness.tracer.verdicts.scope import beside_kv

_WEAK: Final = {Grade.REPORTED: "reported", Grade.CONSISTENT: "consistent"}


class Why(msgspec.Struct, frozen=True):
    """Something that keeps the claim from being stronger. ``recorded`` is in the evidence's own words."""

    text: str
    recorded: str = ""
    remedy: str = ""
    remedy_recorded: str = ""


class Claim(msgspec.Struct, frozen=True):
    """The top of the report."""

    sentence: str
    grade: str
    tone: str
    """``good``, ``weak`` or ``bad``: how it is coloured; the words never depend on it."""
    causes: tuple[Why, ...]
    """Why the experiment failed."""
    changes: tuple[str, ...]
    not_claimed: tuple[str, ...]
    why: tuple[Why, ...]
    answers: str
    answers_differ: bool


def claim_of(evidence: Evidence, outcome: Outcome, words: Words) -> Claim:
    """Word the outcome."""
    answers, differ = _answers(evidence, words) if evidence.intact else ("", False)
    failed = outcome.standing is Standing.FAILED
    return Claim(
        sentence=_sentence(outcome, words),
        grade=_grade(outcome, words),
        tone=_tone(outcome, differ),
        causes=tuple(
            Why(words(f"cause.{f.cause.value}", count=f.count, total=outcome.total), f.detail) for f in outcome.failures
        ),
        changes=tuple(words(f"change.{failure.cause.value}") for failure in outcome.failures),
        not_claimed=tuple(_not_claimed(evidence, outcome, words)),
        why=() if failed else tuple(_why(evidence, outcome, words)),
        answers=answers,
        answers_differ=differ,
    )


def _sentence(outcome: Outcome, words: Words) -> str:
    if outcome.standing is Standing.TRAFFIC:
        counts = {tier.value.lower(): count for tier, count in outcome.confirmed_by_tier}
        return words("claim.traffic", total=outcome.total, **counts)
    key = outcome.standing.value
    if outcome.standing is Standing.WEAK:
        key = f"weak_{_WEAK.get(outcome.grade, 'unknown')}"
    low, high = outcome.tokens
    tokens = str(low) if low == high else f"{low}..{high}"
    return words(f"claim.{key}", confirmed=outcome.confirmed, total=outcome.total, tokens=tokens)


def _grade(outcome: Outcome, words: Words) -> str:
    if outcome.standing is Standing.TRAFFIC:
        return ""
    if outcome.standing in (Standing.FAILED, Standing.UNVERIFIED):
        return words(f"grade.{outcome.standing.value}")
    return grade_in(words, outcome.grade)


def _tone(outcome: Outcome, differ: bool) -> str:
    if differ or outcome.standing in (Standing.FAILED, Standing.UNVERIFIED):
        return "bad"
    return "good" if outcome.standing in (Standing.PROVEN, Standing.CONTROL) else "weak"


def _not_claimed(evidence: Evidence, outcome: Outcome, words: Words) -> Iterator[str]:
    standing = outcome.standing
    if standing in (Standing.FAILED, Standing.UNVERIFIED):
        yield words("not.everything")
    if standing is Standing.WEAK:
        yield words("not.others", count=outcome.total - outcome.confirmed, total=outcome.total)
    yield words("not.elsewhere")
    yield words("not.worth")
    if outcome.grade is not Grade.VERIFIED:
        yield words("not.content")
    if standing in (Standing.PROVEN, Standing.WEAK, Standing.FAILED):
        yield words("not.control")
    pools = dict.fromkeys(pool for instance in evidence.instances for pool in beside_kv(instance))
    if pools:
        yield words("not.pools", pools=", ".join(pools))
    if not any(verdict.tokens.l3 for verdict in evidence.verdicts):
        yield words("not.l3")
    latest = evidence.latest()
    if unjudged := sum(record.rid not in latest for record in evidence.records):
        yield words("not.unjudged", count=unjudged)


def _why(evidence: Evidence, outcome: Outcome, words: Words) -> Iterator[Why]:
    if outcome.without_journal:
        if evidence.instances:
            reason = words("why.not_in_journals")
        else:
            reason = _why_no_journals(evidence.environment) or words("why.no_journal_reason")
        yield Why(words("why.no_journal", count=outcome.without_journal, total=outcome.total, reason=reason))
    for gap in outcome.gaps:
        remedy, recorded = remedy_in(words, gap.link, gap.remedy)
        yield Why(words("why.link", link=link_in(words, gap.link)), gap.detail, remedy, recorded)
    if outcome.standing is Standing.WEAK:
        named = {gap.link for gap in outcome.gaps}
        for instance in evidence.instances:
            for link, why in unsound_links(instance).items():
                if link not in named and link is not Link.CONTENT:  # No claim is weaker without it.
                    yield Why(words("why.unsound", link=link_in(words, link), instance=instance.instance), why)


def _why_no_journals(environment: Mapping[str, object]) -> str:
    run = environment.get("run")
    told = run.get("journals") if isinstance(run, Mapping) else None
    return told.removeprefix("none: ") if isinstance(told, str) else ""


def _answers(evidence: Evidence, words: Words) -> tuple[str, bool]:
    """Whether C's tokens are those of A, and whether they are known to differ."""
    first = one_of_series(evidence.records, "A")
    repeats = [record for record in evidence.records if record.series == "C"]
    if first is None or not repeats:
        return "", False
    # With repeats the run may use several prefixes: C is compared with the A of the same prompt.
    asked = {record.prompt_sha256: record for record in evidence.records if record.series == "A"}
    pairs = [(asked[one.prompt_sha256].output_ids, one.output_ids) for one in repeats if one.prompt_sha256 in asked]
    compared = [(a, c) for a, c in pairs if a and c]
    if not compared:
        return words("claim.answers_unknown"), False
    same = sum(a == c for a, c in compared)
    key = "claim.answers_same" if same == len(compared) else "claim.answers_differ"
    return words(key, same=same, compared=len(compared)), same < len(compared)
