"""Read all witnesses of a server from outside, and hand on every line as it comes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import httpx
import msgspec
import psutil

from kvwitness.collectors.environment import find_server_processes, locate_kvwitness_dir, memory_reading
from kvwitness.collectors.kv_events import KvCollector, KvLine, KvSource, NoKvEvents, sources_of
from kvwitness.collectors.metrics import MetricsSnapshot, MetricsUnavailable, fetch_metrics
from kvwitness.collectors.redaction import redact_text
from kvwitness.collectors.server_info import ServerInfo, ServerInfoUnavailable, fetch_server_info
from kvwitness.collectors.stacks import StacksRefused, check_allowed, find_py_spy, python_of, sample
from kvwitness.collectors.target import SCHEDULER, NoTarget, target_at
from kvwitness.patches.digests import KEY_BYTES, KEY_FILE
from kvwitness.tracer.bundle.version import kvwitness_version
from kvwitness.tracer.outside.counting import carries_rank, counted
from kvwitness.tracer.outside.records import (
    HOST,
    KV_EVENTS,
    METRICS_LINES,
    RECORDING,
    SERVER,
    STACKS,
    End,
    Head,
    HostReading,
    Line,
    Server,
    Unanswered,
)

INTERVAL_S: Final = 1.0
_ASK_S: Final = 5.0
_READY_S: Final = 15.0
_GPU_EVERY: Final = 30
"""Rounds between two readings of the GPUs: nvidia-smi takes its time."""

Sink = Callable[[str, Line], None]


class Stop(Protocol):
    """When to end; a ``threading.Event`` is one."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Wanted(msgspec.Struct, frozen=True):
    """What to record of the server at ``url``."""

    url: str
    interval_s: float = INTERVAL_S
    kv_sources: tuple[KvSource, ...] | None = None
    """None: as the server's own settings say."""
    stacks: bool = False
    api_key: str | None = None
    directory: Path | None = None
    """The server's data folder, for its key of digests; None: asked of the server's processes."""


class Recorder:
    """One recording. ``sink`` gets every line with the name of its file; one thread per file."""

    def __init__(self, wanted: Wanted, sink: Sink) -> None:
        self._wanted = wanted
        self._sink = sink
        headers = {"Authorization": f"Bearer {wanted.api_key}"} if wanted.api_key else {}
        self._client = httpx.Client(trust_env=False, headers=headers)
        self._last: MetricsSnapshot | None = None
        self._first: MetricsSnapshot | None = None
        self._base: MetricsSnapshot | None = None
        self._ranks_known = False
        self._pids: tuple[int, ...] = ()
        self._schedulers: tuple[int, ...] = ()
        self._rounds = 0
        self._ask_again = False
        self._kv: KvCollector | None = None
        self._samplers: dict[int, threading.Thread] = {}
        self._done = threading.Event()
        self.not_recorded: dict[str, str] = {}
        self.directory: Path | None = None
        """The server's data folder, where it has one and it can be seen from here."""

    @property
    def metrics(self) -> Mapping[str, MetricsSnapshot]:
        """The first and the last reading, as ``before`` and ``after``; empty without any."""
        if self._first is None or self._last is None:
            return {}
        return {"before": self._first, "after": self._last}

    @property
    def since_reset(self) -> tuple[MetricsSnapshot, MetricsSnapshot] | None:
        """The first reading of the server process that runs now, and the last; None without two."""
        if self._base is None or self._last is None or self._base is self._last:
            return None
        return self._base, self._last

    def begin(self) -> ServerInfo:
        """Ask the server what it is and start everything. Raises ServerInfoUnavailable."""
        wanted = self._wanted
        info = fetch_server_info(wanted.url, self._client, _ASK_S)
        self._find_processes()
        self.directory = wanted.directory or locate_kvwitness_dir(wanted.url).path
        key, shared = _key_of(self.directory)
        sources = self._kv_sources(info)
        try:
            self._base = self._first = self._last = fetch_metrics(wanted.url, self._client, _ASK_S)
        except MetricsUnavailable as error:
            self.not_recorded["metrics"] = str(error)
        self._may_sample()
        if sources:
            self._kv = KvCollector(sources, key, self._kv_line)
            self._kv.start()
            self._kv.ready.wait(_READY_S)
            if self._kv.problem:
                self.not_recorded["kv_events"] = f"{sources[0].endpoint}: {self._kv.problem}"
        url, absent = redact_text(wanted.url), dict(self.not_recorded)
        head = Head(url, kvwitness_version(), time.time_ns(), wanted.interval_s, shared, absent)
        self._sink(RECORDING, head)
        self._server(info)
        self._host()
        self._start_sampling()
        return info

    def run(self, stop: Stop) -> None:
        """Record until ``stop`` is set."""
        while not stop.wait(self._wanted.interval_s):
            self.round()

    def round(self) -> None:
        """Read what does not come by itself."""
        self._rounds += 1
        self._count()
        self._host(gpus=self._rounds % _GPU_EVERY == 0)

    def end(self, why: str) -> None:
        """Read everything once more, and stop."""
        self._done.set()
        self._count()
        if self._kv is not None:
            self._kv.stop()
        for thread in self._samplers.values():
            thread.join(timeout=60.0)
        try:
            self._server(fetch_server_info(self._wanted.url, self._client, _ASK_S))
        except ServerInfoUnavailable as error:
            self._sink(SERVER, Unanswered(time.time_ns(), str(error)))
        self._host()
        self._sink(RECORDING, End(time.time_ns(), why))
        self._client.close()

    # --- each witness -------------------------------------------------------------------------------

    def _count(self) -> None:
        if "metrics" in self.not_recorded:
            return
        try:
            now = fetch_metrics(self._wanted.url, self._client, _ASK_S)
        except MetricsUnavailable as error:
            self._sink(METRICS_LINES, Unanswered(time.time_ns(), str(error)))
            self._ask_again = True
            return
        if self._last is not None:
            line = counted(self._last, now)
            self._sink(METRICS_LINES, line)
            if line.reset:
                self._ask_again, self._base = True, now
        self._last = now
        if self._ask_again or (not self._ranks_known and carries_rank(now)):
            self._ranks_known = carries_rank(now)
            self._ask_again = False
            self._find_processes()
            self._start_sampling()
            try:
                self._server(fetch_server_info(self._wanted.url, self._client, _ASK_S))
            except ServerInfoUnavailable as error:
                self._sink(SERVER, Unanswered(time.time_ns(), str(error)))

    def _server(self, info: ServerInfo) -> None:
        facts = msgspec.to_builtins(info)
        facts.pop("raw_server"), facts.pop("raw_model")
        facts["url"] = redact_text(info.url)
        if "stacks" not in self.not_recorded:
            facts["python"] = {str(pid): python_of(pid) for pid in self._schedulers}
        facts["counters_carry_rank"] = self._last is not None and carries_rank(self._last)
        processes = find_server_processes(self._wanted.url).processes
        self._sink(SERVER, Server(time.time_ns(), facts, tuple(msgspec.to_builtins(one) for one in processes)))

    def _host(self, gpus: bool = True) -> None:
        self._sink(HOST, HostReading(time.time_ns(), *msgspec.structs.astuple(memory_reading(self._pids, gpus=gpus))))

    def _kv_sources(self, info: ServerInfo) -> tuple[KvSource, ...]:
        if self._wanted.kv_sources is not None:
            return self._wanted.kv_sources
        try:
            return sources_of(info)
        except NoKvEvents as error:
            self.not_recorded["kv_events"] = str(error)
            return ()

    def _kv_line(self, line: KvLine) -> None:
        self._sink(KV_EVENTS, line)

    def _find_processes(self) -> None:
        try:
            target = target_at(self._wanted.url)
        except (NoTarget, psutil.Error):
            self._pids = self._schedulers = ()
            return
        self._pids = tuple(process.pid for process in target.processes)
        self._schedulers = tuple(p.pid for p in target.processes if p.role == SCHEDULER)

    def _may_sample(self) -> None:
        if not self._wanted.stacks:
            self.not_recorded["stacks"] = "not asked for (--stacks)"
            return
        try:
            find_py_spy()
            if not self._schedulers:
                raise StacksRefused("the server's schedulers cannot be seen from here")
            for pid in self._schedulers:
                check_allowed(pid)
        except StacksRefused as error:
            self.not_recorded["stacks"] = str(error)

    def _start_sampling(self) -> None:
        """One thread for each scheduler that has none, as after a restart."""
        if "stacks" in self.not_recorded:
            return
        for pid in self._schedulers:
            if pid not in self._samplers:
                thread = threading.Thread(target=self._sample, args=(pid,), name="kvwitness-stacks", daemon=True)
                self._samplers[pid] = thread
                thread.start()

    def _sample(self, pid: int) -> None:
        """Sample one scheduler again and again; what is not around a load-back is only counted."""
        while not self._done.is_set():
            try:
                line = sample(pid, max(self._wanted.interval_s, 1.0))
            except StacksRefused as error:
                self._sink(STACKS, Unanswered(time.time_ns(), str(error)))
                if self._done.wait(self._wanted.interval_s) or pid not in self._schedulers:
                    return
                continue
            self._sink(STACKS, line)


def _key_of(folder: Path | None) -> tuple[bytes, bool]:
    """The key of digests: that of the server's data folder, or one for this recording alone."""
    if folder is not None:
        try:
            key = (folder / KEY_FILE).read_bytes()
        except OSError:
            key = b""
        if len(key) == KEY_BYTES:
            return key, True
    return secrets.token_bytes(KEY_BYTES), False
