"""Send the spans of running servers: each request's trace when its verdict is settled, the rest as it closes."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import msgspec

from kvwitness.collectors.journal import Journal
from kvwitness.tracer import judgement
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.build import build_spans
from kvwitness.tracer.spans.follow import Follower
from kvwitness.tracer.spans.sender import SendError, batches
from kvwitness.tracer.spans.spec import SpanSpec

INTERVAL_S: Final = 1.0
"""Between two looks at the journals."""

SEND_TIMEOUT_S: Final = 5.0
"""For one batch: an endpoint that is down must not stop the collector from ending."""

SETTLE_S: Final = 10.0
"""How long a released request waits for what may never come: an acknowledgement, a rank's journal."""

_SHARE: Final = 4
"""A round reads and judges all that was recorded (a journal's quota bounds that), so the pause after it is
at least this many times as long: a long run slows the rounds down instead of using up a processor."""

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
_REPORT_EVERY_S: Final = 10.0

Progress = Callable[[str], None]


class Stop(Protocol):
    """When to end; a ``threading.Event`` is one."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class SpanSink(Protocol):
    """Where batches go; a :class:`~kvwitness.tracer.spans.sender.Sender` is one."""

    url: str

    def send(self, spans: Sequence[SpanSpec]) -> None: ...


class LiveResult(msgspec.Struct, frozen=True):
    """What became of the spans."""

    sent: int
    unsent: int
    problem: str
    """Why the last ones were not taken (empty when all were)."""


def hosts_of(journals: Sequence[Journal]) -> dict[str, str]:
    """The machine of each process, as it recorded it."""
    found = ((journal.instance, journal.info.get("host")) for journal in journals)
    return {instance: host for instance, host in found if isinstance(host, str)}


def follow(
    directory: Path,
    sink: SpanSink,
    *,
    interval_s: float = INTERVAL_S,
    settle_s: float = SETTLE_S,
    stop: Stop | None = None,
    progress: Progress | None = None,
) -> LiveResult:
    """Send spans until ``stop`` is set (None: until SIGINT or SIGTERM), then send what is left, and end."""
    with stop_on_signal(stop) as until:
        say = progress or (lambda line: None)
        outbox = Outbox(sink, settle_s, say)
        follower = Follower(directory)
        known: int | None = None
        while True:
            stopping = until.is_set()
            began = time.monotonic()
            if follower.refresh():
                journals = follower.journals
                if known is not None and len(journals) > known:
                    say(f"a server records into {directory}; journals now: {len(journals)}")
                outbox.offer(build_spans(judgement.judge(journals), hosts=hosts_of(journals)), began)
            known = len(follower.journals)
            outbox.send(time.monotonic(), everything=stopping)
            if stopping:
                return outbox.result()
            until.wait(max(interval_s, _SHARE * (time.monotonic() - began)))


class Outbox:
    """The spans that the endpoint has not taken yet, and which of them may go."""

    def __init__(self, sink: SpanSink, settle_s: float, progress: Progress) -> None:
        self._sink = sink
        self._settle_s = settle_s
        self._progress = progress
        self._sent: set[str] = set()
        self._waiting: list[SpanSpec] = []
        self._released: dict[str, float] = {}
        """When each request that is not settled was first seen to be released."""
        self._problem = ""
        self._pause_s = _FIRST_PAUSE_S
        self._not_before = 0.0
        self._reported = (0, float("-inf"))

    def offer(self, spans: Sequence[SpanSpec], now: float) -> None:
        """All spans as they are known now, those that were sent included."""
        self._waiting = [span for span in spans if span.ref.span_id not in self._sent]
        for span in self._waiting:
            if span.name == sc.REQUEST and not span.open:
                self._released.setdefault(span.unit, now)

    def send(self, now: float, *, everything: bool = False) -> None:
        """Send what is settled; with ``everything`` what is still open as well."""
        if now < self._not_before and not everything:
            return
        ready = self._waiting if everything else self._settled(now)
        try:
            for batch in batches(ready):
                self._sink.send(batch)
                self._sent.update(span.ref.span_id for span in batch)
                self._recovered()
        except SendError as error:
            self._failed(str(error), len(ready))
        self._waiting = [span for span in self._waiting if span.ref.span_id not in self._sent]
        self._report(now)

    def result(self) -> LiveResult:
        """The counts so far."""
        return LiveResult(len(self._sent), len(self._waiting), self._problem)

    def _settled(self, now: float) -> list[SpanSpec]:
        units: dict[str, list[SpanSpec]] = defaultdict(list)
        for span in self._waiting:
            units[span.unit].append(span)
        return [span for unit, spans in units.items() if self._may_go(unit, spans, now) for span in spans]

    def _may_go(self, unit: str, spans: Sequence[SpanSpec], now: float) -> bool:
        if all(span.complete for span in spans):
            return True
        if any(span.open for span in spans if span.name == sc.REQUEST):
            return False
        released = self._released.get(unit)
        return released is not None and now - released >= self._settle_s

    def _failed(self, why: str, ready: int) -> None:
        if not self._problem:
            self._progress(f"cannot send to {self._sink.url}: {why}; trying again, {ready} spans wait")
        self._problem = why
        # From now, not from the round's begin: a failure takes its time.
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _recovered(self) -> None:
        if self._problem:
            self._progress(f"sending to {self._sink.url} again")
        self._problem, self._pause_s, self._not_before = "", _FIRST_PAUSE_S, 0.0

    def _report(self, now: float) -> None:
        count, at = self._reported
        if len(self._sent) > count and now - at >= _REPORT_EVERY_S:
            self._reported = (len(self._sent), now)
            self._progress(f"{len(self._sent)} spans sent")


@contextmanager
def stop_on_signal(stop: Stop | None) -> Iterator[Stop]:
    """``stop`` itself; without one, an event that the first SIGINT or SIGTERM sets. A second one ends at once."""
    if stop is not None:
        yield stop
        return
    event = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def on_signal(number: int, frame: object) -> None:
        event.set()
        for each in numbers:
            signal.signal(each, before[each])

    try:
        for number in numbers:
            signal.signal(number, on_signal)
        yield event
    finally:
        for number in numbers:
            signal.signal(number, before[number])
