"""The report as data: every section worked out and worded, nothing of HTML or Markdown yet. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from kvwitness.tracer.bundle.layout import FileEntry
from kvwitness.tracer.bundle.rows import Row, one_of_series, rows_of
from kvwitness.tracer.bundle.summary import NamedCheck, findings_of, settings_of
from kvwitness.tracer.event_names import event_names
from kvwitness.tracer.model import Grade, LinkEvidence, RangeVerdict, RequestVerdict, Tier
from kvwitness.tracer.report.answers import Answers, answers_of
from kvwitness.tracer.report.breakeven import BreakEven, breakeven_of
from kvwitness.tracer.report.claim import Claim, claim_of
from kvwitness.tracer.report.conditions import recorded_by, server_arguments, unknown_conditions
from kvwitness.tracer.report.control import Control, ControlStanding, SeriesPair
from kvwitness.tracer.report.load import Evidence
from kvwitness.tracer.report.messages import Words
from kvwitness.tracer.report.outcome import Outcome, outcome_of
from kvwitness.tracer.report.residency import LISTED, Lane, Residencies, Stay, instance_of, residencies_of, was_evicted
from kvwitness.tracer.report.sweep import sweep_notes, sweep_sentence
from kvwitness.tracer.report.timing import Timing, timing_of
from kvwitness.tracer.report.wording import grade_in, link_in, sentence_in, tier_in
from kvwitness.tracer.verdicts.l3 import storage_changes

_SHOWN_PROBLEMS: Final = 20
SECTIONS: Final = (
    "claim",
    "not_claimed",
    "chain",
    "residency",
    "timing",
    "sweep",
    "control",
    "answers",
    "requests",
    "witnesses",
    "conditions",
    "recheck",
)
"""Of the page, in order; those that have nothing to show are left out."""
_TIER_ORDER: Final = (Tier.L2, Tier.L3, Tier.L1, Tier.RECOMPUTED, Tier.UNKNOWN)


class Quoted(msgspec.Struct, frozen=True):
    """A text in the report's language, and what follows it as recorded, in English."""

    text: str
    recorded: str = ""


class ChainLink(msgspec.Struct, frozen=True):
    """One link of the picture."""

    name: str
    holds: bool
    detail: str
    events: str


class ChainRange(msgspec.Struct, frozen=True):
    """One token range of the representative request, with its links."""

    title: str
    links: tuple[ChainLink, ...]


class Chain(msgspec.Struct, frozen=True):
    """The representative request. ``lead`` is the range that the claim is about."""

    rid: str
    series: str
    sentence: Quoted
    instance: str
    lead: ChainRange
    others: tuple[ChainRange, ...]


class StayRow(msgspec.Struct, frozen=True):
    """One line of the residency table."""

    lane: Lane
    stay: Stay
    ended: str


class RequestRow(msgspec.Struct, frozen=True):
    """One line of the table of requests."""

    row: Row
    sentence: Quoted
    ttft: float | None


class CheckRow(msgspec.Struct, frozen=True):
    """One comparison of two witnesses."""

    name: str
    answer: str
    bad: bool
    named: NamedCheck


class Witnesses(msgspec.Struct, frozen=True):
    """All comparisons in numbers, those of the story in words."""

    summary: str
    rows: tuple[CheckRow, ...]


class ControlSection(msgspec.Struct, frozen=True):
    """The control run, beside the run itself."""

    sentence: str
    bad: bool
    pairs: tuple[SeriesPair, ...]
    notes: tuple[str, ...]


class SweepSection(msgspec.Struct, frozen=True):
    """Times over prefix lengths."""

    sentence: str
    breakeven: BreakEven
    notes: tuple[str, ...]


class Page(msgspec.Struct, frozen=True):
    """Everything that a report shows."""

    name: str
    created: str
    version: str
    manifest_sha256: str
    problems: tuple[str, ...]
    more_problems: int
    stopped: str | None
    outcome: Outcome
    claim: Claim
    chain: Chain | None
    residencies: Residencies | None
    stays: tuple[StayRow, ...]
    timing: Timing
    sweep: SweepSection | None
    control: ControlSection | None
    answers: Answers
    requests: tuple[RequestRow, ...]
    show_unknown: bool
    series: tuple[str, ...]
    grades: tuple[Grade, ...]
    witnesses: Witnesses
    settings: tuple[tuple[str, str], ...]
    recorded: tuple[tuple[str, str], ...]
    arguments: tuple[tuple[str, str], ...]
    """Every argument of the server, as it answers them."""
    unknown: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    storage: tuple[str, ...]
    """What became of each attaching and detaching of a storage backend, over all ranks."""
    files: tuple[FileEntry, ...]
    checked_files: int
    checked_verdicts: int

    @property
    def intact(self) -> bool:
        return not self.problems

    @property
    def sections(self) -> tuple[str, ...]:
        """The page's sections, in order."""
        left_out = {"sweep": self.sweep is None, "control": self.control is None, "answers": not self.answers.series}
        return tuple(name for name in SECTIONS if not left_out.get(name, False))


def build_page(evidence: Evidence, words: Words) -> Page:
    """Work out the report about a bundle."""
    outcome = outcome_of(evidence)
    verdict = representative(evidence)
    instance = instance_of(evidence.instances, verdict.instance if verdict else None)
    focus = _round_of(verdict, evidence)
    residencies = residencies_of(instance, evidence.series_of(), focus) if instance else None
    breakeven = breakeven_of(evidence.records, evidence.latest()) if evidence.intact else None
    rows = _request_rows(evidence, words)
    return Page(
        name=evidence.name,
        created=evidence.manifest.created,
        version=evidence.manifest.kvwitness,
        manifest_sha256=evidence.manifest_sha256,
        problems=evidence.problems[:_SHOWN_PROBLEMS],
        more_problems=max(0, len(evidence.problems) - _SHOWN_PROBLEMS),
        stopped=evidence.stopped,
        outcome=outcome,
        claim=claim_of(evidence, outcome, words),
        chain=_chain(verdict, evidence, words) if verdict and evidence.intact else None,
        residencies=residencies,
        stays=tuple(_stay_rows(residencies, words)) if residencies else (),
        timing=timing_of(evidence.records, words, comparable=not outcome.changed, by_length=breakeven is not None),
        sweep=_sweep(breakeven, words) if breakeven is not None else None,
        control=_control(outcome.control, words),
        answers=answers_of(evidence.records),
        requests=rows,
        show_unknown=any(one.row.unknown for one in rows),
        series=tuple(dict.fromkeys(one.row.series for one in rows if one.row.series)),
        grades=tuple(grade for grade in Grade if evidence.intact and any(one.row.grade is grade for one in rows)),
        witnesses=_witnesses(evidence, words),
        settings=tuple(settings_of({k: v for k, v in evidence.environment.items() if k != "unknown"})),
        recorded=tuple(recorded_by(instance).items()) if instance else (),
        arguments=server_arguments(evidence.environment),
        unknown=unknown_conditions(evidence.environment),
        skipped=tuple((one.name, one.reason) for one in evidence.manifest.skipped_journals),
        storage=tuple(storage_changes(evidence.instances)),
        files=evidence.manifest.files,
        checked_files=evidence.checked_files,
        checked_verdicts=evidence.checked_verdicts,
    )


def representative(evidence: Evidence) -> RequestVerdict | None:
    """The request whose chain is shown: C, else the one that says most about reuse."""
    latest = evidence.latest()
    sent = one_of_series(evidence.records, "C")
    if sent is not None and sent.rid in latest:
        return latest[sent.rid]
    # Of a run, one of its own requests: the journal also has what others sent to the server.
    own = {record.rid for record in evidence.records} or latest.keys()
    judged = [verdict for verdict in latest.values() if verdict.ranges and verdict.rid in own]
    return min(judged, key=lambda verdict: _TIER_ORDER.index(verdict.tier), default=None)


def _round_of(verdict: RequestVerdict | None, evidence: Evidence) -> frozenset[str]:
    """The requests of the round that the shown request is part of; empty where a run has one round, or none."""
    rounds = {record.rid: record.round for record in evidence.records}
    if verdict is None or len({number for number in rounds.values() if number is not None}) < 2:
        return frozenset()
    own = rounds.get(verdict.rid)
    return frozenset(rid for rid, number in rounds.items() if number == own)


def _sweep(found: BreakEven, words: Words) -> SweepSection:
    return SweepSection(sweep_sentence(found, words), found, tuple(sweep_notes(found, words)))


def _control(found: Control | None, words: Words) -> ControlSection | None:
    if found is None or found.standing is ControlStanding.ABSENT:
        return None
    known = words(f"control.{found.known}", confirmed=found.confirmed, total=found.total)
    sentence = words(
        f"control.{found.standing.value}", reused=found.reused, total=found.total, detail=found.detail, control=known
    )
    notes = [words("control.note"), *([words("control.speed")] if found.other_speed else [])]
    return ControlSection(sentence, found.standing is not ControlStanding.RECOMPUTED, found.pairs, tuple(notes))


def _chain(verdict: RequestVerdict, evidence: Evidence, words: Words) -> Chain | None:
    if not verdict.ranges:
        return None
    lead = max(verdict.ranges, key=lambda piece: (piece.tier is verdict.tier, piece.tokens))
    return Chain(
        rid=verdict.rid,
        series=evidence.series_of().get(verdict.rid, ""),
        sentence=_sentence(verdict.sentence, evidence, words),
        instance=verdict.instance,
        lead=_range(lead, verdict, words),
        others=tuple(_range(piece, verdict, words) for piece in verdict.ranges if piece is not lead),
    )


def _range(piece: RangeVerdict, verdict: RequestVerdict, words: Words) -> ChainRange:
    title = words(
        "chain.range_recomputed" if piece.tier is Tier.RECOMPUTED else "chain.range",
        start=piece.start,
        end=piece.end,
        tier=tier_in(words, piece.tier),
        grade=grade_in(words, piece.grade),
    )
    return ChainRange(title, tuple(_link(link, verdict, words) for link in piece.links))


def _link(link: LinkEvidence, verdict: RequestVerdict, words: Words) -> ChainLink:
    return ChainLink(
        link_in(words, link.link), link.holds, link.detail, event_names(link.events, verdict.instance, " ({})")
    )


def _sentence(sentence: str, evidence: Evidence, words: Words) -> Quoted:
    text, rest = sentence_in(words, sentence)
    return Quoted(text if evidence.intact else words("page.unverified_mark") + text, rest)


def _stay_rows(found: Residencies, words: Words) -> Iterator[StayRow]:
    pairs = [(lane, stay) for lane in found.lanes for stay in lane.stays]
    for lane, stay in pairs[:LISTED]:
        if stay.until is None:
            ended = "still"
        elif was_evicted(stay):
            ended = "evicted" if stay.tier == "L1" else "freed"
        else:
            ended = "reset"
        yield StayRow(lane, stay, words(f"residency.{ended}"))


def _request_rows(evidence: Evidence, words: Words) -> tuple[RequestRow, ...]:
    times = {r.rid: r.ttft_s * 1e3 for r in evidence.records if r.ttft_s is not None and r.error is None}
    return tuple(
        RequestRow(row, _sentence(row.sentence, evidence, words), times.get(row.request))
        for row in rows_of(evidence.verdicts, evidence.records)
    )


def _witnesses(evidence: Evidence, words: Words) -> Witnesses:
    checks = [check for verdict in evidence.latest().values() for check in verdict.checks]
    outside = evidence.outside.statement.checks if evidence.outside is not None else ()
    checks.extend(outside)
    answers = Counter(check.agrees for check in checks)
    findings = findings_of(evidence.verdicts, evidence.records)
    named = [NamedCheck(finding.name, check) for finding in findings for check in finding.verdict.checks]
    named.extend(NamedCheck(words("witnesses.server"), check) for check in outside)
    summary = words(
        "witnesses.summary",
        total=len(checks),
        agree=answers[True],
        disagree=answers[False],
        explained=sum(check.explained for check in checks),
        unknown=answers[None],
    )
    return Witnesses(summary if checks else "", tuple(_check(one, words) for one in named))


def _check(named: NamedCheck, words: Words) -> CheckRow:
    check = named.check
    key = {True: "agrees", False: "explained" if check.explained else "disagrees", None: "not_comparable"}[check.agrees]
    return CheckRow(named.name, words(f"witnesses.{key}"), check.agrees is False, named)
