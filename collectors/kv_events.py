"""Follow the KV events that a server publishes over ZeroMQ (``--kv-events-config``), one endpoint per dp rank.

Messages are numbered. What is missing is asked for again at the replay endpoint, where there is one; what stays
missing becomes a :class:`KvGap`. A server that was restarted begins to count anew: a :class:`KvRestart`.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import httpx
import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvwitness.collectors.kv_wire import END_OF_REPLAY, KvBatch, Redactor, WireError, decode
from kvwitness.collectors.server_info import ServerInfo

REPLAY_TIMEOUT_MS: Final = 2_000
"""For the next message of a replay: SGLang answers between two batches, within a tenth of a second."""
_POLL_MS: Final = 200
_RECENT: Final = 4_096
_HWM: Final = 1_000_000


class KvSource(msgspec.Struct, frozen=True):
    """Where one dp rank publishes. ``replay`` None: what was missed cannot be asked for."""

    rank: int
    endpoint: str
    replay: str | None = None


class KvMessage(msgspec.Struct, frozen=True, tag="batch"):
    """A batch that was received. ``got_ns``: when (ns since the epoch)."""

    rank: int
    seq: int
    got_ns: int
    replayed: bool
    batch: KvBatch


class KvGap(msgspec.Struct, frozen=True, tag="gap"):
    """Messages ``first`` to ``last`` were not received."""

    rank: int
    first: int
    last: int
    got_ns: int
    cause: str


class KvRestart(msgspec.Struct, frozen=True, tag="restart"):
    """From here on the messages are those of another server process, which count from 0."""

    rank: int
    got_ns: int
    cause: str


class KvDamaged(msgspec.Struct, frozen=True, tag="damaged"):
    """A message that could not be read: what it said is not known."""

    rank: int
    seq: int
    got_ns: int
    cause: str


KvLine = KvMessage | KvGap | KvRestart | KvDamaged


class NoKvEvents(Exception):
    """The server publishes no KV events; the message says what to start it with."""


def sources_of(info: ServerInfo) -> tuple[KvSource, ...]:
    """The endpoints of a server, from its own settings. Raises :class:`NoKvEvents`."""
    settings = _settings(info.raw_server.get("kv_events_config"))
    if settings.get("publisher", "null") != "zmq":
        raise NoKvEvents(
            "the server publishes no KV events: start it with "
            '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\''
        )
    host = httpx.URL(info.url).host
    endpoint = settings.get("endpoint") or "tcp://*:5557"
    replay = settings.get("replay_endpoint") or None
    return sources(_reachable(endpoint, host), _reachable(replay, host) if replay else None, info.dp_size or 1)


def sources(endpoint: str, replay: str | None, ranks: int) -> tuple[KvSource, ...]:
    """One source per dp rank: SGLang adds the rank to the port."""
    return tuple(
        KvSource(rank, _shifted(endpoint, rank), _shifted(replay, rank) if replay else None) for rank in range(ranks)
    )


def _settings(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, dict) else {}


def _reachable(endpoint: str, host: str) -> str:
    """The address of a socket that is bound to every address of the server's machine."""
    return endpoint.replace("//*", f"//{host}").replace("//0.0.0.0", f"//{host}")


def _shifted(endpoint: str, rank: int) -> str:
    before, colon, port = endpoint.rpartition(":")
    return f"{before}{colon}{int(port) + rank}" if rank and endpoint.startswith("tcp") and port.isdigit() else endpoint


class Sequence:
    """The numbers of one source's messages: what is new, what is missing, and when they begin anew."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._next = 0
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._lost_connection = False

    @property
    def next(self) -> int:
        """The number that is expected."""
        return self._next

    def connection_lost(self) -> None:
        """The publisher went away: its numbers are only believed to go on when the same message shows it."""
        self._lost_connection = bool(self._recent)

    def seen(self, seq: int, at_ns: int) -> bool:
        """Whether this very message was taken already."""
        return self._recent.get(seq) == at_ns

    def begins_anew(self, seq: int, replayed_last: int | None) -> bool:
        """Whether a new message ``seq`` is another process's.

        ``replayed_last``: the time of the last known message as the publisher tells it now, where it was asked.
        """
        if seq < self._next:
            return True
        if not self._lost_connection:
            return False
        self._lost_connection = False
        return replayed_last is None or not self.seen(self._next - 1, replayed_last)

    @property
    def in_doubt(self) -> bool:
        """The connection was lost since the last message."""
        return self._lost_connection

    def restart(self) -> None:
        """Count from 0 again."""
        self._next, self._lost_connection = 0, False
        self._recent.clear()

    def take(self, seq: int, at_ns: int) -> None:
        """Note a message that goes on from the last."""
        self._next = seq + 1
        self._recent[seq] = at_ns
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)


class Follower:
    """The messages of one source in their order, whatever was lost on the way. Used by one thread."""

    def __init__(self, source: KvSource, key: bytes, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.source = source
        self._context = context
        self._key = key
        self._redactor = Redactor(key)
        self._sequence = Sequence(source.rank)
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, _HWM)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(source.endpoint)

    def close(self) -> None:
        """Give the sockets back."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    def catch_up(self) -> Iterator[KvLine]:
        """What was published before the subscription, as far as the replay endpoint still has it."""
        for seq, payload in self._replay(self._sequence.next):
            yield from self._take(seq, payload, replayed=True)

    def connection(self) -> None:
        """Read what the socket's monitor says."""
        while self.monitor.poll(0):
            recv_monitor_message(self.monitor)
            self._sequence.connection_lost()

    def receive(self) -> Iterator[KvLine]:
        """Everything that has arrived."""
        while self.socket.poll(0):
            parts = self.socket.recv_multipart()
            if len(parts) < 2 or len(parts[-2]) != 8:
                yield KvDamaged(self.source.rank, -1, time.time_ns(), f"a message of {len(parts)} parts")
                continue
            yield from self._arrived(int.from_bytes(parts[-2], "big"), parts[-1])

    def _arrived(self, seq: int, payload: bytes) -> Iterator[KvLine]:
        sequence, rank = self._sequence, self.source.rank
        at_ns = _time_of(payload)
        if at_ns is not None and sequence.seen(seq, at_ns):
            return
        again = list(self._replay(max(sequence.next - 1, 0))) if sequence.in_doubt or seq > sequence.next else []
        known = next((_time_of(raw) for number, raw in again if number == sequence.next - 1), None)
        if sequence.begins_anew(seq, known):
            yield KvRestart(rank, time.time_ns(), "the messages are counted from 0 again")
            sequence.restart()
            self._redactor = Redactor(self._key)
            again = list(self._replay(0)) if seq else []
        for number, raw in again:
            if sequence.next <= number < seq:
                yield from self._take(number, raw, replayed=True)
        yield from self._take(seq, payload, replayed=False)

    def _take(self, seq: int, payload: bytes, *, replayed: bool) -> Iterator[KvLine]:
        rank, now, expected = self.source.rank, time.time_ns(), self._sequence.next
        if seq < expected:
            return
        if seq > expected:
            cause = "published before the recording began" if not expected else "lost on the way"
            where = "the replay endpoint has them no more" if self.source.replay else "there is no replay endpoint"
            yield KvGap(rank, expected, seq - 1, now, f"{cause}, and {where}")
        try:
            batch = self._redactor.keep(decode(payload))
        except WireError as error:
            self._sequence.take(seq, 0)
            yield KvDamaged(rank, seq, now, str(error))
            return
        self._sequence.take(seq, batch.at_ns)
        yield KvMessage(rank, seq, now, replayed, batch)

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Messages from ``first`` on that the publisher still holds."""
        if self.source.replay is None:
            return
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _HWM)
        try:
            socket.connect(self.source.replay)
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            while socket.poll(REPLAY_TIMEOUT_MS):
                parts = socket.recv_multipart()
                # Through 0.5.21 number and payload, in 0.5.22 and newer the topic before them.
                if len(parts) < 3 or END_OF_REPLAY in parts[-2:]:
                    return
                yield int.from_bytes(parts[-2], "big"), parts[-1]
        finally:
            socket.close(0)


def _time_of(payload: bytes) -> int | None:
    try:
        return int(decode(payload).time_s * 1e9)
    except WireError:
        return None


class KvCollector:
    """Follows all sources in a thread of its own and hands every line to ``sink`` (called in that thread)."""

    def __init__(self, sources: tuple[KvSource, ...], key: bytes, sink: Callable[[KvLine], None]) -> None:
        self._sources = sources
        self._key = key
        self._sink = sink
        self._stop = threading.Event()
        self.ready = threading.Event()
        """Everything that was published before is in."""
        self._thread = threading.Thread(target=self._run, name="kvwitness-kv-events", daemon=True)
        self.problem = ""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after what has arrived by now."""
        self._stop.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        followers: list[Follower] = []
        try:
            followers = [Follower(source, self._key, context) for source in self._sources]
            for follower in followers:
                self._emit(follower.catch_up())
            self.ready.set()
            self._follow(followers)
        except zmq.ZMQError as error:
            self.problem = str(error)
        finally:
            self.ready.set()
            for follower in followers:
                follower.close()
            context.destroy(0)  # Also closes what a follower that could not be made has opened.

    def _follow(self, followers: list[Follower]) -> None:
        poller = zmq.Poller()
        for follower in followers:
            poller.register(follower.socket, zmq.POLLIN)
        last = False
        while not last:
            last = self._stop.is_set()
            poller.poll(0 if last else _POLL_MS)
            for follower in followers:
                follower.connection()
                self._emit(follower.receive())

    def _emit(self, lines: Iterator[KvLine]) -> None:
        for line in lines:
            self._sink(line)
