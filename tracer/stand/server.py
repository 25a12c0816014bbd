"""One SGLang server on the stand: started, watched, and ended with every process it made."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

import httpx
import psutil

from kvwitness.patches.stand.faults import FAULT_VARIABLE, parse_faults
from kvwitness.tracer.stand.environment import StandEnvironment
from kvwitness.tracer.stand.paths import stand_path
from kvwitness.tracer.stand.releases import NEWEST, Release, UnsupportedError, known_release
from kvwitness.tracer.watchdog import killed_with_us

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_GRACE_S = 15.0
_POLL_S = 0.2
_PORTS = (20_000, 32_000)
_HELPERS_GRACE_S = 1.0
_TAIL_LINES = 40
_SCHEDULER_TITLE = "sglang::scheduler"
# What a developer has set for other servers must not reach this one.
_OWN_PREFIXES = ("SGLANG_", "KVWITNESS_", "PYTHON")


class StandServerError(RuntimeError):
    """The server did not start, or died. The message ends with the tail of its log."""


@dataclass(frozen=True)
class ServerOptions:
    """How to start a server: HiCache with SGLang 0.5.23's own defaults unless said otherwise, whatever the
    release. An older release does not have every choice (kvwitness.tracer.stand.releases).

    Pool sizes are small so that a few prompts of 1,500 tokens evict each other.
    """

    write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    io_backend: Literal["direct", "kernel"] = "direct"
    mem_layout: Literal["layer_first", "page_first", "page_first_direct", "page_head"] = "layer_first"
    hicache: bool = True
    """Whether there is an L2; off for the control of a run, which has all other settings."""
    page_size: int = 16
    """Tokens in a page."""
    max_total_tokens: int = 4096
    """Device pool size in tokens."""
    hicache_ratio: float = 4.0
    """Host pool size as a multiple of the device pool."""
    tree_core: Literal["rust", "python"] | None = None
    """The radix tree's core; None leaves SGLang's default, which is rust in 0.5.23."""
    tp_size: int = 1
    dp_size: int = 1
    overlap: bool = False
    """Whether SGLang schedules the next batch while one runs. SGLang's own default is on; off makes the
    order of events in a log that of their causes."""
    faults: str = ""
    """As KVWITNESS_STAND_FAULT: see kvwitness.patches.stand.faults."""
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, release: Release | None = None) -> list[str]:
        """The command-line arguments these options stand for, in `release` (the newest by default).

        Raises UnsupportedError for a choice that the release does not have.
        """
        known = release if release is not None else known_release(NEWEST)
        known.check("write policy", self.write_policy, known.write_policies)
        known.check("I/O backend", self.io_backend, known.io_backends)
        known.check("memory layout", self.mem_layout, known.mem_layouts or ("layer_first",))
        if self.tree_core is not None and not known.tree_core_choice:
            raise UnsupportedError(f"SGLang {known.name} has no choice of tree cores")
        arguments = {
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--hicache-ratio": f"{self.hicache_ratio:g}",
            "--hicache-write-policy": self.write_policy,
            "--hicache-io-backend": self.io_backend,
            "--page-size": str(self.page_size),
            "--max-total-tokens": str(self.max_total_tokens),
            "--mem-fraction-static": "0.5",
            "--tp-size": str(self.tp_size),
        }
        if self.dp_size > 1:
            arguments["--dp-size"] = str(self.dp_size)
        if known.mem_layouts:
            arguments["--hicache-mem-layout"] = self.mem_layout
        if known.both_attention_backends:
            arguments["--prefill-attention-backend"] = arguments["--decode-attention-backend"] = "torch_native"
        flags = ["--enable-metrics", "--enable-cache-report"]
        if self.hicache:
            flags.append("--enable-hierarchical-cache")
        if not self.overlap:
            flags.append("--disable-overlap-schedule")
        return [part for pair in arguments.items() for part in pair] + flags + list(self.extra_args)


def taken(port: int) -> bool:
    """Whether something listens on a loopback TCP port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Not what has just been closed.
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return True
    return False


def free_port() -> int:
    """A loopback TCP port that is free at this moment.

    Of the low ones: SGLang 0.5.14 also needs the number 10,000 above it to be a port. They also lie below
    the range from which the system gives ports to clients, so that none of those takes it meanwhile.
    """
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def log_tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log, indented; a note in their place if there is none."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        text = ""
    tail = text.splitlines()[-lines:] or ["(nothing was logged)"]
    return "\n".join(f"  {line}" for line in tail)


def _still_running(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait up to `timeout_s` for `processes` to end, and return those that have not.

    A zombie has ended: in a container whose first process does not reap, it stays in the table for good.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        processes = [process for process in processes if _runs(process)]
        if not processes or time.monotonic() >= deadline:
            return processes
        time.sleep(_POLL_S / 4)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class StandServer:
    """A running server, as a context manager; entering waits until /health answers 200.

    `workdir` is where the server runs and where its log, `server.log`, goes; a new temporary folder by
    default, which stays after the server. `port` 0 takes a free one.

    Entering raises UnknownFaultError for a wrong `options.faults`, UnsupportedError for options that the
    environment's release does not have, and StandServerError if the server dies
    or is not healthy in `start_timeout_s`.
    """

    def __init__(
        self,
        environment: StandEnvironment,
        model: Path,
        options: ServerOptions | None = None,
        *,
        workdir: Path | None = None,
        port: int = 0,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._environment = environment
        self._model = model
        self.options = options if options is not None else ServerOptions()
        self._workdir = workdir
        self._port = port
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log_file: IO[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}
        self._guard = contextlib.ExitStack()

    @property
    def url(self) -> str:
        """The base address, without a slash at the end."""
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def pid(self) -> int:
        """The launcher's process id, which is also its process group."""
        if self._process is None:
            raise StandServerError("the server was not started")
        return self._process.pid

    @property
    def log(self) -> Path:
        """The file with the server's standard output and error."""
        if self._workdir is None:
            raise StandServerError("the server was not started")
        return self._workdir / "server.log"

    def command(self) -> list[str]:
        """The command that starts the server."""
        where = ["--model-path", str(self._model), "--host", LOOPBACK, "--port", str(self._port)]
        python = str(self._environment.python)
        return [
            python,
            "-m",
            "sglang.launch_server",
            *where,
            *self.options.arguments(known_release(self._environment.release)),
        ]

    def environ(self) -> dict[str, str]:
        """The whole environment of the server's processes."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(_OWN_PREFIXES)}
        environments = [self._environment, *([self._environment.shared] if self._environment.shared else [])]
        programs = [str(environment.python.parent) for environment in environments]
        own_hosts = f"{LOOPBACK},localhost"
        no_proxy = env.get("NO_PROXY") or env.get("no_proxy")
        env |= {
            "KVWITNESS_STAND": "1",
            "PYTHONPATH": str(stand_path(stand=True)),
            "PYTHONUNBUFFERED": "1",
            # SGLang calls ninja by name when it compiles an extension.
            "PATH": os.pathsep.join([*programs, env.get("PATH", os.defpath)]),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCH_EXTENSIONS_DIR": str(self._environment.torch_extensions),
            "NO_PROXY": f"{no_proxy},{own_hosts}" if no_proxy else own_hosts,
        }
        env["no_proxy"] = env["NO_PROXY"]
        if self.options.faults:
            env[FAULT_VARIABLE] = self.options.faults
        if self.options.tree_core is not None:
            env["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = self.options.tree_core
        # Older releases bind the ranks of each replica as if it were alone, and stop when told of more.
        replicas = self.options.dp_size if self._environment.release == NEWEST else 1
        ranks = self.options.tp_size * replicas
        if ranks > 1:
            # SGLang gives each rank a NUMA node and stops where there are fewer nodes than ranks.
            cores = os.cpu_count() or 1
            binds = (str(rank % cores) for rank in range(ranks))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(binds)
        return env | dict(self.options.extra_env)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it is healthy. A server that does not get there is ended."""
        parse_faults(self.options.faults)
        self.command()  # before anything is made: it refuses what the release does not have
        if self._workdir is None:
            self._workdir = Path(tempfile.mkdtemp(prefix="kvwitness-stand-"))
        self._workdir.mkdir(parents=True, exist_ok=True)
        if self._port == 0:
            self._port = free_port()
        elif taken(self._port):
            # Its answers would be taken for this one's.
            raise StandServerError(f"port {self._port} is taken: name another, or end what listens there")
        self._log_file = self.log.open("wb")
        self._process = subprocess.Popen(
            self.command(),
            cwd=self._workdir,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # A run that is killed must not leave a server behind that polls on.
        self._guard.enter_context(killed_with_us(self._process.pid))
        try:
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < deadline:
                self.check_alive()
                self._note_children()
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        # Once more: another process may have been answering on this port.
                        self.check_alive()
                        return
                time.sleep(_POLL_S)
        raise StandServerError(
            f"the server was not healthy after {self._start_timeout_s:.0f} s; the end of {self.log}:\n"
            f"{log_tail(self.log)}"
        )

    def check_alive(self) -> None:
        """Raise StandServerError, with the tail of the log, if the server has ended."""
        if self._process is None:
            raise StandServerError("the server was not started")
        code = self._process.poll()
        if code is not None:
            raise StandServerError(f"the server ended with status {code}; the end of {self.log}:\n{log_tail(self.log)}")

    def wait(self) -> int:
        """Wait until the server ends by itself, and return its exit status."""
        if self._process is None:
            raise StandServerError("the server was not started")
        return self._process.wait()

    def scheduler_pids(self) -> list[int]:
        """The process ids of the schedulers, one for each tensor-parallel rank, in rank order."""
        found: list[tuple[str, int]] = []
        for child in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                title = " ".join(child.cmdline())
                if _SCHEDULER_TITLE in title:
                    found.append((title, child.pid))
        return [pid for _, pid in sorted(found)]

    def _note_children(self) -> None:
        """Remember the server's processes by identity, for one that outlives or leaves the group."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                self._seen.setdefault(child.pid, child)

    def stop(self) -> None:
        """End the server: SIGTERM, up to `stop_grace_s` seconds, then SIGKILL to all that is left of it.

        Idempotent. When this returns, no process of the server is left.
        """
        process = self._process
        if process is None:
            return
        self._note_children()
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=self._stop_grace_s)
        # The helpers normally go by themselves just after the launcher.
        left = _still_running(list(self._seen.values()), _HELPERS_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()
        self._guard.close()
        _still_running(left, self._stop_grace_s)
        self._process = None
        self._seen.clear()
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None
