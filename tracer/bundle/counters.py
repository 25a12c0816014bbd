"""What the server's counters gained during a run, from the metrics that a bundle keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvwitness.collectors.metrics import (
    BACKUP_TOKENS,
    EVICTED_TOKENS,
    LOAD_BACK_TOKENS,
    MetricsDelta,
    MetricsSnapshot,
    MetricsUnavailable,
    hicache_delta,
    parse_stamped,
)
from kvwitness.tracer.verdicts.counters import BACKED_UP, EVICTED, LOADED, CounterWindow

BEFORE: Final = "before"
AFTER: Final = "after"
_COUNTERS: Final = {LOADED: LOAD_BACK_TOKENS, BACKED_UP: BACKUP_TOKENS, EVICTED: EVICTED_TOKENS}


def window_of(metrics: Mapping[str, str]) -> CounterWindow | None:
    """The window between the readings ``before`` and ``after``; None when one of them is not usable."""
    if BEFORE not in metrics or AFTER not in metrics:
        return None
    try:
        return window_between(parse_stamped(metrics[BEFORE]), parse_stamped(metrics[AFTER]))
    except MetricsUnavailable:
        return None


def window_between(before: MetricsSnapshot, after: MetricsSnapshot) -> CounterWindow:
    """The window between two readings; what is not known is left out."""
    change = hicache_delta(before, after)
    tokens = {name: gain for name, series in _COUNTERS.items() if (gain := _gain(change, series)) is not None}
    return CounterWindow(change.from_ns, change.to_ns, tokens)


def _gain(change: MetricsDelta, series: str) -> int | None:
    """Tokens gained, of the full-attention pool where the series has pools.

    None for a counter that was never exported: it may be one that this release does not have.
    """
    gain = change.increase(series, pool="kv")
    if gain is None:
        gain = change.increase(series)
    return None if gain is None else int(gain)
