"""What was watched as Prometheus metrics, on an address of its own."""

from __future__ import annotations

import errno
from types import TracebackType
from typing import Final, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from kvwitness.tracer.model import CrossCheck
from kvwitness.tracer.outside.counting import CACHED_DEVICE, CACHED_HOST, CACHED_STORAGE, EVICTED, LOADED
from kvwitness.tracer.outside.records import Counted
from kvwitness.tracer.watch.tallies import News, disagreements, tokens_by_tier

LOOPBACK: Final = "127.0.0.1"
PORT: Final = 9476
_LATENCY: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_REPORTED: Final = {"L1": CACHED_DEVICE, "L2": CACHED_HOST, "L3": CACHED_STORAGE}


class CannotListen(Exception):
    """The address is taken or not this machine's; the message says which."""


class Exporter:
    """The metrics. Every counter begins at 0 when the watching begins."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter("kvwitness_requests", "Judged requests", ["grade", "tier"], registry=registry)
        self._tokens = Counter(
            "kvwitness_prompt_tokens", "Prompt tokens by where their KV came from", ["tier"], registry=registry
        )
        self._evictions = Counter(
            "kvwitness_evictions", "Evictions by tier, kind and cause", ["tier", "kind", "cause"], registry=registry
        )
        self._evicted = Counter(
            "kvwitness_evicted_tokens", "Evicted tokens", ["tier", "kind", "cause"], registry=registry
        )
        self._latency = Histogram(
            "kvwitness_load_back_seconds",
            "From the queueing of a load-back to its completion as the scheduler saw it",
            buckets=_LATENCY,
            registry=registry,
        )
        self._load_bytes = Counter("kvwitness_load_back_bytes", "Bytes copied from L2 to L1", registry=registry)
        self._load_tokens = Counter("kvwitness_load_back_tokens", "Tokens copied from L2 to L1", registry=registry)
        self._lost = Counter("kvwitness_records_lost", "Records that journals lost", ["what"], registry=registry)
        self._disagreements = Counter(
            "kvwitness_witness_disagreements", "Witnesses that contradict the events", ["witness"], registry=registry
        )
        self._gaps = Counter("kvwitness_gaps", "Servers that began, ended or were killed", registry=registry)
        self._round = Gauge(
            "kvwitness_last_round_timestamp_seconds", "When the record was last read", registry=registry
        )
        self._up = Gauge("kvwitness_server_up", "Whether the server's /metrics answers (with --url)", registry=registry)
        self._reported = Counter(
            "kvwitness_reported_tokens",
            "Prompt tokens by tier as the server itself counts them: reported, not confirmed",
            ["tier"],
            registry=registry,
        )
        self._reported_moves = Counter(
            "kvwitness_reported_moved_tokens", "Tokens moved as the server counts them", ["what"], registry=registry
        )
        self._resets = Counter("kvwitness_server_restarts", "Restarts seen in the server's counters", registry=registry)

    def take(self, news: News, at_s: float) -> None:
        """Count the news of a round."""
        self._round.set(at_s)
        for verdict in news.requests:
            self._requests.labels(verdict.grade.value, verdict.tier.value).inc()
            for tier, tokens in tokens_by_tier(verdict).items():
                self._tokens.labels(tier.value).inc(tokens)
            for check in disagreements(verdict):
                self._disagreements.labels(check.witness).inc()
        for eviction in news.evictions:
            labels = (eviction.tier, eviction.kind, eviction.cause)
            self._evictions.labels(*labels).inc()
            self._evicted.labels(*labels).inc(eviction.tokens)
        for load in news.loads:
            self._latency.observe(load.seconds)
            self._load_bytes.inc(load.bytes)
            self._load_tokens.inc(load.tokens)
        for lost in news.lost:
            self._lost.labels(lost.what).inc(lost.records)
        self._gaps.inc(len(news.gaps))

    def counted(self, line: Counted) -> None:
        """Count what the server's own counters gained."""
        self._up.set(1)
        if line.reset:
            self._resets.inc()
        for tier, name in _REPORTED.items():
            if name in line.gained:
                self._reported.labels(tier).inc(line.gained[name])
        for what, name in (("loaded back", LOADED), ("evicted", EVICTED)):
            if name in line.gained:
                self._reported_moves.labels(what).inc(line.gained[name])

    def disagreed(self, check: CrossCheck) -> None:
        """Count a disagreement between the server's own numbers."""
        self._disagreements.labels(check.witness).inc()

    def unanswered(self) -> None:
        """The server did not answer."""
        self._up.set(0)


class Listening:
    """An exporter's ``/metrics`` on an address, until the block ends. Raises :class:`CannotListen`."""

    def __init__(self, exporter: Exporter, host: str = LOOPBACK, port: int = PORT, *, any_port: bool = False) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, exporter.registry)
        except OSError as error:
            if not any_port or error.errno != errno.EADDRINUSE:
                raise CannotListen(error.strerror or str(error)) from error
            self._server, self._thread = start_http_server(0, host, exporter.registry)
        self.address = f"http://{host if ':' not in host else f'[{host}]'}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
