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

from kvwitness.collectors.journal import Journal
from kvwitness.collectors.kv_events import KvGap, KvRestart
from kvwitness.tracer import judgement
from kvwitness.tracer.bundle.counters import window_between
from kvwitness.tracer.judgement import Judgement
from kvwitness.tracer.outside.recorder import Recorder, Stop, Wanted
from kvwitness.tracer.outside.records import Counted, Line, Server, Unanswered
from kvwitness.tracer.spans.follow import Follower
from kvwitness.tracer.watch.tallies import SETTLE_S, News, Tallies

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
    """Rounds over one source. ``begin`` and ``end`` around them; used by one thread."""

    def __init__(self, source: Source, view: View) -> None:
        self._view = view
        self._follower = Follower(source.directory) if source.directory is not None else None
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._recorder = Recorder(source.wanted, self._put) if source.wanted is not None else None
        self._tallies = Tallies(SETTLE_S if source.wanted is None else 2 * SETTLE_S)
        self._judged: Judgement | None = None
        self._silent = False

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
        if self._follower is None:
            return
        if self._follower.refresh() or self._judged is None:
            self._judged = judgement.judge(self._follower.journals, None, self._window())
        journals = self._follower.journals
        news = self._tallies.take(self._judged, journals, now_s, _alive(journals), all_=last)
        self._view.news(news, now_s)

    def _window(self) -> judgement.CounterWindow | None:
        if self._recorder is None:
            return None
        readings = self._recorder.since_reset
        return window_between(*readings) if readings is not None else None

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


def _alive(journals: Sequence[Journal]) -> Iterable[int]:
    """The processes of the journals that run; those of another machine are taken to."""
    here = socket.gethostname()
    for journal in journals:
        if journal.info.get("host") not in (None, here) or psutil.pid_exists(journal.pid):
            yield journal.pid
