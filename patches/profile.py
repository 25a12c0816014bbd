"""What the hooks cost on the thread that they run on, measured in the server itself (KVWITNESS_PROFILE=1)."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import Any

_LIMIT = 100_000
"""Calls of one hook that its median is taken of: the first ones. All are counted."""


class _Times:
    """Nanoseconds spent in one hook's observers."""

    __slots__ = ("calls", "kept", "total")

    def __init__(self) -> None:
        self.calls = self.total = 0
        self.kept = array("q")


class HookTimes:
    """Nanoseconds spent in each hook's observers."""

    def __init__(self) -> None:
        self._times: dict[str, _Times] = {}

    def timed(self, hook: str, observer: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """``observer`` with its time taken; two clock readings (0.1 microseconds) are in the figure."""
        if observer is None:
            return None
        times = self._times.setdefault(hook, _Times())
        run = observer

        def measured(*args: Any) -> Any:
            begin = perf_counter_ns()
            try:
                return run(*args)
            finally:
                spent = perf_counter_ns() - begin
                times.calls += 1
                times.total += spent
                if times.calls <= _LIMIT:
                    times.kept.append(spent)

        return measured

    def as_facts(self) -> dict[str, Any]:
        """Per hook that was called: calls of its observers, median and total nanoseconds."""
        return {
            hook: {"calls": times.calls, "median_ns": median(times.kept), "total_ns": times.total}
            for hook, times in self._times.items()
            if times.calls
        }
