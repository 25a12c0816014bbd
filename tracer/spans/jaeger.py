"""A real Jaeger for the tests and the demo: find or build the program, run it, ask it for traces.

Spans that only ever reach a mock prove nothing about what a reader of the traces will see, so both run
against the Jaeger of ``tests/jaeger/go.mod``. The program keeps its traces in memory, listens on the
loopback interface only, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NotRequired, Self, TypedDict, TypeVar, cast

import httpx

from kvwitness.tracer.watchdog import killed_with_us

__all__ = [
    "JaegerClient",
    "JaegerError",
    "JaegerProcess",
    "JaegerSpan",
    "JaegerTrace",
    "JaegerUnavailable",
    "find_or_build_jaeger",
    "tags_of",
    "wait_for",
]

T = TypeVar("T")
Progress = Callable[[str], None]

_TOOL = "github.com/jaegertracing/jaeger/cmd/jaeger"
_PROGRESS_EVERY_S = 15.0
_HOST = "127.0.0.1"


class JaegerUnavailable(RuntimeError):
    """There is no Jaeger program and none can be built; the message says what to do."""


class JaegerError(RuntimeError):
    """Jaeger did not start, or ended by itself; the message has the end of its log."""


def wait_for(predicate: Callable[[], T | None], timeout: float, *, interval: float = 0.05, what: str = "") -> T:
    """Call ``predicate`` until it returns something true and return that; ``TimeoutError`` after ``timeout`` s."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what or 'a condition'}; last value: {value!r}")
        time.sleep(interval)


# --- the program -------------------------------------------------------------------------------------


def find_or_build_jaeger(progress: Progress, module_dir: Path) -> Path:
    """Return the path of a Jaeger v2 program, building it at most once per version of the Go module.

    ``JAEGER_BIN`` wins when it is set. Otherwise the program is built from the Go module in ``module_dir``
    and kept under ``${XDG_CACHE_HOME:-~/.cache}/kvwitness/jaeger/``. The first build takes minutes;
    ``progress`` gets a line now and then. Raises ``JaegerUnavailable`` when neither way is open.
    """
    named = os.environ.get("JAEGER_BIN")
    if named:
        path = Path(named).expanduser()
        _check_program(path, f"JAEGER_BIN={named}", "set it to a Jaeger v2 program, or unset it to build one")
        return path.absolute()

    go = shutil.which("go")
    if go is None:
        raise JaegerUnavailable(
            "no Jaeger: JAEGER_BIN is not set, and there is no `go` on PATH to build one with; "
            "install Go (the version in tests/jaeger/go.mod or newer), or set JAEGER_BIN to a Jaeger v2 program"
        )
    folder = _cache_root() / _build_key(go, module_dir)
    program = folder / "jaeger"
    if program.exists():  # only ever put there whole and checked, by the rename in _build
        return program
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", progress):
        if not program.exists():
            _build(go, module_dir, program, progress)
    return program


def _check_program(path: Path, name: str, remedy: str) -> None:
    """Raise unless ``path`` runs and lists the component that only a Jaeger v2 has."""
    if not path.is_file():
        raise JaegerUnavailable(f"{name} is not a file; {remedy}")
    if not os.access(path, os.X_OK):
        raise JaegerUnavailable(f"{name} is not executable; {remedy}")
    try:
        # `version` prints nothing in a plain module build, `components` always answers.
        ran = subprocess.run(
            [path.absolute(), "components"], capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JaegerUnavailable(f"{name} does not run ({error}); {remedy}") from error
    if ran.returncode != 0 or "jaeger_query" not in ran.stdout:
        raise JaegerUnavailable(
            f"{name} is not a Jaeger v2: `components` ended with {ran.returncode} "
            f"and did not list jaeger_query; {remedy}"
        )


def _cache_root() -> Path:
    # The XDG specification says that a relative value is to be ignored.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".cache"
    return base / "kvwitness" / "jaeger"


def _build_key(go: str, module_dir: Path) -> str:
    """Name one build: the pinned modules with their hashes, and the Go that compiles them."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        try:
            content = (module_dir / name).read_bytes()
        except OSError as error:
            raise JaegerUnavailable(
                f"no Go module to build Jaeger from ({error}); run from a checkout, or set JAEGER_BIN"
            ) from error
        digest.update(f"{name} {len(content)}\n".encode() + content)
    # Asked inside the module: go.mod may select another toolchain than the one on PATH.
    ran = subprocess.run([go, "env", "GOVERSION", "GOOS", "GOARCH"], cwd=module_dir, capture_output=True, text=True)
    if ran.returncode != 0:
        raise JaegerUnavailable(
            f"`go env` failed in {module_dir}: {ran.stderr.strip()}; install a newer Go, or set JAEGER_BIN"
        )
    digest.update(ran.stdout.encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel drops it if this process dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is building Jaeger; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(go: str, module_dir: Path, program: Path, progress: Progress) -> None:
    """Build ``program``; the caller holds the lock, so leftovers here belong to builds that were killed."""
    folder = program.parent
    for leftover in folder.glob("build-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
    log = folder / "build.log"
    try:
        progress("building Jaeger from tests/jaeger (the first time takes some minutes)")
        started = time.monotonic()
        fresh = work / "jaeger"
        # -v names each package as it is compiled: that is what the progress lines count.
        command = [go, "build", "-v", "-trimpath", "-ldflags=-s -w", "-o", str(fresh), _TOOL]
        # Without cgo the build needs no C compiler; Jaeger's own releases are built so too.
        environment = {**os.environ, "CGO_ENABLED": "0"}
        with log.open("w") as output:
            # A session of its own, so that an interrupted build takes its compiler processes with it.
            building = subprocess.Popen(
                command,
                cwd=module_dir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                with killed_with_us(building.pid):
                    while building.poll() is None:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            building.wait(_PROGRESS_EVERY_S)
                            break
                        progress(_build_state(log, time.monotonic() - started))
            finally:
                if building.poll() is None:
                    os.killpg(building.pid, signal.SIGKILL)
                    building.wait()
        if building.returncode != 0:
            raise JaegerUnavailable(
                f"building Jaeger failed (`go build` ended with {building.returncode}); the end of {log}:\n{_tail(log)}"
            )
        _check_program(fresh, f"the new build {fresh}", f"see {log}")
        fresh.rename(program)
        progress(f"built Jaeger in {time.monotonic() - started:.0f} s: {program}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _build_state(log: Path, elapsed_s: float) -> str:
    lines = log.read_text(errors="replace").splitlines()
    fetched = sum(line.startswith("go: downloading ") for line in lines)
    compiled = len(lines) - fetched
    return f"building Jaeger: {elapsed_s:.0f} s, {fetched} modules fetched, {compiled} packages compiled"


def _tail(path: Path, lines: int = 30) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error})"


# --- the process -------------------------------------------------------------------------------------

_CONFIG = """\
service:
  extensions: [jaeger_storage, jaeger_query, healthcheckv2]
  pipelines:
    traces:
      receivers: [otlp]
      processors: [batch]
      exporters: [jaeger_storage_exporter]
  telemetry:
    # Otherwise Jaeger's own metrics take port 8888, whoever else may want it.
    metrics:
      level: none
extensions:
  jaeger_storage:
    backends:
      kept:
        memory:
          max_traces: {max_traces}
  jaeger_query:
    # Otherwise every question asked here is a trace of a service `jaeger`.
    enable_tracing: false
    storage:
      traces: kept
    http:
      endpoint: {host}:{query_http}
    grpc:
      endpoint: {host}:{query_grpc}
  healthcheckv2:
    use_v2: true
    http:
      endpoint: {host}:{health}
receivers:
  otlp:
    protocols:
      grpc:
        endpoint: {host}:{otlp_grpc}
      http:
        endpoint: {host}:{otlp_http}
processors:
  batch:
    timeout: 50ms
exporters:
  jaeger_storage_exporter:
    trace_storage: kept
"""


@dataclass(frozen=True)
class _Ports:
    otlp_http: int
    otlp_grpc: int
    query_http: int
    query_grpc: int
    health: int

    @classmethod
    def free(cls) -> _Ports:
        """Five ports that were free a moment ago, all held at once so that they differ."""
        with contextlib.ExitStack() as held:
            numbers = []
            for _ in range(5):
                listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                listener.bind((_HOST, 0))
                numbers.append(int(listener.getsockname()[1]))
        return cls(*numbers)


class _PortTaken(Exception):
    """Somebody took one of the ports between choosing it and Jaeger's start."""


class JaegerProcess:
    """One running Jaeger with in-memory storage; a context manager, or ``start()`` and ``stop()``.

    ``folder`` keeps the configuration and the log where they are wanted; without it they are in a temporary
    folder that goes with the process.
    """

    def __init__(
        self,
        program: Path,
        *,
        folder: Path | None = None,
        max_traces: int = 10_000,
        ready_timeout: float = 60.0,
    ) -> None:
        self._program = program
        self._wanted_folder = folder
        self._max_traces = max_traces
        self._ready_timeout = ready_timeout
        self._cleanup = contextlib.ExitStack()
        self._ports: _Ports | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path(os.devnull)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def otlp_http(self) -> str:
        """Base URL for OTLP over HTTP; spans go to ``/v1/traces`` below it."""
        return f"http://{_HOST}:{self._running_ports().otlp_http}"

    @property
    def otlp_grpc(self) -> str:
        """Endpoint for OTLP over gRPC, in the form that the OpenTelemetry exporters take (no TLS)."""
        return f"http://{_HOST}:{self._running_ports().otlp_grpc}"

    @property
    def query_url(self) -> str:
        """Base URL of Jaeger's query API."""
        return f"http://{_HOST}:{self._running_ports().query_http}"

    @property
    def pid(self) -> int:
        """Process id of the running Jaeger."""
        if self._process is None:
            raise JaegerError("Jaeger is not running")
        return self._process.pid

    def log_tail(self, lines: int = 30) -> str:
        """The last ``lines`` lines of Jaeger's log."""
        return _tail(self._log, lines)

    def client(self) -> JaegerClient:
        """A new client for this Jaeger's query API; close it, or use it in a ``with``."""
        return JaegerClient(self.query_url)

    def start(self) -> None:
        """Start Jaeger and return once it reports itself healthy; ``JaegerError`` when it does not get there."""
        if self._process is not None:
            raise JaegerError("Jaeger is already running")
        attempts = 5
        for attempt in range(1, attempts + 1):
            try:
                self._start_once()
            except _PortTaken as taken:
                self.stop()
                if attempt == attempts:
                    raise JaegerError(f"Jaeger found a chosen port taken {attempts} times in a row:\n{taken}") from None
            except BaseException:
                self.stop()
                raise
            else:
                return

    def stop(self) -> None:
        """End Jaeger and wait until it is gone; does nothing when it is not running."""
        self._ports = None
        self._process = None
        self._cleanup.close()

    def _running_ports(self) -> _Ports:
        if self._ports is None:
            raise JaegerError("Jaeger is not running")
        return self._ports

    def _start_once(self) -> None:
        if self._wanted_folder is None:
            folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvwitness-jaeger-")))
        else:
            folder = self._wanted_folder
            folder.mkdir(parents=True, exist_ok=True)
        ports = _Ports.free()
        config = folder / "jaeger.yaml"
        config.write_text(_CONFIG.format(host=_HOST, max_traces=self._max_traces, **vars(ports)))
        self._log = folder / "jaeger.log"
        # OTEL_* is for the process under test: Jaeger would read it too and export spans of its own.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        with self._log.open("wb") as output:
            process = subprocess.Popen(
                [self._program, "--config", config],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C is for the caller, which may still want to ask for traces before it stops Jaeger.
                start_new_session=True,
            )
        self._cleanup.callback(_end, process)
        self._cleanup.enter_context(killed_with_us(process.pid))
        self._await_ready(process, f"http://{_HOST}:{ports.health}/status")
        self._process = process
        self._ports = ports

    def _await_ready(self, process: subprocess.Popen[bytes], status_url: str) -> None:
        deadline = time.monotonic() + self._ready_timeout
        with httpx.Client(trust_env=False, timeout=2.0) as http:
            while True:
                healthy = False
                with contextlib.suppress(httpx.TransportError):
                    healthy = http.get(status_url).status_code == httpx.codes.OK
                # Asked after the status: on a conflict the answer may be another program's.
                if process.poll() is not None:
                    tail = self.log_tail()
                    if "address already in use" in tail:
                        raise _PortTaken(tail)
                    raise JaegerError(
                        f"Jaeger ended with {process.returncode} while starting; the end of its log:\n{tail}"
                    )
                if healthy:
                    return
                if time.monotonic() >= deadline:
                    raise JaegerError(
                        f"Jaeger was not healthy after {self._ready_timeout:g} s; the end of its log:\n"
                        f"{self.log_tail()}"
                    )
                time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- the query API -----------------------------------------------------------------------------------


class JaegerKeyValue(TypedDict):
    """An attribute, in the JSON of ``/api/traces``."""

    key: str
    type: str
    value: Any


class JaegerReference(TypedDict):
    """A parent (``CHILD_OF``) or a link (``FOLLOWS_FROM``)."""

    refType: str
    traceID: str
    spanID: str


class JaegerLog(TypedDict):
    """A span event; ``timestamp`` is in microseconds since the epoch."""

    timestamp: int
    fields: list[JaegerKeyValue]


class JaegerSpan(TypedDict):
    """A span; ``startTime`` and ``duration`` are in microseconds."""

    traceID: str
    spanID: str
    operationName: str
    references: list[JaegerReference]
    startTime: int
    duration: int
    tags: list[JaegerKeyValue]
    logs: list[JaegerLog]
    processID: str
    warnings: NotRequired[list[str] | None]


class JaegerResource(TypedDict):
    """A process: the service's name and its resource attributes."""

    serviceName: str
    tags: NotRequired[list[JaegerKeyValue]]


class JaegerTrace(TypedDict):
    """One trace as ``/api/traces`` returns it."""

    traceID: str
    spans: list[JaegerSpan]
    processes: dict[str, JaegerResource]
    warnings: NotRequired[list[str] | None]


def tags_of(span: JaegerSpan) -> dict[str, Any]:
    """A span's attributes as a dictionary; lists come as the JSON text that Jaeger makes of them."""
    # Integers that a browser could not hold exactly are sent as text, still declared int64.
    return {tag["key"]: int(tag["value"]) if tag["type"] == "int64" else tag["value"] for tag in span["tags"]}


class JaegerClient:
    """The little of Jaeger's query API that the tests and the demo ask for."""

    def __init__(self, query_url: str, *, timeout: float = 10.0) -> None:
        # trust_env=False: a proxy from the environment has no business with the loopback interface.
        self._http = httpx.Client(base_url=query_url, timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def services(self) -> list[str]:
        """Names of the services that have sent spans, sorted."""
        return sorted(cast(list[str], self._data("/api/services") or []))

    def traces(
        self,
        service: str,
        *,
        operation: str | None = None,
        tags: Mapping[str, str] | None = None,
        limit: int = 1000,
    ) -> list[JaegerTrace]:
        """Traces with a span of ``service``, of any time; ``tags`` must be on one of its spans.

        Jaeger returns ``limit`` traces at most and does not say when there were more; it refuses a limit
        above its own number of kept traces.
        """
        # Left to itself Jaeger looks back two days from now, and recorded traces may be older than that.
        parameters: dict[str, str] = {
            "service": service,
            "limit": str(limit),
            "start": "1",
            "end": str(int((time.time() + 86_400) * 1_000_000)),
        }
        if operation is not None:
            parameters["operation"] = operation
        if tags:
            parameters["tags"] = json.dumps(dict(tags))
        return cast(list[JaegerTrace], self._data("/api/traces", parameters) or [])

    def trace(self, trace_id: str) -> JaegerTrace | None:
        """The trace with this hexadecimal id, or None when Jaeger has none (yet)."""
        found = cast(list[JaegerTrace], self._data(f"/api/traces/{trace_id}") or [])
        return found[0] if found else None

    def otlp_trace(self, trace_id: str) -> dict[str, Any] | None:
        """The same trace as OTLP JSON (``resourceSpans``), which has the links' attributes as well."""
        answer = self._http.get(f"/api/v3/traces/{trace_id}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return cast(dict[str, Any], answer.raise_for_status().json()["result"])

    def _data(self, path: str, parameters: Mapping[str, str] | None = None) -> Any:
        answer = self._http.get(path, params=parameters)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return answer.raise_for_status().json()["data"]
