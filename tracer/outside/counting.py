"""The server's counters over an interval, one number for the server, and what a sum over ranks makes of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import msgspec

from kvwitness.collectors.metrics import (
    BACKUP_TOKENS,
    CACHED_TOKENS,
    DROPPED_TOKENS,
    EVICTED_TOKENS,
    HICACHE_COUNTERS,
    HICACHE_GAUGES,
    LOAD_BACK_BYTES,
    LOAD_BACK_TOKENS,
    ChangeStatus,
    MetricsDelta,
    MetricsSnapshot,
    delta,
)
from kvwitness.tracer.outside.records import Counted

PROMPT_TOKENS: Final = "sglang:prompt_tokens_total"
REQUESTS: Final = "sglang:num_requests_total"
EVICTION_SECONDS: Final = "sglang:eviction_duration_seconds"
_LABELS: Final = {CACHED_TOKENS: "cache_source", LOAD_BACK_TOKENS: "pool", BACKUP_TOKENS: "pool"}
_NAMES: Final = (*HICACHE_COUNTERS, PROMPT_TOKENS, REQUESTS)
_RANK: Final = "tp_rank"

CACHED_DEVICE: Final = f"{CACHED_TOKENS}{{device}}"
CACHED_HOST: Final = f"{CACHED_TOKENS}{{host}}"
CACHED_STORAGE: Final = f"{CACHED_TOKENS}{{storage}}"
LOADED: Final = f"{LOAD_BACK_TOKENS}{{kv}}"
BACKED_UP: Final = f"{BACKUP_TOKENS}{{kv}}"
EVICTED: Final = EVICTED_TOKENS
DROPPED: Final = DROPPED_TOKENS
LOADED_BYTES: Final = LOAD_BACK_BYTES


def gains(change: MetricsDelta) -> dict[str, float]:
    """What each counter gained. A counter that never fired, or whose gain is not known, has no key."""
    found: dict[str, float] = {}
    for name in _NAMES:
        label = _LABELS.get(name)
        if label is None:
            amount = change.increase(name)
            if amount is not None:
                found[name] = amount
            continue
        changes = [one for one in change.select(name) if one.status is not ChangeStatus.ABSENT]
        for value in sorted({dict(one.labels).get(label, "") for one in changes}):
            amount = change.increase(name, **{label: value}) if value else change.increase(name)
            if amount is not None and value != "total":
                # Releases before 0.5.20 have no pools: all is full-attention KV.
                key = value.partition("_")[0] if name == CACHED_TOKENS else (value or "kv")
                found[f"{name}{{{key}}}"] = found.get(f"{name}{{{key}}}", 0.0) + amount
    return found


def counted(before: MetricsSnapshot, after: MetricsSnapshot) -> Counted:
    """The line about one interval."""
    change = delta(before, after, (*_NAMES, *HICACHE_GAUGES))
    gauges = {name: value for name in HICACHE_GAUGES if (value := after.value(name)) is not None}
    return Counted(before.wall_ns, after.wall_ns, change.reset, gains(change), gauges)


def carries_rank(snapshot: MetricsSnapshot) -> bool:
    """Whether the server's cache counters say which rank counted."""
    found = [s for name in (LOAD_BACK_TOKENS, EVICTED_TOKENS, BACKUP_TOKENS) for s in snapshot.select(name)]
    return any(sample.label(_RANK) is not None for sample in found)


class Totals(msgspec.Struct, frozen=True):
    """Everything that was counted in a recording. ``resets``: moments (ns since the epoch) of known restarts."""

    gained: dict[str, float]
    resets: tuple[int, ...]
    intervals: int
    from_ns: int = 0
    to_ns: int = 0
    """The first and the last reading."""

    def get(self, name: str) -> float | None:
        """None: the counter never fired, or the server has none of this name."""
        return self.gained.get(name)


def totals(lines: Iterable[Counted]) -> Totals:
    """Add up the intervals; one with a reset adds nothing, as what it counted is not known."""
    gained: dict[str, float] = defaultdict(float)
    resets: list[int] = []
    count = first = last = 0
    for line in lines:
        count += 1
        first, last = first or line.from_ns, line.at_ns
        if line.reset:
            resets.append(line.at_ns)
        for name, amount in line.gained.items():
            gained[name] += amount
    return Totals(dict(gained), tuple(resets), count, first, last)
