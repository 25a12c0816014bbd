"""Watch a server: read what it records and what it says, round by round, until told to stop."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
import psutil

from kvwitness.collectors.kv_events import KvGap, KvRestart
from kvwitness.collectors.metrics import MetricsSnapshot
from kvwitness.collectors.tail import TailState
from kvwitness.tracer import judgement
from kvwitness.tracer.bundle.counters import window_between
from kvwitness.tracer.growing import Growing
from kvwitness.tracer.judgement import Judgement
from kvwitness.tracer.outside.recorder import Recorder, Stop, Wanted
from kvwitness.tracer.outside.records import Counted, Line, Server, Unanswered
from kvwitness.tracer.watch.tallies import SETTLE_S, News, Tallies

_READING_NS: Final = 30_000_000_000
_READINGS: Final = 64
_SHARE: Final = 4
"""The pause is at least so many times as long as the round before it: watching must not use up a processor."""


class View(Protocol):
    """Where a round's results go."""

    def news(self, news: News, now_s: float) -> None: ...

    def counted(self, line: Counted) -> None: ...

    def server(self, line: Server) -> None: ...

    def unanswered(self, line: Unanswered) -> None: ...

    def gap(self, text: str) -> None: ...


class Source(msgspec.Struct, frozen=True):
    """What to watch: a folder of journals, a server's address, or both."""

    directory: Path | None
    wanted: Wanted | None


class Watcher:
    """Rounds over one source; used by one thread. ``growing``: how much of its journals to remember."""

    def __init__(self, source: Source, view: View, growing: Growing | None = None) -> None:
        self._view = view
        self._growing = growing or (Growing(source.directory) if source.directory is not None else None)
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._recorder = Recorder(source.wanted, self._put) if source.wanted is not None else None
        self._tallies = Tallies(SETTLE_S if source.wanted is None else 2 * SETTLE_S)
        self._judged: Judgement | None = None
        self._silent = False
        self._base: MetricsSnapshot | None = None
        self._readings: list[MetricsSnapshot] = []
        """Of the server's counters, since it was started: to compare with as much as is remembered."""

    @property
    def not_recorded(self) -> dict[str, str]:
        """Witnesses from outside that give nothing, and why."""
        return self._recorder.not_recorded if self._recorder is not None else {}

    def begin(self) -> None:
        """Start. Raises ServerInfoUnavailable."""
        if self._recorder is not None:
            self._recorder.begin()

    def round(self, now_s: float, *, last: bool = False) -> None:
        """Read everything once."""
        if self._recorder is not None:
            if last:
                self._recorder.end("ended by the user")
            else:
                self._recorder.round()
            self._drain()
        growing = self._growing
        if growing is None:
            return
        while True:
            if growing.refresh(now_s, last=last) or self._judged is None:
                instances = growing.instances()
                self._judged = judgement.judge_instances(instances, None, self._window(growing.remembered_since_ns))
            states, leaving = growing.states, growing.leaving()
            whole = last and not growing.behind
            news = self._tallies.take(self._judged, states, now_s, _alive(states), leaving=leaving, all_=whole)
            self._view.news(news, now_s)
            growing.forget(leaving)
            if not growing.behind:
                return

    def _window(self, since_ns: int) -> judgement.CounterWindow | None:
        """What the server's counters gained, from where on everything is remembered."""
        readings = self._recorder.since_reset if self._recorder is not None else None
        if readings is None:
            return None
        base, now = readings
        if base is not self._base:
            self._base, self._readings = base, [base]
        if not self._readings or now.wall_ns - self._readings[-1].wall_ns >= _READING_NS:
            self._readings.append(now)
            if len(self._readings) > _READINGS:
                del self._readings[1::2]
        while self._readings and self._readings[0].wall_ns <= since_ns:
            del self._readings[0]
        if not self._readings or self._readings[0] is now:
            return None
        return window_between(self._readings[0], now)

    def _put(self, _file: str, line: Line) -> None:
        self._lines.put(line)

    def _drain(self) -> None:
        while not self._lines.empty():
            line = self._lines.get()
            match line:
                case Counted():
                    self._answers(line)
                case Server():
                    self._view.server(line)
                case Unanswered():
                    if not self._silent:
                        self._view.gap(f"the server does not answer: {line.problem}")
                    self._silent = True
                    self._view.unanswered(line)
                case KvGap(first=first, last=last, cause=cause):
                    self._view.gap(f"KV events {first} to {last} of dp rank {line.rank}: {cause}")
                case KvRestart(cause=cause):
                    self._view.gap(f"KV events of dp rank {line.rank}: another server process ({cause})")
                case _:
                    continue

    def _answers(self, line: Counted) -> None:
        if line.reset:
            self._view.gap("the server was restarted: its counters began anew, what it counted in between is not known")
        elif self._silent:
            self._view.gap("the server answers again")
        self._silent = False
        self._view.counted(line)


def watch(watcher: Watcher, stop: Stop, interval_s: float, shown: Callable[[float], None]) -> None:
    """Rounds until ``stop`` is set, and one more; ``shown`` is called after each with the time (monotonic, s)."""
    watcher.begin()
    while True:
        last = stop.is_set()
        began = time.monotonic()
        watcher.round(began, last=last)
        shown(began)
        if last:
            return
        stop.wait(max(interval_s, _SHARE * (time.monotonic() - began)))


def _alive(journals: Sequence[TailState]) -> Iterable[int]:
    """The processes of the journals that run; those of another machine are taken to."""
    here = socket.gethostname()
    for journal in journals:
        if journal.info.get("host") not in (None, here) or psutil.pid_exists(journal.pid):
            yield journal.pid
