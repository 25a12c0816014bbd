"""Two runs side by side: what differs in their conditions first, then what they measured. Pure functions."""

from __future__ import annotations

import msgspec

from kvwitness.tracer.bundle.rows import rows_of
from kvwitness.tracer.report.conditions import UNKNOWN, Difference, conditions_of, differences
from kvwitness.tracer.report.load import Evidence
from kvwitness.tracer.report.statistics import Contrast, Summary, contrast, samples_of, summarize


class SeriesPair(msgspec.Struct, frozen=True):
    """One series in both runs. None: that run has no times of it."""

    series: str
    one: Summary | None
    other: Summary | None
    difference: Contrast | None
    """The other run's median minus the first one's."""
    reads_one: str
    """Tier and grade of the requests, with how many there are of each."""
    reads_other: str


class Copies(msgspec.Struct, frozen=True):
    """What the schedulers copied between L1 and L2, over all ranks. Tokens of acknowledged copies alone."""

    backups: int
    """Copies to L2 that were queued ..."""
    acknowledged: int
    """... and those whose end was seen: nothing else can be read back."""
    backed_up: int
    loaded: int

    def __str__(self) -> str:
        return (
            f"{self.acknowledged} of {self.backups} backups acknowledged ({self.backed_up} tokens), "
            f"{self.loaded} tokens loaded back"
        )


class Comparison(msgspec.Struct, frozen=True):
    """What two runs have in common and what not."""

    differences: tuple[Difference, ...]
    unknown: tuple[str, ...]
    """Conditions that neither run knows: whether they are the same cannot be said."""
    series: tuple[SeriesPair, ...]
    copies: tuple[Copies | None, Copies | None] = (None, None)
    """None: that run has no journal."""


def compare_runs(one: Evidence, other: Evidence) -> Comparison:
    """Compare two runs; whether their conditions allow it is for the caller to decide."""
    left, right = (conditions_of(each.environment, each.instances) for each in (one, other))
    return Comparison(
        differences=differences(left, right),
        unknown=tuple(name for name, value in left.items() if value == UNKNOWN == right.get(name)),
        series=_series(one, other),
        copies=(_copies(one), _copies(other)),
    )


def _copies(evidence: Evidence) -> Copies | None:
    if not evidence.instances:
        return None
    backups = [backup for instance in evidence.instances for backup in instance.backups]
    loads = [load for instance in evidence.instances for load in instance.loads if load.done is not None]
    acknowledged = [backup for backup in backups if backup.acked is not None]
    return Copies(
        len(backups),
        len(acknowledged),
        sum(backup.tokens for backup in acknowledged),
        sum(load.tokens for load in loads),
    )


def _series(one: Evidence, other: Evidence) -> tuple[SeriesPair, ...]:
    left, right = _summaries(one), _summaries(other)
    reads = _reads(one), _reads(other)
    names = dict.fromkeys([*reads[0], *reads[1]])
    return tuple(
        SeriesPair(
            name,
            left.get(name),
            right.get(name),
            contrast(right[name], left[name]) if name in left and name in right else None,
            reads[0].get(name, ""),
            reads[1].get(name, ""),
        )
        for name in names
    )


def _summaries(evidence: Evidence) -> dict[str, Summary]:
    return {name: summarize(name, samples) for name, samples in samples_of(evidence.records).items()}


def _reads(evidence: Evidence) -> dict[str, str]:
    latest = evidence.latest()
    found: dict[str, dict[str, int]] = {}
    for row in rows_of(evidence.verdicts, evidence.records):
        if not row.series:
            continue
        verdict = latest.get(row.request)
        read = f"{verdict.tier.value} " if verdict is not None and verdict.tier.value != row.grade.value else ""
        counts = found.setdefault(row.series, {})
        name = f"{read}{row.grade.value}"
        counts[name] = counts.get(name, 0) + 1
    return {series: ", ".join(f"{count} {name}" for name, count in counts.items()) for series, counts in found.items()}
