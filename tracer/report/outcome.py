"""What a bundle as a whole says: proven, weaker than that, or an experiment that failed. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from kvwitness.tracer.bundle.reports import report_of
from kvwitness.tracer.bundle.summary import STORY
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import GRADE_ORDER, Grade, Link, Reason, RequestVerdict, Tier
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.report.conditions import Difference, differences, instance_conditions
from kvwitness.tracer.report.control import Control, ControlStanding, control_of
from kvwitness.tracer.report.load import Evidence
from kvwitness.tracer.report.repeated import changed_prompts

PROVEN: Final = (Grade.CONFIRMED, Grade.VERIFIED)


class Standing(StrEnum):
    """What the report may say on top."""

    UNVERIFIED = "unverified"
    """The bundle does not verify: nothing in it is claimed."""
    PROVEN = "proven"
    WEAK = "weak"
    """No request of C contradicts an L2 read, and not all of them are confirmed."""
    FAILED = "failed"
    CONTROL = "control"
    """A control run, in which C was recomputed as it should be."""
    TRAFFIC = "traffic"
    """No run of the protocol: each request stands for itself."""


class Cause(StrEnum):
    """Why the experiment failed."""

    STILL_IN_L1 = "still_in_l1"
    LEFT_L2 = "left_l2"
    NEVER_BACKED_UP = "never_backed_up"
    NOT_LOADED = "not_loaded"
    NOT_MATCHED = "not_matched"
    ELSEWHERE = "elsewhere"
    PREFIX_CHANGED = "prefix_changed"
    CORRUPTED = "corrupted"
    RECOMPUTED = "recomputed"
    NOT_SENT = "not_sent"
    SETTINGS_CHANGED = "settings_changed"
    CONTROL_REUSED = "control_reused"


_BY_REASON: Final[Mapping[Reason, Cause]] = {
    Reason.LEFT_L2_BEFORE_READ: Cause.LEFT_L2,
    Reason.NEVER_BACKED_UP: Cause.NEVER_BACKED_UP,
    Reason.PROMISED_NOT_LOADED: Cause.NOT_LOADED,
    Reason.RESIDENT_NOT_MATCHED: Cause.NOT_MATCHED,
    Reason.RESIDENT_ELSEWHERE: Cause.ELSEWHERE,
    Reason.CORRUPTION_SUSPECTED: Cause.CORRUPTED,
}


class Failure(msgspec.Struct, frozen=True):
    """One cause, in how many requests of C, and the words of the evidence about the first of them."""

    cause: Cause
    count: int
    detail: str = ""


class Gap(msgspec.Struct, frozen=True):
    """A link that is missing from C's chains."""

    link: Link
    detail: str
    remedy: str


class Outcome(msgspec.Struct, frozen=True):
    """What is claimed about a bundle, and what keeps it from claiming more."""

    standing: Standing
    grade: Grade
    """Of the weakest request of C; ``unknown`` where nothing is claimed."""
    confirmed: int = 0
    total: int = 0
    tokens: tuple[int, int] = (0, 0)
    """Fewest and most prompt tokens of a request of C that came from L2."""
    failures: tuple[Failure, ...] = ()
    gaps: tuple[Gap, ...] = ()
    without_journal: int = 0
    """Requests of C that no journal knows: only the server's own answer speaks for them."""
    changed: tuple[Difference, ...] = ()
    """Settings that differ between the servers that answered A, B and C."""
    confirmed_by_tier: tuple[tuple[Tier, int], ...] = ()
    control: Control | None = None
    """None: nothing that a control could support."""

    @property
    def controlled(self) -> bool:
        """Whether the same load without HiCache recomputed what C reused."""
        shown = self.control is not None and self.control.standing is ControlStanding.RECOMPUTED
        return self.standing is Standing.PROVEN and shown


class _Seen(msgspec.Struct, frozen=True):
    """One request of C."""

    tier: Tier
    grade: Grade
    tokens: int
    cause: Cause | None
    detail: str
    gaps: tuple[Gap, ...]
    journal: bool


def outcome_of(evidence: Evidence) -> Outcome:
    """Judge the experiment as a whole."""
    if not evidence.intact:
        return Outcome(Standing.UNVERIFIED, Grade.UNKNOWN)
    latest = evidence.latest()
    by_tier = _confirmed_by_tier(list(latest.values()))
    if not any(record.series in STORY for record in evidence.records):
        return Outcome(Standing.TRAFFIC, Grade.UNKNOWN, total=len(latest), confirmed_by_tier=by_tier)
    last = [record for record in evidence.records if record.series == "C"]
    changed = settings_changed(evidence)
    if not last or changed:
        cause = Cause.SETTINGS_CHANGED if changed else Cause.NOT_SENT
        failure = Failure(cause, len(last))
        return Outcome(
            Standing.FAILED, Grade.UNKNOWN, total=len(last), failures=(failure,), changed=changed,
            confirmed_by_tier=by_tier,
        )  # fmt: skip
    others = changed_prompts(evidence)
    seen = [_seen(record, latest.get(record.rid), others.get(record.rid)) for record in last]
    if is_control(evidence.environment):
        return msgspec.structs.replace(_of_control(seen), confirmed_by_tier=by_tier)
    return msgspec.structs.replace(_of_c(seen), confirmed_by_tier=by_tier, control=control_of(evidence))


def is_control(environment: Mapping[str, Any]) -> bool:
    """Whether the run was made on a server without HiCache, for comparison."""
    run = environment.get("run")
    options = run.get("options") if isinstance(run, Mapping) else None
    return isinstance(options, Mapping) and options.get("control") is True


def settings_changed(evidence: Evidence) -> tuple[Difference, ...]:
    """Settings that were not the same for A, B and C: by what the run read of them, and what schedulers recorded."""
    read = settings_read(evidence.environment)
    if read:
        return read
    known = {instance.instance: instance for instance in evidence.instances}
    latest, series = evidence.latest(), evidence.series_of()
    served: dict[str, InstanceFacts] = {}
    for rid, name in series.items():
        verdict = latest.get(rid)
        if name in STORY and verdict is not None and verdict.instance in known:
            served[verdict.instance] = known[verdict.instance]
    settings = [instance_conditions(instance) for instance in served.values()]
    found: dict[str, Difference] = {}
    for other in settings[1:]:
        for difference in differences(settings[0], other):
            found.setdefault(difference.name, difference)
    return tuple(found.values())


def settings_read(environment: Mapping[str, Any]) -> tuple[Difference, ...]:
    """The settings that the run itself saw change."""
    run = environment.get("run")
    read = run.get("settings_read") if isinstance(run, Mapping) else None
    changes = read.get("changes") if isinstance(read, Mapping) else None
    found = changes if isinstance(changes, list) else []
    return tuple(
        Difference(str(one.get("name")), str(one.get("one")), str(one.get("other")))
        for one in found
        if isinstance(one, Mapping)
    )


def _of_c(seen: Sequence[_Seen]) -> Outcome:
    confirmed = [one for one in seen if one.cause is None and one.grade in PROVEN]
    counts = Counter(one.cause for one in seen if one.cause is not None)
    details = {one.cause: one.detail for one in reversed(seen)}
    failures = tuple(Failure(cause, count, details[cause]) for cause, count in counts.items())
    weakest = min((one.grade for one in seen), key=lambda grade: GRADE_ORDER.get(grade, 0))
    if failures:
        standing, weakest = Standing.FAILED, Grade.UNKNOWN
    else:
        standing = Standing.PROVEN if len(confirmed) == len(seen) else Standing.WEAK
    tokens = [one.tokens for one in seen]
    return Outcome(
        standing=standing,
        grade=weakest,
        confirmed=len(confirmed),
        total=len(seen),
        tokens=(min(tokens), max(tokens)),
        failures=failures,
        gaps=tuple(dict.fromkeys(gap for one in seen for gap in one.gaps)),
        without_journal=sum(not one.journal for one in seen),
    )


def _of_control(seen: Sequence[_Seen]) -> Outcome:
    reused = sum(one.tier is not Tier.RECOMPUTED for one in seen)
    if reused:
        failure = Failure(Cause.CONTROL_REUSED, reused)
        return Outcome(Standing.FAILED, Grade.UNKNOWN, total=len(seen), failures=(failure,))
    proven = all(one.grade is Grade.RECOMPUTED for one in seen)
    return Outcome(
        Standing.CONTROL,
        Grade.RECOMPUTED if proven else Grade.REPORTED,
        confirmed=sum(one.grade is Grade.RECOMPUTED for one in seen),
        total=len(seen),
        without_journal=sum(not one.journal for one in seen),
    )


def _seen(record: RequestRecord, verdict: RequestVerdict | None, changed: str | None) -> _Seen:
    """``changed``: where its prompt is not A's. What it reused, it reused of another experiment then."""
    if verdict is None:
        seen = _by_the_server(record)
        return seen if changed is None else msgspec.structs.replace(seen, cause=Cause.PREFIX_CHANGED, detail=changed)
    gaps = tuple(Gap(link.link, link.detail, link.remedy) for piece in verdict.ranges for link in piece.missing)
    if changed is not None:
        return _Seen(verdict.tier, verdict.grade, verdict.tokens.l2, Cause.PREFIX_CHANGED, changed, gaps, True)
    cause = _cause(verdict)
    # Of a recomputed request the evidence says why in the range's own words.
    detail = next((piece.detail for piece in verdict.ranges if piece.detail), verdict.sentence)
    return _Seen(verdict.tier, verdict.grade, verdict.tokens.l2, cause, detail, gaps, True)


def _cause(verdict: RequestVerdict) -> Cause | None:
    reasons = [_BY_REASON[piece.reason] for piece in verdict.ranges if piece.reason in _BY_REASON]
    if verdict.grade is Grade.REFUTED or verdict.tier is Tier.RECOMPUTED:
        return reasons[0] if reasons else Cause.RECOMPUTED
    return {Tier.L1: Cause.STILL_IN_L1, Tier.L3: Cause.LEFT_L2}.get(verdict.tier)


def _by_the_server(record: RequestRecord) -> _Seen:
    """What is left without a verdict: the server's own answer, which proves nothing."""
    report = None if record.error is not None else report_of(record)
    if report is None:
        return _Seen(Tier.UNKNOWN, Grade.UNKNOWN, 0, None, record.error or "", (), False)
    if report.host:
        return _Seen(Tier.L2, Grade.REPORTED, report.host, None, "", (), False)
    if report.device:
        return _Seen(Tier.L1, Grade.REPORTED, 0, Cause.STILL_IN_L1, "", (), False)
    if report.cached:
        return _Seen(Tier.UNKNOWN, Grade.CONSISTENT, 0, None, "", (), False)
    if report.cached == 0:
        return _Seen(Tier.RECOMPUTED, Grade.REPORTED, 0, Cause.RECOMPUTED, "", (), False)
    return _Seen(Tier.UNKNOWN, Grade.UNKNOWN, 0, None, "", (), False)


def _confirmed_by_tier(verdicts: Sequence[RequestVerdict]) -> tuple[tuple[Tier, int], ...]:
    counts = Counter(verdict.tier for verdict in verdicts if verdict.grade in PROVEN)
    return tuple((tier, counts[tier]) for tier in (Tier.L1, Tier.L2, Tier.L3))
