"""The claim in words: what is said, what is not, why not more, and what to change. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from kvwitness.tracer.model import Grade, Link, Tier
from kvwitness.tracer.report.answers import answers_of
from kvwitness.tracer.report.control import ControlStanding
from kvwitness.tracer.report.load import Evidence
from kvwitness.tracer.report.messages import Words
from kvwitness.tracer.report.outcome import PROVEN, Outcome, Standing
from kvwitness.tracer.report.wording import grade_in, link_in, remedy_in
from kvwitness.tracer.verdicts.leaks import leaks_of
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
        sentence=_outside(evidence, words) or _sentence(outcome, words),
        grade=_grade(outcome, words),
        tone=_tone(outcome, differ),
        causes=tuple(
            Why(words(f"cause.{f.cause.value}", count=f.count, total=outcome.total), f.detail) for f in outcome.failures
        ),
        changes=tuple(words(f"change.{failure.cause.value}") for failure in outcome.failures),
        not_claimed=tuple(_not_claimed(evidence, outcome, words)),
        why=(*_leaks(evidence, words), *(() if failed else _why(evidence, outcome, words))),
        answers=answers,
        answers_differ=differ,
    )


def _sentence(outcome: Outcome, words: Words) -> str:
    if outcome.standing is Standing.TRAFFIC:
        counts = {tier.value.lower(): count for tier, count in outcome.confirmed_by_tier}
        return words("claim.traffic", total=outcome.total, **counts)
    key = "controlled" if outcome.controlled else outcome.standing.value
    if outcome.standing is Standing.WEAK:
        key = f"weak_{_WEAK.get(outcome.grade, 'unknown')}"
    low, high = outcome.tokens
    tokens = str(low) if low == high else f"{low}..{high}"
    return words(
        f"claim.{key}",
        confirmed=outcome.confirmed,
        total=outcome.total,
        tokens=tokens,
        control=_control(outcome, words),
    )


def _control(outcome: Outcome, words: Words) -> str:
    """By what it is known that the control recomputed."""
    if outcome.control is None:
        return ""
    return words(f"control.{outcome.control.known}", confirmed=outcome.control.confirmed, total=outcome.control.total)


def _outside(evidence: Evidence, words: Words) -> str:
    """The claim where nobody looked inside the server; empty where somebody did, or where it cannot be relied on."""
    if evidence.outside is None or evidence.verdicts or evidence.records or not evidence.intact:
        return ""
    read = [f"{tier} {tokens}" for tier, tokens in sorted(evidence.outside.statement.reported.items()) if tokens]
    return words("claim.outside", tokens=", ".join(read)) if read else words("claim.outside_none")


def _grade(outcome: Outcome, words: Words) -> str:
    if outcome.standing is Standing.TRAFFIC:
        return ""
    if outcome.standing in (Standing.FAILED, Standing.UNVERIFIED):
        return words(f"grade.{outcome.standing.value}")
    grade = grade_in(words, outcome.grade)
    return words("grade.controlled", grade=grade) if outcome.controlled else grade


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
    if standing in (Standing.PROVEN, Standing.WEAK, Standing.FAILED) and not outcome.controlled:
        yield _not_controlled(outcome, words)
    pools = dict.fromkeys(pool for instance in evidence.instances for pool in beside_kv(instance))
    if pools:
        yield words("not.pools", pools=", ".join(pools))
    if not any(verdict.tokens.l3 for verdict in evidence.verdicts):
        yield words("not.l3")
    latest = evidence.latest()
    if unjudged := sum(record.rid not in latest for record in evidence.records):
        yield words("not.unjudged", count=unjudged)


def _not_controlled(outcome: Outcome, words: Words) -> str:
    control = outcome.control
    if control is None or control.standing is ControlStanding.ABSENT:
        return words("not.control")
    if control.standing is ControlStanding.RECOMPUTED:
        return words("not.control_alone")
    return words(f"not.control_{control.standing.value}", reused=control.reused, total=control.total)


def _leaks(evidence: Evidence, words: Words) -> Iterator[Why]:
    """A server that loses slots is no sound place for an experiment, whatever came of this one."""
    for instance in evidence.instances:
        for leak in leaks_of(instance):
            yield Why(words("why.leak", instance=instance.instance), str(leak))


def _why(evidence: Evidence, outcome: Outcome, words: Words) -> Iterator[Why]:
    if evidence.outside is not None and not evidence.instances:
        statement = evidence.outside.statement
        yield Why(words("why.outside"), "; ".join(statement.gaps), remedy_recorded=statement.raise_it)
    if outcome.without_journal:
        if evidence.instances:
            reason = words("why.not_in_journals")
        else:
            reason = _why_no_journals(evidence.environment) or words("why.no_journal_reason")
        yield Why(words("why.no_journal", count=outcome.without_journal, total=outcome.total, reason=reason))
    if sized := _sized(evidence.environment):
        yield Why(words("why.by_size", fills=sized))
    for gap in outcome.gaps:
        remedy, recorded = remedy_in(words, gap.link, gap.remedy)
        yield Why(words("why.link", link=link_in(words, gap.link)), gap.detail, remedy, recorded)
    if outcome.standing is Standing.WEAK:
        named = {gap.link for gap in outcome.gaps}
        for instance in evidence.instances:
            for link, why in unsound_links(instance).items():
                if link not in named and link is not Link.CONTENT:  # No claim is weaker without it.
                    yield Why(words("why.unsound", link=link_in(words, link), instance=instance.instance), why)


def _suspected(evidence: Evidence, differing: Sequence[str]) -> int:
    """Requests that answered otherwise than their A although an L2 read of theirs is proven."""
    latest = evidence.latest()
    read = (latest[rid].ranges for rid in differing if rid in latest)
    return sum(any(r.tier is Tier.L2 and r.grade in PROVEN for r in ranges) for ranges in read)


def _sized(environment: Mapping[str, object]) -> int:
    """Unrelated prompts that were sent by the sizes of the pools, since nobody could see when the prefix left."""
    run = environment.get("run")
    found = run.get("evictions") if isinstance(run, Mapping) else None
    evictions = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    return sum(int(one.get("fills") or 0) for one in evictions if one.get("decided_by") == "size")


def _why_no_journals(environment: Mapping[str, object]) -> str:
    run = environment.get("run")
    told = run.get("journals") if isinstance(run, Mapping) else None
    return told.removeprefix("none: ") if isinstance(told, str) else ""


def _answers(evidence: Evidence, words: Words) -> tuple[str, bool]:
    """Whether C answered as A did, and whether it is known that it did not, or that it is wrong."""
    if not any(record.series == "C" for record in evidence.records):
        return "", False
    answers = answers_of(evidence.records)
    repeats = answers.repeats
    if not repeats.compared:
        told, differ = words("claim.answers_unknown"), False
    else:
        differ = repeats.same < repeats.compared
        key = "claim.answers_differ" if differ else "claim.answers_same"
        what = words("claim.texts" if repeats.by_text else "claim.tokens")
        told = words(key, same=repeats.same, compared=repeats.compared, what=what)
        if suspected := _suspected(evidence, repeats.differing):
            told += " " + words("claim.corruption_suspected", count=suspected)
    if (compared := answers.compared_in("C")) == 0:
        return told, differ
    wrong = answers.wrong_in("C")
    key = "claim.wrong" if wrong else "claim.right"
    values = {"wrong_a": answers.wrong_in("A"), "compared_a": answers.compared_in("A")}
    return f"{told} {words(key, wrong=wrong, compared=compared, **values)}", differ or bool(wrong)
