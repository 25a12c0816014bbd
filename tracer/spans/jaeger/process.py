"""A running Jaeger."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from kvwitness.tracer.spans.jaeger.client import JaegerClient
from kvwitness.tracer.spans.jaeger.config import HOST, Ports, config_text
from kvwitness.tracer.spans.jaeger.errors import JaegerError, log_tail
from kvwitness.tracer.watchdog import killed_with_us


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
        self._ports: Ports | None = None
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
        return f"http://{HOST}:{self._running_ports().otlp_http}"

    @property
    def otlp_grpc(self) -> str:
        """Endpoint for OTLP over gRPC, in the form that the OpenTelemetry exporters take (no TLS)."""
        return f"http://{HOST}:{self._running_ports().otlp_grpc}"

    @property
    def query_url(self) -> str:
        """Base URL of Jaeger's query API."""
        return f"http://{HOST}:{self._running_ports().query_http}"

    @property
    def pid(self) -> int:
        """Process id of the running Jaeger."""
        if self._process is None:
            raise JaegerError("Jaeger is not running")
        return self._process.pid

    def log_tail(self, lines: int = 30) -> str:
        """The last ``lines`` lines of Jaeger's log."""
        return log_tail(self._log, lines)

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

    def _running_ports(self) -> Ports:
        if self._ports is None:
            raise JaegerError("Jaeger is not running")
        return self._ports

    def _start_once(self) -> None:
        if self._wanted_folder is None:
            folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvwitness-jaeger-")))
        else:
            folder = self._wanted_folder
            folder.mkdir(parents=True, exist_ok=True)
        ports = Ports.free()
        config = folder / "jaeger.yaml"
        config.write_text(config_text(ports, self._max_traces))
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
        self._await_ready(process, f"http://{HOST}:{ports.health}/status")
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
