"""Bounded waiting for events: ask again with growing pauses until the answer is in or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from kvwitness.collectors.metrics import HICACHE_COUNTERS, MetricsSnapshot, MetricsUnavailable

_LONGEST_PAUSE_S: Final = 0.5
_QUIET_READINGS: Final = 3
_QUIET_LIMIT_S: Final = 3.0


class Clock(Protocol):
    """Time, replaceable in tests."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The real one."""

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def wait_until(ask: Callable[[], bool | None], timeout_s: float, pause_s: float, clock: Clock) -> bool | None:
    """Ask until the answer is True (then True), or the time is up (then the last answer).

    None, "cannot tell", ends the wait at once: asking again costs time and does not help the run.
    """
    deadline = clock.monotonic() + timeout_s
    while True:
        answer = ask()
        left = deadline - clock.monotonic()
        if answer is None or answer or left <= 0:
            return answer
        clock.sleep(min(pause_s, left))
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def wait_until_quiet(read: Callable[[], MetricsSnapshot], pause_s: float, clock: Clock) -> bool | None:
    """Wait until the HiCache counters stand still for some readings; False when they never do, None without metrics.

    Weaker than an observer: a copy that has not been acknowledged yet has not been counted either.
    """
    deadline = clock.monotonic() + _QUIET_LIMIT_S
    same = 1
    try:
        last = _counters(read())
        while same < _QUIET_READINGS:
            if clock.monotonic() >= deadline:
                return False
            clock.sleep(pause_s)
            now = _counters(read())
            same = same + 1 if now == last else 1
            last = now
    except MetricsUnavailable:
        return None
    return True


def _counters(snapshot: MetricsSnapshot) -> tuple[tuple[str, object, float], ...]:
    return tuple(
        (sample.name, sample.labels, sample.value) for sample in snapshot.samples if sample.name in HICACHE_COUNTERS
    )
