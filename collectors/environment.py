"""Facts about this machine and about the server's processes on it.

Nothing here identifies a person or a host: no host name, no user name, no environment variables but the one
that names the journal directory. What could not be read is listed as unknown, never guessed.
"""

from __future__ import annotations

import csv
import io
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx
import msgspec
import psutil

from kvwitness.collectors.redaction import redact_command
from kvwitness.collectors.server_info import is_loopback
from kvwitness.patches.schema.format import JOURNAL_SUFFIX

DIRECTORY_VARIABLE: Final = "KVWITNESS_DIR"
GPU_TIMEOUT_S: Final = 10.0
_GPU_FIELDS: Final = ("index", "name", "driver_version", "memory.total", "memory.used")
_SCHEDULER: Final = "sglang::scheduler"
_SERVER_WORDS: Final = ("sglang", "launch_server")


class GpuFact(msgspec.Struct, frozen=True):
    """One GPU as ``nvidia-smi`` lists it."""

    index: int
    name: str
    driver: str
    memory_total_mib: int | None
    memory_used_mib: int | None


class HostFacts(msgspec.Struct, frozen=True):
    """This machine. None or an empty tuple together with a line in ``unknown``: could not be read."""

    kernel: str
    machine: str
    python: str
    cpu_model: str | None
    logical_cpus: int | None
    physical_cpus: int | None
    numa_nodes: int | None
    memory_total_bytes: int
    memory_available_bytes: int
    gpus: tuple[GpuFact, ...]
    unknown: tuple[str, ...]


class MemoryReading(msgspec.Struct, frozen=True):
    """Memory at one moment, in bytes (of GPUs in MiB). A NUMA node or GPU that cannot be read has no key."""

    available: int
    swap_used: int
    server_rss: int | None
    """Of the server's processes together; pages that they share count once for each. None: not seen from here."""
    numa_free: dict[str, int]
    gpu_used_mib: dict[str, int]


class ProcessFacts(msgspec.Struct, frozen=True):
    """One process of the server. ``command`` has its credentials replaced."""

    pid: int
    parent: int | None
    name: str
    command: tuple[str, ...]
    rss_bytes: int | None
    unknown: tuple[str, ...] = ()


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process, and no other that gets its number later. ``started``: in s since the epoch."""

    pid: int
    started: float


class ServerProcesses(msgspec.Struct, frozen=True):
    """The process tree behind a URL, the topmost one first; empty with a ``reason``."""

    processes: tuple[ProcessFacts, ...]
    reason: str = ""


class JournalDirectory(msgspec.Struct, frozen=True):
    """Where the server behind a URL writes its journals; ``path`` None with a ``reason``."""

    path: Path | None
    reason: str = ""


def host_facts() -> HostFacts:
    """Describe this machine. Takes up to :data:`GPU_TIMEOUT_S` when ``nvidia-smi`` hangs."""
    unknown: list[str] = []
    memory = psutil.virtual_memory()
    gpus, gpu_problem = _gpus()
    cpu, nodes = _cpu_model(), _numa_nodes()
    for problem in (gpu_problem, None if cpu else "cpu_model", None if nodes else "numa_nodes"):
        if problem:
            unknown.append(problem)
    return HostFacts(
        kernel=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        python=platform.python_version(),
        cpu_model=cpu,
        logical_cpus=psutil.cpu_count(),
        physical_cpus=psutil.cpu_count(logical=False),
        numa_nodes=nodes,
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        gpus=gpus,
        unknown=tuple(unknown),
    )


def memory_reading(pids: Iterable[int] = (), *, gpus: bool = True) -> MemoryReading:
    """Memory now: of this machine, of its NUMA nodes and GPUs, and of the processes ``pids``."""
    found = _gpus()[0] if gpus else ()
    rss = [size for pid in pids if (size := _rss(pid)) is not None]
    return MemoryReading(
        available=psutil.virtual_memory().available,
        swap_used=psutil.swap_memory().used,
        server_rss=sum(rss) if rss else None,
        numa_free=_numa_free(),
        gpu_used_mib={str(gpu.index): gpu.memory_used_mib for gpu in found if gpu.memory_used_mib is not None},
    )


def _rss(pid: int) -> int | None:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return None


def _numa_free() -> dict[str, int]:
    """Free bytes by node, from ``/sys``. A node without memory has none."""
    free: dict[str, int] = {}
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/meminfo")):
        with suppress(OSError, ValueError, IndexError):
            for line in path.read_text("utf-8", "replace").splitlines():
                if "MemFree:" in line:
                    free[path.parent.name] = int(line.split()[-2]) << 10
    return free


def find_server_processes(url: str) -> ServerProcesses:
    """The server's processes, when ``url`` is on this machine and this user may see them."""
    tree, reason = server_tree(url)
    return ServerProcesses(tuple(_describe(process) for process in tree), reason)


def server_identity(url: str) -> tuple[ProcessIdentity, ...]:
    """The topmost process of the server behind ``url`` and its schedulers; empty where they cannot be seen."""
    tree, _ = server_tree(url)
    schedulers = sorted((one for one in tree[1:] if _SCHEDULER in _title(one)), key=lambda process: process.pid)
    return tuple(
        ProcessIdentity(process.pid, process.create_time())
        for process in (*tree[:1], *schedulers)
        if process.is_running()
    )


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def locate_kvwitness_dir(url: str) -> JournalDirectory:
    """Find the directory in which the server behind ``url`` keeps its journals.

    Two traces are followed in every process of the server: ``KVWITNESS_DIR`` in the environment that it was
    started with, and journal files that it holds open (SGLang renames its processes, which overwrites the
    environment that the kernel shows).
    """
    tree, reason = server_tree(url)
    if not tree:
        return JournalDirectory(None, reason)
    refused = 0
    for look in (directory_in_environment, directory_of_open_journal):
        for process in tree:
            try:
                found = look(process)
            except psutil.AccessDenied:
                refused += 1
                continue
            except (psutil.Error, OSError):
                continue
            if found is not None:
                return JournalDirectory(found)
    if refused:
        return JournalDirectory(
            None, f"the server's processes belong to another user: run as that user or name the {DIRECTORY_VARIABLE}"
        )
    return JournalDirectory(None, f"the server runs without {DIRECTORY_VARIABLE}")


def find_kvwitness_dir(url: str) -> Path | None:
    """:func:`locate_kvwitness_dir` for callers that do not need the reason."""
    return locate_kvwitness_dir(url).path


def parse_gpus(text: str) -> tuple[GpuFact, ...]:
    """The GPUs in ``nvidia-smi --format=csv,noheader,nounits`` output of index, name, driver and memory."""
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    return tuple(
        GpuFact(int(row[0]), row[1], row[2], _number(row[3]), _number(row[4]))
        for row in rows
        if len(row) == len(_GPU_FIELDS) and row[0].isdigit()
    )


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _gpus() -> tuple[tuple[GpuFact, ...], str | None]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return (), "gpus: no nvidia-smi here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"gpus: nvidia-smi: {type(error).__name__}"
    if done.returncode != 0:
        return (), f"gpus: nvidia-smi ended with {done.returncode}"
    return parse_gpus(done.stdout), None


def _cpu_model() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, colon, value = line.partition(":")
            if colon and name.strip().lower() in ("model name", "hardware", "cpu model"):
                return value.strip()
    return platform.processor() or None


def _numa_nodes() -> int | None:
    with suppress(OSError):
        return len([path for path in Path("/sys/devices/system/node").iterdir() if path.name[4:].isdigit()]) or None
    return None


def server_tree(url: str) -> tuple[list[psutil.Process], str]:
    """The process that listens at ``url``, its SGLang ancestors and all their descendants; or why not."""
    try:
        parsed = httpx.URL(url)
        port = parsed.port or {"http": 80, "https": 443}.get(parsed.scheme)
        local = is_loopback(url)
    except (httpx.InvalidURL, TypeError) as error:
        return [], f"{url} is not a URL: {error}"
    if not local:
        return [], f"{parsed.host} is not this machine's loopback address: its processes cannot be seen from here"
    try:
        listeners = [
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        ]
    except psutil.AccessDenied:
        return [], "this user may not list the machine's connections"
    except (psutil.Error, OSError) as error:
        return [], f"the machine's connections cannot be listed: {error}"
    if not listeners:
        return [], f"no process listens on port {port}"
    pid = next((pid for pid in listeners if pid is not None), None)
    if pid is None:
        return [], f"the process that listens on port {port} belongs to another user or another namespace"
    try:
        top = _topmost(psutil.Process(pid))
        return [top, *_quietly(lambda: top.children(recursive=True))], ""
    except psutil.Error as error:
        return [], f"the process that listens on port {port} cannot be read: {error}"


def server_of(pid: int) -> list[psutil.Process]:
    """The process ``pid``, its SGLang ancestors and all their descendants. Raises psutil.Error."""
    top = _topmost(psutil.Process(pid))
    return [top, *_quietly(lambda: top.children(recursive=True))]


def _topmost(process: psutil.Process) -> psutil.Process:
    """With several HTTP workers the listener is a child: climb while the parent is SGLang too."""
    while True:
        parent = process.parent()
        if parent is None or parent.pid <= 1:
            return process
        try:
            command = " ".join(parent.cmdline())
            python = "python" in parent.name().lower() or parent.name().startswith("sglang")
        except psutil.Error:
            return process
        if not python or not any(word in command for word in _SERVER_WORDS):
            return process
        process = parent


def _quietly(read: Callable[[], Iterable[psutil.Process]]) -> Iterator[psutil.Process]:
    try:
        yield from read()
    except psutil.Error:
        return


def _describe(process: psutil.Process) -> ProcessFacts:
    unknown: list[str] = []
    name = ""
    command: tuple[str, ...] = ()
    parent: int | None = None
    rss: int | None = None
    try:
        name = process.name()
        parent = process.ppid()
        rss = process.memory_info().rss
        command = redact_command([part for part in process.cmdline() if part])
    except psutil.Error as error:
        unknown.append(f"{type(error).__name__} after {name or 'nothing'} was read")
    return ProcessFacts(process.pid, parent, name, command, rss, tuple(unknown))


def directory_in_environment(process: psutil.Process) -> Path | None:
    """``KVWITNESS_DIR`` in the environment that a process was started with. Raises psutil.Error."""
    value = process.environ().get(DIRECTORY_VARIABLE)
    if not value:
        return None
    path = Path(value)
    return path if path.is_absolute() else Path(os.path.normpath(Path(process.cwd()) / path))


def directory_of_open_journal(process: psutil.Process) -> Path | None:
    """The folder of a journal that a process holds open. Raises psutil.Error."""
    for opened in process.open_files():
        if opened.path.endswith(JOURNAL_SUFFIX):
            return Path(opened.path).parent
    return None
