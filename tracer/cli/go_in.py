"""``kvwitness attach --live``: into schedulers that were started without kvwitness. Every rank or none."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec
import psutil

from kvwitness.collectors.environment import directory_of_open_journal
from kvwitness.collectors.live.gdb import NotInjected
from kvwitness.collectors.live.inject import Injection, inject
from kvwitness.collectors.live.preflight import LiveWay, check_has_started, check_live
from kvwitness.collectors.server_info import ServerInfo, ServerInfoUnavailable, fetch_server_info
from kvwitness.collectors.standby import Answer, ControlError, ask, sockets_in
from kvwitness.collectors.target import NoTarget, Target, TargetProcess
from kvwitness.patches.schema.control import FOLDER, LEAVE, STATUS, Problem, State
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.ranks import OUTSIDE, Rank, check_state, every_rank, refuse_recording, refused, schedulers_of

_DENIED: Final = (
    "run kvwitness with CAP_SYS_PTRACE and a seccomp profile that allows ptrace (docker run --cap-add SYS_PTRACE), "
    "or start the server with `kvwitness serve --standby` next time"
)


class Plan(msgspec.Struct, frozen=True):
    """The schedulers that may be gone into, and how; nothing was touched to find that out."""

    ways: tuple[tuple[TargetProcess, LiveWay], ...]
    server: ServerInfo | None
    """What it says of itself; None where it did not answer."""


def plan(target: Target, only: Sequence[int]) -> Plan:
    """Look at everything that can be looked at from outside. Raises :class:`NoTarget`."""
    schedulers = schedulers_of(target, only)
    _check_is_new(target, schedulers)
    ways = tuple((process, check_live(process)) for process in schedulers)
    url = check_has_started(target)
    try:
        server = fetch_server_info(url)
    except ServerInfoUnavailable:
        server = None
    if server is not None and server.hicache.enabled is False:
        answer = Answer(False, problem=Problem.NO_HICACHE, error="the server runs without HiCache")
        raise refused(schedulers[0], answer)
    return Plan(ways, server)


def _check_is_new(target: Target, schedulers: Sequence[TargetProcess]) -> None:
    """Whether kvwitness is there already; a process is not stopped to find that out."""
    for process in schedulers:
        refuse_recording(process)
        with suppress(psutil.Error, OSError):
            folder = directory_of_open_journal(psutil.Process(process.pid))
            if folder is not None:
                answer = Answer(False, problem=Problem.ATTACHED, error=f"it records already, into {folder}")
                raise refused(process, answer)
    if target.directory is None:
        return
    with suppress(ControlError):
        sockets = sockets_in(target.directory)
        there = next((process for process in schedulers if process.pid in sockets), None)
        if there is not None:
            raise refused(there, Answer(False, problem=Problem.OTHERS, error="it is on standby"))


def go_in(planned: Plan, directory: Path, quota_mb: int) -> list[Rank]:
    """Have every scheduler open its control socket below ``directory``. Raises UserError; none has it then.

    ``quota_mb``: size of each journal, as KVWITNESS_QUOTA_MB.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FOLDER).mkdir(mode=0o700, exist_ok=True)
        # What is in there decides what the process loads.
        sockets_in(directory)
    except OSError as error:
        what = f"the data directory cannot be made ({error.strerror or error})"
        raise UserError(what, str(directory), "name another with --dir") from error
    except ControlError as error:
        raise UserError(str(error), str(directory), "name another with --dir") from error
    with ThreadPoolExecutor(len(planned.ways)) as pool:
        outcomes = list(pool.map(lambda each: _go_into(each[0], each[1], directory, quota_mb), planned.ways))
    ranks = [rank for rank in outcomes if isinstance(rank, Rank)]
    try:
        for process, problem in zip((process for process, _ in planned.ways), outcomes, strict=True):
            if isinstance(problem, UserError):
                raise problem
            if isinstance(problem, Answer):
                raise refused(process, problem, _undone(len(ranks)))
        for rank in ranks:
            check_state(rank, State.IDLE)
    except UserError:
        leave(ranks)
        raise
    return ranks


def leave(ranks: Sequence[Rank]) -> None:
    """Have the schedulers close their control sockets again; where something is attached it stays."""
    every_rank(ranks, LEAVE)


def _undone(count: int) -> str:
    return f"; the other {count} were left again, nothing is attached" if count else ""


def _go_into(process: TargetProcess, way: LiveWay, directory: Path, quota_mb: int) -> Rank | Answer | UserError:
    try:
        injection = inject(process.pid, way, directory, quota_mb << 20)
    except NotInjected as error:
        return UserError(f"it was not gone into: {error}", process.where, _DENIED if error.denied else OUTSIDE)
    except OSError as error:
        return UserError(f"it was not gone into: {error}", process.where, "name another folder with --dir")
    report = injection.report
    if not report.ok:
        return Answer(False, process.pid, report.problem, report.error)
    try:
        status = ask(Path(report.socket), STATUS)
    except ControlError as error:
        return Answer(False, process.pid, Problem.FAILED, str(error))
    return Rank(process, Path(report.socket), status, _about(way, injection))


def _about(way: LiveWay, injection: Injection) -> dict[str, str | int]:
    return {
        "tool": injection.tool,
        "stopped_us": injection.stopped_us,
        "python": way.interpreter.shown_version,
        "kvwitness": metadata.version("kvwitness"),
    }


def why_not_live(schedulers: Sequence[TargetProcess]) -> tuple[str, str]:
    """The tool that would go in, and ""; or "" and why it cannot."""
    try:
        tools = {check_live(process).tool for process in schedulers}
    except NoTarget as error:
        return "", error.what
    return ", ".join(sorted(tools)), ""
