"""The schedulers of a server, one per rank, and how a command speaks to all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import psutil

from kvwitness.collectors.environment import directory_of_open_journal
from kvwitness.collectors.standby import STANDBY_VARIABLE, Answer, ControlError, ask, sockets_in
from kvwitness.collectors.target import NoTarget, Target, TargetProcess, target_at, target_of
from kvwitness.patches.schema.control import STATUS, Problem, State
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.ledger.described import Ranks, Unreadable, read_as
from kvwitness.tracer.verdicts.places import sizes_of

OUTSIDE: Final = "what the server itself reports is left: kvwitness run abc --url URL"
_REMEDIES: Final[Mapping[str, str]] = {
    Problem.STARTING: "try again when it answers requests",
    Problem.NO_HICACHE: "start it with --enable-hierarchical-cache",
    Problem.UNKNOWN_TREE: OUTSIDE,
    Problem.ATTACHED: "kvwitness detach ends that first",
    Problem.NOT_ATTACHED: "kvwitness attach begins to record",
    Problem.NO_STEP: "look whether it hangs or is paused, and try again",
    Problem.NO_JOURNAL: "make room in its data folder, or give it the rights to write there",
    Problem.NO_SCHEDULER: f"give the server's --url; else {OUTSIDE}",
    Problem.OTHERS: "kvwitness attach without --live needs no way in; kvwitness detach ends what is there",
    Problem.FAILED: "its log says more",
}


class Rank(msgspec.Struct, frozen=True):
    """One scheduler and how to reach it."""

    process: TargetProcess
    socket: Path
    status: Answer
    about: dict[str, str | int] = {}
    """What an attachment's journal shall say of the way in."""

    @property
    def name(self) -> str:
        """The process and its place among the ranks."""
        known = self.status.ranks
        places = ("tp_rank", "pp_rank", "dp_rank")
        numbers = [f"{place[:2]} {known[place]}" for place in places if known.get(place) is not None]
        return f"scheduler {self.process.pid}" + (f" ({', '.join(numbers)})" if numbers else "")


@contextmanager
def no_target() -> Iterator[None]:
    """Where there is nothing to attach to, that ends the command in one line."""
    try:
        yield
    except NoTarget as error:
        raise UserError(error.what, error.where, error.what_to_do) from error


def find_target(url: str | None, pid: int | None) -> Target:
    """The server that the command was given. Raises UserError or :class:`NoTarget`."""
    if (url is None) == (pid is None):
        raise UserError("give --url or --pid", "kvwitness", "the server's address, or any of its processes")
    return target_at(url) if url is not None else target_of(pid or 0)


def schedulers_of(target: Target, only: Sequence[int] = ()) -> tuple[TargetProcess, ...]:
    """The server's schedulers, or those of them that ``only`` names. Raises :class:`NoTarget`."""
    found = target.schedulers
    if not found:
        raise NoTarget("no scheduler is among its processes", target.where, "try again when it has started")
    known = {process.pid for process in found}
    strange = next((pid for pid in only if pid not in known), None)
    if strange is not None:
        pids = ", ".join(map(str, sorted(known)))
        raise NoTarget("it is no scheduler of this server", f"process {strange}", f"its schedulers are {pids}")
    return tuple(process for process in found if not only or process.pid in only)


def ranks_waiting(target: Target, folder: Path, wanted: str, only: Sequence[int] = ()) -> list[Rank]:
    """Every scheduler that has a control socket below ``folder``, each in the wanted state.

    Raises :class:`NoTarget` or UserError.
    """
    try:
        sockets = sockets_in(folder)
    except ControlError as error:
        raise NoTarget(str(error), str(folder), "name the server's own folder with --dir") from error
    reachable = tuple(p for p in target.processes if p.pid in sockets)
    if wanted == State.ATTACHED or not target.schedulers:
        # A rank that was left out has no socket where the hooks came in live.
        schedulers = reachable or schedulers_of(target)
    else:
        schedulers = schedulers_of(target, only)
    ranks = [reach(process, sockets, folder) for process in schedulers]
    for rank in ranks:
        check_state(rank, wanted)
    if wanted == State.ATTACHED:
        ranks = [rank for rank in ranks if rank.status.state == State.ATTACHED]
        if not ranks:
            raise refused(schedulers[0], Answer(False, problem=Problem.NOT_ATTACHED, error="it is not attached"))
    return ranks


def check_state(rank: Rank, wanted: str) -> None:
    """Raises UserError where a rank cannot be attached to (or detached)."""
    state = rank.status.state
    if state == State.STARTING:
        raise refused(rank.process, Answer(False, problem=Problem.STARTING, error="it is still starting"))
    if rank.status.problem:
        raise refused(rank.process, rank.status)
    if wanted == State.IDLE and state == State.ATTACHED:
        text = f"it is attached already, recording into {rank.status.journal}"
        raise refused(rank.process, Answer(False, problem=Problem.ATTACHED, error=text))


def reach(process: TargetProcess, sockets: Mapping[int, Path], folder: Path) -> Rank:
    """Ask a scheduler how it is. Raises :class:`NoTarget`."""
    path = sockets.get(process.pid)
    if path is None:
        refuse_recording(process)
        raise NoTarget(
            f"it is not on standby: no control socket in {folder}",
            process.where,
            f"kvwitness attach --live goes into it while it runs; or start the server with {STANDBY_VARIABLE}=1 "
            f"(kvwitness serve --standby); without either, {OUTSIDE}",
        )
    try:
        return Rank(process, path, ask(path, STATUS))
    except ControlError as error:
        what = f"its control socket does not answer: {error}"
        raise NoTarget(what, process.where, "look whether it still runs") from error


def refuse_recording(process: TargetProcess) -> None:
    """Raises UserError where a process has recorded since it started: there is nothing to attach to it."""
    with suppress(psutil.Error, OSError, ControlError):
        folder = directory_of_open_journal(psutil.Process(process.pid))
        if folder is not None and process.pid not in sockets_in(folder):
            what = f"it records already, into {folder}"
            raise UserError(what, process.where, f"kvwitness show {folder} says which tier served its requests")


def refused(process: TargetProcess, answer: Answer, undone: str = "") -> UserError:
    """What a scheduler refused, and what was undone elsewhere because of it."""
    return UserError(f"{answer.error}{undone}", process.where, _REMEDIES.get(answer.problem, OUTSIDE))


def every_rank(ranks: Sequence[Rank], command: str, more: Mapping[str, str] = MappingProxyType({})) -> list[Answer]:
    """Send a command, and ``more`` that is the same for all, to all ranks at once: they work in step."""
    if not ranks:
        return []
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: _send(rank, command, more), ranks))


def _send(rank: Rank, command: str, more: Mapping[str, str]) -> Answer:
    try:
        return ask(rank.socket, command, about={**rank.about, **more})
    except ControlError as error:
        return Answer(False, rank.process.pid, Problem.FAILED, str(error))


def expected_ranks(answer: Answer) -> int:
    """Of how many schedulers the server consists, by what one of them says; 1 where it says nothing readable."""
    try:
        return prod(sizes_of(read_as(Ranks, answer.ranks)))
    except Unreadable:
        return 1
