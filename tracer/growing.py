"""The record of running servers, as it grows: read once, judged again and again, in memory that does not grow with it.

Events are read in portions and go to one ledger for each scheduler. What is settled and far enough back is forgotten:
what the tiers hold now, and what that rests on, is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvwitness.collectors.journal import JournalUnreadable
from kvwitness.collectors.tail import Tail, TailState
from kvwitness.tracer.bundle.places import recorded_journals
from kvwitness.tracer.judgement import SCHEDULER_ROLE
from kvwitness.tracer.ledger.derive import Ledger
from kvwitness.tracer.ledger.facts import InstanceFacts

REMEMBERED: Final = 50_000
"""Events of a scheduler that are remembered whole."""
PORTION: Final = 20_000
"""Events of a process that are read at a time."""
_AT_A_TIME: Final = 4
"""Forgetting walks over everything that is known: a fourth of what is remembered has to be there to forget."""


class _Process:
    """One journal, and the ledger of it when it is a scheduler's."""

    def __init__(self, path: Path) -> None:
        self.tail = Tail(path)
        self.state = self.tail.state
        self.ledger = Ledger() if self.state.role == SCHEDULER_ROLE else None
        self.facts: InstanceFacts | None = None
        """As of the last look at it; None: something came since."""

    def read(self, most: int, now_s: float, last: bool) -> bool:
        """Read on; whether anything has changed."""
        events = self.tail.read(most, now_s, last=last)
        if events and self.ledger is not None:
            self.ledger.take(events)
        state = self.tail.state
        changed, self.state = bool(events) or state != self.state, state
        if changed:
            self.facts = None
        return changed


class Growing:
    """The journals below a folder that servers write to. Used by one thread."""

    def __init__(self, directory: Path, *, remembered: int = REMEMBERED, portion: int = PORTION) -> None:
        self._directory = directory
        self._remembered = remembered
        self._portion = portion
        self._processes: dict[Path, _Process] = {}
        self.behind = False
        """There was more to read than a portion."""

    @property
    def states(self) -> list[TailState]:
        """What the journals say of themselves, by name."""
        return [process.state for process in self._by_name()]

    @property
    def remembered_since_ns(self) -> int:
        """What happened before this (ns since the epoch) is not remembered whole (0: everything is)."""
        return max((facts.remembers_from_ns for facts in self.instances()), default=0)

    def refresh(self, now_s: float, *, last: bool = False) -> bool:
        """Read a portion of what was added; whether anything has changed. ``now_s``: a monotonic clock.

        ``last``: nothing more will be written.
        """
        changed = self.behind = False
        for path in recorded_journals(self._directory):
            try:
                process = self._processes.get(path)
                if process is None:
                    process = self._processes[path] = _Process(path)
                    changed = True
                if not process.state.closed:
                    changed = process.read(self._portion, now_s, last) or changed
                    self.behind = self.behind or process.tail.behind
            except (JournalUnreadable, OSError):
                continue  # Being created, or removed: the next round looks again.
        return changed

    def instances(self) -> tuple[InstanceFacts, ...]:
        """What is known of each scheduler."""
        found = []
        for process in self._by_name():
            if process.ledger is not None:
                if process.facts is None:
                    process.facts = process.ledger.facts(process.state)
                found.append(process.facts)
        return tuple(found)

    def leaving(self) -> frozenset[str]:
        """Requests that :meth:`forget` will drop; empty unless there is enough to forget."""
        ledgers = [p.ledger for p in self._processes.values() if p.ledger is not None]
        if not any(ledger.last - self._remembered - ledger.remembers_from > self._least for ledger in ledgers):
            return frozenset()
        settled = [ledger.settled(ledger.last - self._remembered) for ledger in ledgers]
        # A request that several ranks served is dropped by all of them at once, or told of twice.
        still = frozenset[str]().union(*(ledger.rids() - gone for ledger, gone in zip(ledgers, settled, strict=True)))
        return frozenset[str]().union(*settled) - still

    def forget(self, rids: frozenset[str]) -> None:
        """Drop these, and everything else that is settled and far enough back."""
        for process in self._processes.values():
            ledger = process.ledger
            if ledger is not None and (rids or ledger.last - self._remembered - ledger.remembers_from > self._least):
                ledger.forget(rids, max(ledger.last - self._remembered, 0))
                process.facts = None

    @property
    def _least(self) -> int:
        return self._remembered // _AT_A_TIME

    def _by_name(self) -> list[_Process]:
        return [self._processes[path] for path in sorted(self._processes, key=lambda path: path.name)]
