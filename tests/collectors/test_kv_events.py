"""Following a publisher: replay, gaps, restarts. The publisher is a small one over real ZeroMQ sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from kvwitness.collectors.kv_events import (
    KvCollector,
    KvDamaged,
    KvGap,
    KvLine,
    KvMessage,
    KvRestart,
    KvSource,
    NoKvEvents,
    Sequence,
    sources,
    sources_of,
)
from kvwitness.collectors.kv_wire import END_OF_REPLAY
from kvwitness.collectors.server_info import read_server_info

KEY = bytes(32)


def payload(seq: int, life: int = 0) -> bytes:
    return msgspec.msgpack.encode([1000.0 * life + seq, [["BlockStored", [seq], None, list(range(16)), 16, None]], 0])


class Publisher:
    """As SGLang's: numbered messages, and a buffer that is asked for again. ``topic``: 0.5.22 and newer."""

    def __init__(self, folder: Path, *, life: int = 0, topic: bool = True, keep: int = 100) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.bind(f"ipc://{folder}/pub")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{folder}/replay")
        self._life, self._topic, self._keep = life, topic, keep
        self._sent: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def subscribed(self) -> None:
        """Wait for a subscriber."""
        assert self._pub.poll(10_000)
        self._pub.recv()

    def send(self, seq: int, *, lose: bool = False, raw: bytes | None = None) -> None:
        content = raw if raw is not None else payload(seq, self._life)
        with self._lock:
            self._sent = [*self._sent, (seq, content)][-self._keep :] if self._keep else []
        if not lose:
            self._pub.send_multipart([b"kv", seq.to_bytes(8, "big"), content])

    def _answer(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(20):
                continue
            client, _, first = self._router.recv_multipart()
            head = [b"kv"] if self._topic else []
            with self._lock:
                sent = list(self._sent)
            for seq, content in sent:
                if seq >= int.from_bytes(first, "big"):
                    self._router.send_multipart([client, b"", *head, seq.to_bytes(8, "big"), content])
            end = [b"", END_OF_REPLAY] if self._topic else [END_OF_REPLAY, b""]
            self._router.send_multipart([client, b"", *end])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._pub.close()
        self._router.close()
        self._context.term()


@contextmanager
def publishing(folder: Path, **options: int) -> Iterator[Publisher]:
    publisher = Publisher(folder, **options)  # type: ignore[arg-type]
    try:
        yield publisher
    finally:
        publisher.close()


class Lines:
    """What a collector handed on, to wait for."""

    def __init__(self) -> None:
        self.all: list[KvLine] = []
        self._changed = threading.Condition()

    def __call__(self, line: KvLine) -> None:
        with self._changed:
            self.all.append(line)
            self._changed.notify_all()

    def until(self, seq: int, life: int = 0) -> list[KvLine]:
        """Everything up to message ``seq`` of a publisher's life."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(self._is(line, seq, life) for line in self.all), 20.0), self.all
            return list(self.all)

    @staticmethod
    def _is(line: KvLine, seq: int, life: int) -> bool:
        return isinstance(line, KvMessage) and line.seq == seq and line.batch.at_ns == (1000 * life + seq) * 10**9


@contextmanager
def following(folder: Path, *, replay: bool = True) -> Iterator[Lines]:
    source = KvSource(0, f"ipc://{folder}/pub", f"ipc://{folder}/replay" if replay else None)
    lines = Lines()
    collector = KvCollector((source,), KEY, lines)
    collector.start()
    assert collector.ready.wait(20.0)
    try:
        yield lines
    finally:
        collector.stop()


def numbers(lines: list[KvLine]) -> list[int]:
    return [line.seq for line in lines if isinstance(line, KvMessage)]


@pytest.mark.parametrize("topic", [True, False])
def test_what_was_published_before_and_what_was_lost_is_asked_for_again(tmp_path: Path, topic: bool) -> None:
    with publishing(tmp_path, topic=topic) as publisher:
        for seq in range(3):
            publisher.send(seq)
        with following(tmp_path) as lines:
            publisher.subscribed()
            publisher.send(3, lose=True)
            publisher.send(4)
            found = lines.until(4)
    assert numbers(found) == [0, 1, 2, 3, 4]
    assert [line.replayed for line in found if isinstance(line, KvMessage)] == [True, True, True, True, False]
    assert not [line for line in found if not isinstance(line, KvMessage)]


def test_what_cannot_be_had_again_is_a_gap(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher:
        for seq in range(3):
            publisher.send(seq)
        with following(tmp_path, replay=False) as lines:
            publisher.subscribed()
            publisher.send(3)
            publisher.send(4, lose=True)
            publisher.send(5)
            found = lines.until(5)
    gaps = [line for line in found if isinstance(line, KvGap)]
    assert [(gap.first, gap.last) for gap in gaps] == [(0, 2), (4, 4)]
    assert "before the recording began" in gaps[0].cause and "lost on the way" in gaps[1].cause
    assert numbers(found) == [3, 5]


def test_a_replay_that_no_longer_reaches_back_is_a_gap(tmp_path: Path) -> None:
    with publishing(tmp_path, keep=2) as publisher:
        for seq in range(5):
            publisher.send(seq)
        with following(tmp_path) as lines:
            found = lines.until(4)
    assert [(line.first, line.last) for line in found if isinstance(line, KvGap)] == [(0, 2)]
    assert numbers(found) == [3, 4]


@pytest.mark.parametrize("replay", [True, False])
def test_a_restarted_server_begins_anew(tmp_path: Path, replay: bool) -> None:
    with following(tmp_path, replay=replay) as lines:
        with publishing(tmp_path) as publisher:
            publisher.subscribed()
            publisher.send(0)
            publisher.send(1)
            lines.until(1)
        with publishing(tmp_path, life=1) as publisher:
            publisher.subscribed()
            publisher.send(0, lose=True)
            publisher.send(1, lose=True)
            # The number that the old one would have had: only the connection tells that it is another's.
            publisher.send(2)
            found = lines.until(2, life=1)
    at = next(index for index, line in enumerate(found) if isinstance(line, KvRestart))
    assert numbers(found[:at]) == [0, 1]
    assert numbers(found[at:]) == ([0, 1, 2] if replay else [2])
    assert bool([line for line in found[at:] if isinstance(line, KvGap)]) is not replay


def test_a_damaged_message_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher, following(tmp_path) as lines:
        publisher.subscribed()
        publisher.send(0, raw=b"\xc1")
        publisher.send(1)
        found = lines.until(1)
    (damaged,) = [line for line in found if isinstance(line, KvDamaged)]
    assert damaged.seq == 0 and numbers(found) == [1]


def test_a_lower_number_is_another_process_and_the_same_message_is_not() -> None:
    sequence = Sequence(0)
    for seq in range(3):
        sequence.take(seq, 100 + seq)
    assert sequence.seen(2, 102) and not sequence.seen(2, 555)
    assert sequence.begins_anew(0, None)
    sequence.connection_lost()
    assert not sequence.begins_anew(3, 102), "the publisher still tells the same last message"
    sequence.connection_lost()
    assert sequence.begins_anew(3, 555)


def test_one_endpoint_for_each_dp_rank() -> None:
    config = '{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'
    info = read_server_info("http://10.0.0.7:30000", {"kv_events_config": config, "dp_size": 2}, {})
    assert sources_of(info) == (
        KvSource(0, "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5657"),
        KvSource(1, "tcp://10.0.0.7:5558", "tcp://10.0.0.7:5658"),
    )
    assert sources("ipc:///x/kv", None, 1) == (KvSource(0, "ipc:///x/kv"),)


@pytest.mark.parametrize("config", [None, "", "{}", '{"publisher":"null"}', "not json"])
def test_a_server_that_publishes_nothing_says_how_it_would(config: str | None) -> None:
    info = read_server_info("http://127.0.0.1:30000", {"kv_events_config": config}, {})
    with pytest.raises(NoKvEvents, match="--kv-events-config"):
        sources_of(info)


def test_an_address_that_is_none_is_a_problem_and_no_hang() -> None:
    collector = KvCollector((KvSource(0, "nowhere"),), KEY, Lines())
    collector.start()
    assert collector.ready.wait(20.0)
    collector.stop()
    assert collector.problem
