"""Following journals that grow: what is sent when, and what happens to an endpoint that goes away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from journal_tools import ABC, to_bytes

from kvwitness.collectors.journal import Journal, read_journal
from kvwitness.patches.recorder import Recorder
from kvwitness.patches.schema import format as fmt
from kvwitness.patches.schema.events import Closed, Prefill, PrefillDone, Queued, Released, Text
from kvwitness.tracer.bundle.snapshot import whole_records
from kvwitness.tracer.judgement import Judgement, judge
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.build import build_spans
from kvwitness.tracer.spans.follow import Follower
from kvwitness.tracer.spans.live import LiveResult, Outbox, follow
from kvwitness.tracer.spans.sender import Sender, SendError
from kvwitness.tracer.spans.spec import SpanSpec

from .made import instance, judged, load, request
from .recorded import RIDS
from .test_export import endpoint
from .waiting import wait_for

EVENTS = read_journal(ABC).events
NAME = "scheduler-1-2.kvwj"


class Sink:
    """An endpoint of the test's own."""

    url = "http://sink"

    def __init__(self) -> None:
        self.spans: list[SpanSpec] = []
        self.down = False
        self.tries = 0

    def send(self, spans: Sequence[SpanSpec]) -> None:
        self.tries += 1
        if self.down:
            raise SendError("it is down")
        self.spans.extend(spans)

    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def requests(self) -> list[str]:
        return [str(span.attributes[sc.RID]) for span in self.spans if span.name == sc.REQUEST]


class Growing:
    """A journal of the recorded run that has its full size from the start, and its events one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = to_bytes(EVENTS)
        self._ends = [fmt.HEADER_BYTES + end for _, end, _ in whole_records(self._raw[fmt.HEADER_BYTES :])]
        assert len(self._ends) == len(EVENTS)
        path.write_bytes(bytes(len(self._raw)))

    def grow(self, count: int) -> None:
        with self.path.open("r+b") as file:
            file.write(self._raw[: self._ends[count - 1]])


def released(rid: str) -> int:
    """How many events there are up to the release of a request."""
    names = {event.id: event.text for event in EVENTS if isinstance(event, Text)}
    return max(i for i, e in enumerate(EVENTS, 1) if isinstance(e, Released) and names[e.req] == rid)


@contextmanager
def following(directory: Path, sink: Sink, **options: float) -> Iterator[Callable[[], LiveResult]]:
    """`follow` in a thread of its own; the callable ends it."""
    stop = threading.Event()
    results: list[LiveResult] = []
    lines: list[str] = []
    thread = threading.Thread(
        target=lambda: results.append(
            follow(directory, sink, interval_s=0.02, stop=stop, progress=lines.append, **options)
        )
    )
    thread.start()

    def end() -> LiveResult:
        stop.set()
        thread.join(20)
        return results[0]

    try:
        yield end
    finally:
        stop.set()
        thread.join(20)


# --- which spans may go --------------------------------------------------------------------------------


def test_a_request_waits_for_its_load() -> None:
    sink = Sink()
    outbox = Outbox(sink, 10, lambda line: None)
    one = request("R", 10, 30, loads=(12,))
    outbox.offer(build_spans(judged(instance(requests=(one,), loads=(load(12, "R", 8, None),)))), now=100)
    outbox.send(100)
    assert sink.names() == []
    outbox.offer(build_spans(judged(instance(requests=(one,), loads=(load(12, "R", 8, 35),)))), now=101)
    outbox.send(101)
    assert set(sink.names()) == {sc.REQUEST, sc.QUEUE, sc.LOAD_BACK, sc.PREFILL}
    outbox.send(102)
    assert len(sink.spans) == 4


def test_what_never_comes_is_not_waited_for_for_ever() -> None:
    sink = Sink()
    outbox = Outbox(sink, 10, lambda line: None)
    alone = instance(ranks={"tp_rank": 0, "tp_size": 2}, requests=(request("R", 10, 30),))
    outbox.offer(build_spans(judged(alone)), now=100)
    outbox.send(109.9)
    assert sink.spans == []
    outbox.send(110)
    assert sc.REQUEST in sink.names()


def test_a_request_that_runs_is_sent_at_the_end_only() -> None:
    sink = Sink()
    outbox = Outbox(sink, 0, lambda line: None)
    outbox.offer(build_spans(judged(instance(requests=(request("R", 10, None),)))), now=100)
    outbox.send(1000)
    assert sink.spans == []
    outbox.send(1001, everything=True)
    assert set(sink.names()) == {sc.REQUEST, sc.QUEUE, sc.PREFILL, sc.EPOCH}
    assert outbox.result() == LiveResult(4, 0, "")


def test_an_endpoint_that_is_down_is_tried_again_and_counted() -> None:
    sink, lines = Sink(), list[str]()
    outbox = Outbox(sink, 10, lines.append)
    outbox.offer(build_spans(judged(instance(requests=(request("R", 10, 30),)))), now=0)
    sink.down = True
    begin = time.monotonic()
    outbox.send(begin)
    outbox.send(begin + 0.1)
    assert sink.tries == 1, "not again at once"
    outbox.send(begin + 5)
    assert sink.tries == 2
    assert outbox.result() == LiveResult(0, 4, "it is down")
    assert lines == ["cannot send to http://sink: it is down; trying again, 3 spans wait"]
    sink.down = False
    outbox.send(begin + 60)
    assert outbox.result() == LiveResult(3, 1, "")
    assert lines[1:] == ["sending to http://sink again", "3 spans sent"]


# --- following -----------------------------------------------------------------------------------------


def test_requests_are_sent_as_they_finish_and_the_rest_at_the_end(tmp_path: Path) -> None:
    journal, sink = Growing(tmp_path / NAME), Sink()
    with following(tmp_path, sink) as end:
        journal.grow(released(RIDS["A"]))
        wait_for(lambda: RIDS["A"] in sink.requests(), 10)
        assert RIDS["B"] not in sink.requests()
        journal.grow(released(RIDS["C"]) - 1)
        wait_for(lambda: RIDS["fill 4"] in sink.requests(), 10)
        wait_for(lambda: sc.EVICTION in sink.names() and sc.RESIDENCY_L1 in sink.names(), 10)
        assert sc.RESIDENCY_L2 not in sink.names()  # all still there
        journal.grow(len(EVENTS) - 1)
        wait_for(lambda: RIDS["C2"] in sink.requests(), 10)
        assert sc.EPOCH not in sink.names()
        result = end()
    [again] = [read_journal(journal.path)]
    everything = build_spans(judge([again]))
    assert result == LiveResult(len(everything), 0, "")
    assert sorted(sink.spans, key=lambda s: s.ref) == sorted(everything, key=lambda s: s.ref)


def test_nothing_is_judged_when_nothing_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, sink, judged_times = Growing(tmp_path / NAME), Sink(), list[int]()

    def counting(journals: Sequence[Journal]) -> Judgement:
        judged_times.append(1)
        return judge(journals)

    monkeypatch.setattr("kvwitness.tracer.judgement.judge", counting)
    with following(tmp_path, sink):
        journal.grow(100)
        wait_for(lambda: len(judged_times) == 1, 10)
        time.sleep(0.3)
        assert len(judged_times) == 1
        journal.grow(101)
        wait_for(lambda: len(judged_times) == 2, 10)


def test_a_mark_sees_every_event_and_nothing_else(tmp_path: Path) -> None:
    journal = Growing(tmp_path / NAME)
    follower = Follower(tmp_path)
    assert not follower.refresh(), "no header yet"
    for count in range(1, len(EVENTS), 7):
        journal.grow(count)
        assert follower.refresh()
        assert not follower.refresh()
        assert len(follower.journals[0].events) == count
    journal.grow(len(EVENTS))
    assert follower.refresh() and follower.journals[0].closed
    assert isinstance(EVENTS[-1], Closed)
    journal.path.unlink()
    assert not follower.refresh()
    assert len(follower.journals) == 1, "what was recorded stays known"


def serve(directory: Path, rid: str, *, close: bool = True) -> Recorder:
    """What a server records of one request."""
    recorder = Recorder(directory, role="scheduler", quota_bytes=200_000, chunk_bytes=1 << 13)
    number = recorder.text(rid)
    recorder.emit(Queued, number, 10, 0)
    recorder.emit(Prefill, number, 1, 0, 10, 1)
    recorder.emit(PrefillDone, number, 1, 1)
    recorder.emit(Released, number, 1, 1, 0, 0, 0, 0)
    if close:
        recorder.close()
    return recorder


def test_servers_may_restart_and_others_appear(tmp_path: Path) -> None:
    sink = Sink()
    (tmp_path / "stray.kvwj").write_bytes(b"no journal")
    with following(tmp_path, sink) as end:
        first = serve(tmp_path, "one")
        wait_for(lambda: sink.requests() == ["one"], 10)
        wait_for(lambda: sc.EPOCH in sink.names(), 10)  # the server ended in order
        second = serve(tmp_path / "sub", "two", close=False)
        wait_for(lambda: sink.requests() == ["one", "two"], 10)
        first.path.unlink()
        result = end()
        second.close()
    assert result.unsent == 0
    assert len({span.resource.instance for span in sink.spans}) == 2
    assert len({span.ref for span in sink.spans}) == len(sink.spans)


def test_an_endpoint_may_come_later(tmp_path: Path) -> None:
    serve(tmp_path, "one")
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    lines: list[str] = []
    stop = threading.Event()
    results: list[LiveResult] = []

    def run() -> None:
        with Sender(f"http://127.0.0.1:{port}", timeout_s=0.5) as sender:
            results.append(follow(tmp_path, sender, interval_s=0.05, stop=stop, progress=lines.append))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: lines, 10)
        with endpoint(port) as kept:
            wait_for(lambda: kept.requests, 20)
            stop.set()
            thread.join(20)
    finally:
        stop.set()
        thread.join(20)
    assert results == [LiveResult(4, 0, "")]
    assert len(kept.span_ids) == len(set(kept.span_ids)) == 4
    assert lines[0].startswith("cannot send") and lines[1].startswith("sending to")


# --- the command ---------------------------------------------------------------------------------------


def collect(directory: Path, url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from kvwitness.tracer.cli import main; main()"]
    command += ["collect", "--dir", str(directory), "--otlp", url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_sends_what_is_left(tmp_path: Path, number: signal.Signals) -> None:
    journal = Growing(tmp_path / NAME)
    journal.grow(len(EVENTS) - 1)
    with endpoint() as kept:
        process = collect(tmp_path, kept.url)
        wait_for(lambda: len(kept.span_ids) > 50, 20)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
        count = len(build_spans(judge([read_journal(journal.path)])))
        assert len(kept.span_ids) == count
        assert errors.splitlines()[-1] == f"sent {count} spans to {kept.url}"


def test_what_could_not_be_sent_is_said(tmp_path: Path) -> None:
    serve(tmp_path, "one")
    process = collect(tmp_path, "http://127.0.0.1:1")
    assert process.stderr is not None
    assert process.stderr.readline().startswith(f"following {tmp_path} (1 journal); spans go to http://127.0.0.1:1 ")
    assert process.stderr.readline().startswith("warning: http://127.0.0.1:1: nothing listens on port 1 ")
    line = process.stderr.readline()
    assert line.startswith("cannot send to http://127.0.0.1:1: ") and line.endswith("; trying again, 4 spans wait\n")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "0 spans were sent, 4 were not: " in errors.splitlines()[-1]


def test_a_folder_without_journals_is_said_and_waited_for(tmp_path: Path) -> None:
    with endpoint() as kept:
        process = collect(tmp_path, kept.url)
        assert process.stderr is not None
        assert "no journals there yet, waiting for a server that records into it" in process.stderr.readline()
        time.sleep(1.5)  # a round without a journal
        serve(tmp_path, "one")
        assert process.stderr.readline() == f"a server records into {tmp_path}; journals now: 1\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 0
        assert len(kept.span_ids) == 4
