"""Did the same load without HiCache recompute what C reused? From a run and its control. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from kvwitness.tracer.bundle.reports import report_of
from kvwitness.tracer.model import Grade, RequestVerdict
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.protocol.settings import control_differences
from kvwitness.tracer.report.load import Evidence
from kvwitness.tracer.report.statistics import Contrast, Summary, contrast, samples_of, summarize

_LOAD = ("A", "B", "evict", "C")


class ControlStanding(StrEnum):
    """What the control shows."""

    RECOMPUTED = "recomputed"
    REUSED = "reused"
    UNKNOWN = "unknown"
    """It did not say what it reused."""
    OTHER_LOAD = "other_load"
    OTHER_SETTINGS = "other_settings"
    UNVERIFIED = "unverified"
    ABSENT = "absent"


class Control(msgspec.Struct, frozen=True):
    """The control of a run."""

    standing: ControlStanding
    confirmed: int = 0
    """Requests of C that were seen to be recomputed, by the control's own journals."""
    reused: int = 0
    total: int = 0
    detail: str = ""
    pairs: tuple[SeriesPair, ...] = ()

    @property
    def known(self) -> str:
        """By what it is known that the control recomputed: ``by_events``, ``by_answers`` or ``by_both``."""
        if self.confirmed == self.total:
            return "by_events"
        return "by_both" if self.confirmed else "by_answers"

    @property
    def other_speed(self) -> bool:
        """Whether A, which is cold in both, took another time: then the two runs differ in more than HiCache."""
        cold = next((pair.difference.interval for pair in self.pairs if pair.series == "A"), None)
        return cold is not None and not cold.spans_zero


class SeriesPair(msgspec.Struct, frozen=True):
    """Times of one series in the run and in its control. ``difference``: the run's median minus the control's."""

    series: str
    run: Summary
    control: Summary
    difference: Contrast


def control_of(evidence: Evidence) -> Control:
    """Judge the control of a run."""
    control = evidence.control
    if control is None:
        return Control(ControlStanding.ABSENT, detail=_told(evidence.environment))
    if not control.intact:
        return Control(ControlStanding.UNVERIFIED, detail=control.problems[0])
    pairs = tuple(_pairs(evidence.records, control.records))
    server, other = (_raw(one.environment) for one in (evidence, control))
    if not server or not other or _hicache(other) is not False:
        return Control(ControlStanding.OTHER_SETTINGS, detail="enable_hierarchical_cache", pairs=pairs)
    if differences := control_differences(server, other):
        return Control(ControlStanding.OTHER_SETTINGS, detail=differences[0], pairs=pairs)
    if (why := _other_load(evidence.records, control.records)) is not None:
        return Control(ControlStanding.OTHER_LOAD, detail=why, pairs=pairs)
    return _judged(evidence, control, pairs)


def _judged(evidence: Evidence, control: Evidence, pairs: tuple[SeriesPair, ...]) -> Control:
    ours, theirs = evidence.latest(), control.latest()
    reused = unknown = confirmed = 0
    found = list(zip(_answered(evidence.records, "C"), _answered(control.records, "C"), strict=True))
    for mine, other in found:
        own, verdict = ours.get(mine.rid), theirs.get(other.rid)
        # What C itself took from L1 may be there without HiCache, too.
        allowed = own.tokens.l1 if own is not None else 0
        tokens = _reused(other, verdict)
        if tokens is None:
            unknown += 1
        elif tokens > allowed:
            reused += 1
        elif verdict is not None and verdict.grade is Grade.RECOMPUTED:
            confirmed += 1
    standing = ControlStanding.REUSED if reused else ControlStanding.UNKNOWN if unknown else ControlStanding.RECOMPUTED
    return Control(standing, confirmed, reused, len(found), pairs=pairs)


def _reused(record: RequestRecord, verdict: RequestVerdict | None) -> int | None:
    """Tokens that the control reused, by its answer or its journals, whichever says more; None: neither says."""
    report = report_of(record)
    said = report.cached if report is not None else None
    seen = None if verdict is None else verdict.tokens.l1 + verdict.tokens.l2 + verdict.tokens.l3
    if verdict is not None and verdict.tokens.unknown:
        seen = None
    known = [one for one in (said, seen) if one is not None]
    return max(known) if known else None


def _other_load(run: Sequence[RequestRecord], control: Sequence[RequestRecord]) -> str | None:
    """Why the control did not get the run's load: the same prompts in the same order, up to each C."""
    done = {record.round for record in _answered(run, "C")}
    for series in ("A", "B", "C"):
        mine = [one.prompt_sha256 for one in _answered(run, series) if one.round in done]
        if mine != [one.prompt_sha256 for one in _answered(control, series)]:
            return f"series {series}"
    rest = iter([one.prompt_sha256 for one in run if one.series in _LOAD])
    if not all(prompt in rest for prompt in [one.prompt_sha256 for one in control if one.series in _LOAD]):
        return "order"
    if len(_answered(control, "evict")) < len([one for one in _answered(run, "evict") if one.round in done]):
        return "eviction"
    return None


def _answered(records: Sequence[RequestRecord], series: str) -> list[RequestRecord]:
    return [record for record in records if record.series == series and record.error is None]


def _pairs(run: Sequence[RequestRecord], control: Sequence[RequestRecord]) -> Iterator[SeriesPair]:
    mine, theirs = samples_of(run), samples_of(control)
    for series in ("A", "B", "C"):
        if series in mine and series in theirs:
            one, other = summarize(series, mine[series]), summarize(series, theirs[series])
            yield SeriesPair(series, one, other, contrast(one, other))


def _raw(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    raw = environment.get("raw")
    found = raw.get("server_info") if isinstance(raw, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _hicache(raw: Mapping[str, Any]) -> object:
    return raw.get("enable_hierarchical_cache")


def _told(environment: Mapping[str, Any]) -> str:
    run = environment.get("run")
    told = run.get("control") if isinstance(run, Mapping) else None
    return told if isinstance(told, str) else ""
