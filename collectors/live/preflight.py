"""Whether a scheduler may be gone into while it serves, found out without touching it.

Everything here reads files below ``/proc``. That ``/proc/PID/mem`` can be opened is the kernel's own answer to
whether this user may attach: the same checks (user, capabilities, Yama, dumpable) stand before both.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from kvwitness.collectors.live.debugger import KNOWS_AMX, Gdb, NoGdb, find_gdb
from kvwitness.collectors.live.interpreter import Interpreter, NoInterpreter, interpreter_of
from kvwitness.collectors.target import NoTarget, Target, TargetProcess

GDB: Final = "gdb"
REMOTE_EXEC: Final = "sys.remote_exec"
OLDEST: Final = (3, 11)
OWN_WAY: Final = (3, 14)
"""From here on CPython has a way in of its own."""

_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_CAP_SYS_PTRACE: Final = 19
_CPUINFO: Final = Path("/proc/cpuinfo")
_AMX: Final = "amx_tile"
_STANDBY: Final = "start it with `kvwitness serve --standby` next time"
_OUTSIDE: Final = "what the server itself reports is left: kvwitness run abc --url URL"
_REACHED_AT: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Where one that listens on every address is asked."""
_NAMESPACES: Final = {"pid": "PID namespace", "mnt": "mount namespace"}


class GdbFound(msgspec.Struct, frozen=True):
    """The gdb that would go into processes of this machine, or why none would."""

    gdb: str
    """Its version and path; "" where there is none."""
    problem: str = ""
    what_to_do: str = ""


class LiveWay(msgspec.Struct, frozen=True):
    """How a process can be gone into: the Python that is in it, and the gdb, where it takes one."""

    interpreter: Interpreter
    gdb: Gdb | None
    """None: the Python has a way in of its own."""

    @property
    def tool(self) -> str:
        return GDB if self.gdb is not None else REMOTE_EXEC


def check_live(process: TargetProcess) -> LiveWay:
    """Whether the scheduler ``process`` can be gone into, and how. Raises :class:`NoTarget`."""
    where = process.where
    try:
        _check_namespaces(process.pid, where)
        _check_state(process.pid, where)
        _check_permission(process.pid, where)
        interpreter = interpreter_of(process.pid)
    except NoInterpreter as error:
        raise NoTarget(f"it cannot be gone into: {error}", where, f"{_STANDBY}; until then {_OUTSIDE}") from error
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess) as error:
        raise NoTarget("it has ended", where, "look whether the server still runs") from error
    except (PermissionError, psutil.AccessDenied) as error:
        raise NoTarget("it belongs to another user, or may not be looked at", where, _as_user(process.pid)) from error
    if interpreter.version[:2] < OLDEST:
        raise NoTarget(
            f"its Python is {interpreter.shown_version}, and 3.11 is the oldest that can be gone into",
            where,
            f"{_STANDBY}; until then {_OUTSIDE}",
        )
    return LiveWay(interpreter, gdb_for(interpreter, where))


def check_has_started(target: Target) -> str:
    """The address at which the server answers.

    Raises :class:`NoTarget` for one that is still loading: the port is opened when every scheduler is ready.
    """
    for process in target.others:
        with suppress(psutil.Error):
            for connection in psutil.Process(process.pid).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    host, port = connection.laddr.ip, connection.laddr.port
                    return f"http://{_REACHED_AT.get(host) or (f'[{host}]' if ':' in host else host)}:{port}"
    raise NoTarget("it is still starting: its port is not open", target.where, "try again when it answers requests")


def takes_gdb(version: str) -> bool:
    """Whether a Python of this version, as ``3.12.1``, is gone into by gdb."""
    return tuple(map(int, version.split(".")[:2])) < OWN_WAY


def gdb_for(interpreter: Interpreter, where: str) -> Gdb | None:
    """The gdb that goes into this Python, None where it takes none. Raises :class:`NoTarget` when there is none."""
    if interpreter.version[:2] >= OWN_WAY:
        return None
    try:
        gdb = find_gdb()
    except NoGdb as error:
        what = f"{error.what}, and Python {interpreter.shown_version} has no other way in"
        raise NoTarget(what, where, f"{error.what_to_do}, or {_STANDBY}") from error
    too_old = why_too_old(gdb)
    if too_old:
        raise NoTarget(too_old, where, f"{gdb.newer}, or {_STANDBY}")
    return gdb


def look_for_gdb() -> GdbFound:
    """What :func:`gdb_for` would find, before there is a process to go into."""
    try:
        gdb = find_gdb()
    except NoGdb as error:
        return GdbFound("", error.what, error.what_to_do)
    too_old = why_too_old(gdb)
    return GdbFound(gdb.shown, too_old, gdb.newer if too_old else "")


def why_too_old(gdb: Gdb) -> str:
    """Why ``gdb`` cannot go into any process of this machine, "" where it can: no scheduler stands still for that."""
    if gdb.knows_amx or _AMX not in _processor_flags():
        return ""
    return (
        f"{gdb.shown} cannot go into processes on a processor with AMX, as this one is; gdb {KNOWS_AMX} and newer can"
    )


def _processor_flags() -> set[str]:
    with suppress(OSError), _CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return set(value.split())
    return set()


def _check_namespaces(pid: int, where: str) -> None:
    for name, title in _NAMESPACES.items():
        try:
            same = Path(f"/proc/{pid}/ns/{name}").stat().st_ino == Path(f"/proc/self/ns/{name}").stat().st_ino
        except PermissionError:
            continue  # What may not be looked at is refused below, with its reason.
        if not same:
            raise NoTarget(
                f"it runs in another container ({title})",
                where,
                "run kvwitness inside that container (docker exec, kubectl exec)",
            )
    with suppress(PermissionError):
        if Path(f"/proc/{pid}/root").readlink() != Path("/proc/self/root").readlink():
            raise NoTarget("it sees another root folder (chroot)", where, "run kvwitness inside that root")


def _check_state(pid: int, where: str) -> None:
    fields = _status(pid)
    tracer = int(fields.get("TracerPid", "0"))
    if tracer:
        name = _name(tracer)
        raise NoTarget(
            f"another debugger is attached to it ({name}, process {tracer})", where, "end that first, and try again"
        )
    if fields.get("State", "").startswith(("T", "t")):
        raise NoTarget("it is stopped", where, f"let it run on (kill -CONT {pid}), and try again")
    if fields.get("State", "").startswith("Z"):
        raise NoTarget("it has ended", where, "look whether the server still runs")


def _check_permission(pid: int, where: str) -> None:
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError as error:
        raise NoTarget(*_why_not(pid, where)) from error


def _why_not(pid: int, where: str) -> tuple[str, str, str]:
    """Why the kernel does not let this user attach, and what would help."""
    status = _status(pid)
    user = int(status.get("Uid", "-1").split()[0])
    if user != os.geteuid():
        return "it belongs to another user", where, _as_user(pid)
    scope = _YAMA.read_text().strip() if _YAMA.is_file() else "0"
    add = "run kvwitness with CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE; or as root)"
    if scope == "3":
        return "the kernel allows no process to attach (kernel.yama.ptrace_scope is 3)", where, _STANDBY
    if scope in ("1", "2") and not may_trace():
        what = f"the kernel lets only privileged processes attach (kernel.yama.ptrace_scope is {scope})"
        return what, where, f"{add}, or {_STANDBY}"
    return "the kernel does not allow to attach to it (no CAP_SYS_PTRACE, or it is protected)", where, add


def may_trace() -> bool:
    """Whether this process has CAP_SYS_PTRACE."""
    return bool(int(_status(os.getpid()).get("CapEff", "0"), 16) >> _CAP_SYS_PTRACE & 1)


def _as_user(pid: int) -> str:
    with suppress(psutil.Error):
        return f"run kvwitness as its user, {psutil.Process(pid).username()}"
    return "run kvwitness as its user"


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "unknown"
