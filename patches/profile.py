"""What the hooks cost on the thread that they run on, measured in the server itself (KVWITNESS_PROFILE=1)."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import Any

_LIMIT = 100_000
"""Calls of one hook of which the time is kept."""


class HookTimes:
    """Nanoseconds spent in each hook's observers."""

    def __init__(self) -> None:
        self._times: dict[str, array[int]] = {}

    def timed(self, hook: str, observer: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """``observer`` with its time taken; two clock readings (0.1 microseconds) are in the figure."""
        if observer is None:
            return None
        times = self._times.setdefault(hook, array("q"))
        run = observer

        def measured(*args: Any) -> Any:
            begin = perf_counter_ns()
            try:
                return run(*args)
            finally:
                if len(times) < _LIMIT:
                    times.append(perf_counter_ns() - begin)

        return measured

    def as_facts(self) -> dict[str, Any]:
        """Per hook that was called: calls, median and total nanoseconds."""
        return {
            hook: {"calls": len(times), "median_ns": median(times), "total_ns": sum(times)}
            for hook, times in self._times.items()
            if times
        }
