"""The server's Prometheus metrics: fetched, kept as they came, and compared between two moments.

A counter that the server has not exported is *absent*, which is not zero: most of SGLang's HiCache counters
appear only when they first count. A counter that went down was reset (the server restarted), and then no
difference across the reset is known, neither of this counter nor of any other of the same server.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

CACHED_TOKENS: Final = "sglang:cached_tokens_total"
"""Prompt tokens that were not computed, by ``cache_source`` (device, host, storage_*, total)."""
LOAD_BACK_TOKENS: Final = "sglang:load_back_tokens_total"
"""Tokens copied from L2 to L1, by ``pool``."""
LOAD_BACK_BYTES: Final = "sglang:load_back_bytes_total"
BACKUP_TOKENS: Final = "sglang:hicache_backup_tokens_total"
"""Tokens copied from L1 to L2, by ``pool``."""
BACKUP_BYTES: Final = "sglang:hicache_backup_bytes_total"
EVICTED_TOKENS: Final = "sglang:evicted_tokens_total"
"""L1 token slots freed by eviction."""
DROPPED_TOKENS: Final = "sglang:hicache_dropped_tokens_total"
"""L1 tokens destroyed without a host copy, by ``reason``."""
HOST_USED_TOKENS: Final = "sglang:hicache_host_used_tokens"
HOST_TOTAL_TOKENS: Final = "sglang:hicache_host_total_tokens"

HICACHE_COUNTERS: Final = (
    CACHED_TOKENS,
    LOAD_BACK_TOKENS,
    LOAD_BACK_BYTES,
    BACKUP_TOKENS,
    BACKUP_BYTES,
    EVICTED_TOKENS,
    DROPPED_TOKENS,
)
HICACHE_GAUGES: Final = (HOST_USED_TOKENS, HOST_TOTAL_TOKENS)
HICACHE_SERIES: Final = HICACHE_COUNTERS + HICACHE_GAUGES

_PER_RANK_SUM: Final = frozenset({LOAD_BACK_BYTES, BACKUP_BYTES})
"""Every rank copies its own shard: the bytes of the ranks add up. Token counts of TP and PP ranks do not."""
_REPLICA_LABELS: Final = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})

Labels = tuple[tuple[str, str], ...]


class MetricsUnavailable(Exception):
    """The metrics could not be read; the message says why and what to do."""


class Sample(msgspec.Struct, frozen=True):
    """One series at one moment. ``labels`` are sorted by name."""

    name: str
    labels: Labels
    value: float
    counter: bool
    """True for what only ever goes up (counters, histogram buckets, counts and sums)."""

    def label(self, name: str) -> str | None:
        """The value of label ``name``; None when the series does not carry it."""
        return next((value for key, value in self.labels if key == name), None)


class MetricsSnapshot(msgspec.Struct, frozen=True):
    """Everything that ``/metrics`` said at one moment."""

    url: str
    wall_ns: int
    """Wall clock (ns since the epoch) after the answer was complete."""
    raw: str
    samples: tuple[Sample, ...]

    def select(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """The series ``name`` that carry all of ``labels``. Empty: the server does not export any."""
        return tuple(sample for sample in self.samples if sample.name == name and _matches(sample.labels, labels))

    def value(self, name: str, **labels: str) -> float | None:
        """One number for the server: replicas (TP and PP ranks) counted once, data-parallel ranks summed.

        None when the server exports no such series, which for a counter usually means "never happened yet".
        """
        found = self.select(name, **labels)
        return _combine(name, [(sample.labels, sample.value) for sample in found]) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """:meth:`value` for every value of ``label`` that the server exports; what never fired has no key."""
        seen = sorted({value for sample in self.select(name) if (value := sample.label(label)) is not None})
        return {value: number for value in seen if (number := self.value(name, **{label: value})) is not None}


class ChangeStatus(StrEnum):
    """How two readings of one series relate."""

    COUNTED = "counted"
    """In both snapshots."""
    APPEARED = "appeared"
    """Only in the later one: it first counted in between."""
    ABSENT = "absent"
    """In neither: it never fired (or the server does not have it)."""
    VANISHED = "vanished"
    """Only in the earlier one: unknown."""
    RESET = "reset"
    """It, or another counter of the server, went down: unknown."""


class Change(msgspec.Struct, frozen=True):
    """One series between two snapshots."""

    name: str
    labels: Labels
    before: float | None
    after: float | None
    status: ChangeStatus
    counter: bool = True

    @property
    def increase(self) -> float | None:
        """What was counted in between; None when that is not known. For a gauge: after minus before."""
        if self.status is ChangeStatus.COUNTED and self.before is not None and self.after is not None:
            return self.after - self.before
        if self.status is ChangeStatus.APPEARED and self.counter:
            return self.after
        return None


class MetricsDelta(msgspec.Struct, frozen=True):
    """What the server counted between two snapshots."""

    from_ns: int
    to_ns: int
    reset: bool
    """A counter went down: the server restarted in between and no increase is known."""
    changes: tuple[Change, ...]

    def select(self, name: str, **labels: str) -> tuple[Change, ...]:
        """The changes of series ``name`` that carry all of ``labels``."""
        return tuple(change for change in self.changes if change.name == name and _matches(change.labels, labels))

    def increase(self, name: str, **labels: str) -> float | None:
        """One number for the server, combined over ranks as in :meth:`MetricsSnapshot.value`.

        None when the series never fired *or* its increase is unknown; :meth:`never_fired` tells which.
        """
        found = [change for change in self.select(name, **labels) if change.status is not ChangeStatus.ABSENT]
        known = [(change.labels, amount) for change in found if (amount := change.increase) is not None]
        return _combine(name, known) if found and len(known) == len(found) else None

    def never_fired(self, name: str, **labels: str) -> bool:
        """No such series at either moment: nothing was counted, and whether it could be is not known."""
        return all(change.status is ChangeStatus.ABSENT for change in self.select(name, **labels))


def fetch_metrics(url: str, client: httpx.Client | None = None, timeout_s: float = 10.0) -> MetricsSnapshot:
    """Read ``<url>/metrics``.

    Raises :class:`MetricsUnavailable` when there is no answer, metrics are off, or the text is not metrics.
    """
    address = url.rstrip("/") + "/metrics"
    try:
        if client is not None:
            answer = client.get(address, timeout=timeout_s, follow_redirects=True)
        else:
            with httpx.Client(trust_env=False) as own:
                answer = own.get(address, timeout=timeout_s, follow_redirects=True)
    except httpx.HTTPError as error:
        raise MetricsUnavailable(f"{address} does not answer: {error or type(error).__name__}") from error
    if answer.status_code == 404:
        raise MetricsUnavailable(f"{address} is not there: start the server with --enable-metrics")
    if answer.status_code != 200:
        raise MetricsUnavailable(f"{address} answered {answer.status_code}")
    return parse_metrics(answer.text, time.time_ns(), url)


def parse_metrics(raw: str, wall_ns: int, url: str = "") -> MetricsSnapshot:
    """A snapshot of Prometheus text. Raises :class:`MetricsUnavailable` when it cannot be parsed."""
    try:
        samples = tuple(_samples(raw))
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsUnavailable(f"the metrics of {url or 'the server'} cannot be parsed: {error}") from error
    return MetricsSnapshot(url, wall_ns, raw, samples)


_STAMP: Final = "# kvwitness read these metrics at "


def stamped(snapshot: MetricsSnapshot) -> str:
    """The metrics as they came, with the moment of the reading in a comment before them."""
    return f"{_STAMP}{snapshot.wall_ns} ns since the epoch\n{snapshot.raw}"


def parse_stamped(text: str) -> MetricsSnapshot:
    """Read :func:`stamped` metrics again. Raises :class:`MetricsUnavailable`, also without a stamp."""
    line, _, raw = text.partition("\n")
    moment = line.removeprefix(_STAMP).split(" ")[0]
    if not line.startswith(_STAMP) or not moment.isdigit():
        raise MetricsUnavailable("the metrics do not say when they were read")
    return parse_metrics(raw, int(moment))


def delta(before: MetricsSnapshot, after: MetricsSnapshot, names: Iterable[str] | None = None) -> MetricsDelta:
    """Compare two snapshots of one server, series by series, counters and gauges.

    With ``names`` only those, and a name that neither snapshot has is listed as absent.
    """
    earlier = {(sample.name, sample.labels): sample for sample in before.samples}
    later = {(sample.name, sample.labels): sample for sample in after.samples}
    # Looked for in all counters, not only in the asked ones: a restart resets them all, also those that
    # have overtaken their old value since.
    reset = any(
        old.counter and (new := later.get(key)) is not None and new.value < old.value for key, old in earlier.items()
    )
    wanted = None if names is None else tuple(names)
    keys = sorted(key for key in earlier.keys() | later.keys() if wanted is None or key[0] in wanted)
    changes = [_change(earlier.get(key), later.get(key), reset) for key in keys]
    present = {key[0] for key in keys}
    changes.extend(Change(name, (), None, None, ChangeStatus.ABSENT) for name in wanted or () if name not in present)
    return MetricsDelta(before.wall_ns, after.wall_ns, reset, tuple(changes))


def hicache_delta(before: MetricsSnapshot, after: MetricsSnapshot) -> MetricsDelta:
    """:func:`delta` of the series that say something about HiCache; the ones never seen are listed as absent."""
    return delta(before, after, HICACHE_SERIES)


class HiCacheReading(msgspec.Struct, frozen=True):
    """The HiCache series at one moment, one number for the server. A missing key or None: never exported."""

    cached_tokens: dict[str, float]
    """By ``cache_source``."""
    load_back_tokens: dict[str, float]
    """By ``pool``."""
    load_back_bytes: float | None
    backup_tokens: dict[str, float]
    """By ``pool``."""
    evicted_tokens: float | None
    dropped_tokens: dict[str, float]
    """By ``reason``."""
    host_used_tokens: float | None
    host_total_tokens: float | None


def hicache_reading(snapshot: MetricsSnapshot) -> HiCacheReading:
    """Pick the HiCache series out of a snapshot."""
    return HiCacheReading(
        cached_tokens=snapshot.by_label(CACHED_TOKENS, "cache_source"),
        load_back_tokens=snapshot.by_label(LOAD_BACK_TOKENS, "pool"),
        load_back_bytes=snapshot.value(LOAD_BACK_BYTES),
        backup_tokens=snapshot.by_label(BACKUP_TOKENS, "pool"),
        evicted_tokens=snapshot.value(EVICTED_TOKENS),
        dropped_tokens=snapshot.by_label(DROPPED_TOKENS, "reason"),
        host_used_tokens=snapshot.value(HOST_USED_TOKENS),
        host_total_tokens=snapshot.value(HOST_TOTAL_TOKENS),
    )


def _samples(raw: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(raw):
        # "_created" timestamps and gauge histograms may go down without a restart.
        always_up = family.type in ("counter", "histogram", "summary")
        for sample in family.samples:
            counter = always_up and not sample.name.endswith("_created") and "quantile" not in sample.labels
            yield Sample(sample.name, tuple(sorted(sample.labels.items())), float(sample.value), counter)


def _change(old: Sample | None, new: Sample | None, reset: bool) -> Change:
    known = new or old
    assert known is not None
    if reset and known.counter:
        status = ChangeStatus.RESET
    elif old is None:
        status = ChangeStatus.APPEARED
    elif new is None:
        status = ChangeStatus.VANISHED
    else:
        status = ChangeStatus.COUNTED
    return Change(
        known.name, known.labels, old.value if old else None, new.value if new else None, status, known.counter
    )


def _matches(have: Labels, wanted: dict[str, str]) -> bool:
    return not wanted or wanted.items() <= dict(have).items()


def _combine(name: str, values: list[tuple[Labels, float]]) -> float:
    if name in _PER_RANK_SUM:
        return sum(value for _, value in values)
    groups: dict[Labels, float] = {}
    for labels, value in values:
        key = tuple(pair for pair in labels if pair[0] not in _REPLICA_LABELS)
        groups[key] = max(value, groups.get(key, value))
    return sum(groups.values())
