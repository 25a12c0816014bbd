"""``kvwitness attach`` and ``detach``: begin and end recording on a server that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from kvwitness.collectors.standby import STANDBY_VARIABLE, Answer, ControlError, ask, sockets_in
from kvwitness.collectors.target import (
    NoTarget,
    Target,
    TargetProcess,
    folder_of,
    target_at,
    target_of,
)
from kvwitness.patches.schema.control import ATTACH, DETACH, STATUS, Problem, State
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.cli.outside import outside_options, record_outside

_OUTSIDE: Final = "what the server itself reports is left: kvwitness run abc --url URL"
_REMEDIES: Final[Mapping[str, str]] = {
    Problem.STARTING: "try again when it answers requests",
    Problem.NO_HICACHE: "start it with --enable-hierarchical-cache",
    Problem.UNKNOWN_TREE: _OUTSIDE,
    Problem.ATTACHED: "kvwitness detach ends that first",
    Problem.NOT_ATTACHED: "kvwitness attach begins to record",
    Problem.NO_STEP: "look whether it hangs or is paused, and try again",
    Problem.NO_JOURNAL: "make room in its data folder, or give it the rights to write there",
    Problem.FAILED: "its log says more",
}


class Rank(msgspec.Struct, frozen=True):
    """One scheduler and how to reach it."""

    process: TargetProcess
    socket: Path
    status: Answer


def _target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option("--url", help="The server, http://127.0.0.1:30000 for example."),
            click.option("--pid", type=int, help="Any process of the server instead."),
            click.option(
                "--dir",
                "directory",
                type=click.Path(path_type=Path),
                help="Its data folder.  [default: asked of the server's processes]",
            ),
        )
    ):
        command = option(command)
    return command


@click.command()
@_target_options
@click.option("--yes", is_flag=True, help="Do not ask before the server is touched.")
@outside_options
@json_option
def attach(
    url: str | None, pid: int | None, directory: Path | None, yes: bool, as_json: bool, outside: bool, **recording: Any
) -> None:
    """Begin to record on a running server that was started on standby; it is not stopped or restarted.

    Every rank or none. What its cache holds at that moment is recorded, so that a later read of it can be
    confirmed ("resident at attach").

    \b
    Example:
      kvwitness attach --url http://127.0.0.1:30000
      kvwitness attach --outside --url http://127.0.0.1:30000 --out bundle
    """
    if outside:
        record_outside(url, directory, as_json, **recording)
        return
    with _no_target():
        target = _find(url, pid)
        ranks = _on_standby(target, folder_of(target, directory), State.IDLE)
    if not as_json:
        _show(target, ranks)
    if not yes:
        _ask(len(ranks))
    answers = _every_rank(ranks, ATTACH)
    failed = [(rank, answer) for rank, answer in zip(ranks, answers, strict=True) if not answer.ok]
    if failed:
        done = [rank for rank, answer in zip(ranks, answers, strict=True) if answer.ok]
        _every_rank(done, DETACH)
        rank, answer = failed[0]
        undone = f"; the other {len(done)} were detached again" if done else ""
        raise _refused(rank.process, answer, undone)
    if as_json:
        print_json({"directory": ranks[0].status.directory, "ranks": [_facts(r, a) for r, a in _pairs(ranks, answers)]})
        return
    for rank, answer in _pairs(ranks, answers):
        click.echo(_attached_line(rank, answer))
    click.echo(f"recording into {ranks[0].status.directory}: kvwitness show {ranks[0].status.directory}")


@click.command()
@_target_options
@json_option
@click.pass_context
def detach(ctx: click.Context, url: str | None, pid: int | None, directory: Path | None, as_json: bool) -> None:
    """Put the server's own functions back and end the journals; the server stays on standby.

    The exit code is 1 when a function could not be put back because something else has changed it since.

    \b
    Example:
      kvwitness detach --url http://127.0.0.1:30000
    """
    with _no_target():
        target = _find(url, pid)
        ranks = _on_standby(target, folder_of(target, directory), State.ATTACHED)
    answers = _every_rank(ranks, DETACH)
    for rank, answer in _pairs(ranks, answers):
        if not answer.ok:
            raise _refused(rank.process, answer, "")
    left = sorted({name for answer in answers for name in answer.not_restored})
    if as_json:
        print_json({"ranks": [_facts(r, a) for r, a in _pairs(ranks, answers)], "not_restored": left})
    else:
        for rank, answer in _pairs(ranks, answers):
            click.echo(f"{_name(rank)}: {answer.restored} functions are SGLang's own again; {answer.journal}")
    for name in left:
        note(f"{name} was changed by something else meanwhile and was left as it is")
    ctx.exit(1 if left else 0)


# --- who ---------------------------------------------------------------------------------------------


@contextmanager
def _no_target() -> Iterator[None]:
    try:
        yield
    except NoTarget as error:
        raise UserError(error.what, error.where, error.what_to_do) from error


def _find(url: str | None, pid: int | None) -> Target:
    if (url is None) == (pid is None):
        raise UserError("give --url or --pid", "kvwitness", "the server's address, or any of its processes")
    return target_at(url) if url is not None else target_of(pid or 0)


def _on_standby(target: Target, folder: Path, wanted: str) -> list[Rank]:
    """Every scheduler of the server, each in the wanted state. Raises :class:`NoTarget` or UserError."""
    try:
        sockets = sockets_in(folder)
    except ControlError as error:
        raise NoTarget(str(error), str(folder), "name the server's own folder with --dir") from error
    schedulers = target.schedulers or tuple(p for p in target.processes if p.pid in sockets)
    if not schedulers:
        raise NoTarget("no scheduler is among its processes", target.where, "try again when it has started")
    ranks = [_reach(process, sockets, folder) for process in schedulers]
    for rank in ranks:
        state = rank.status.state
        if state == State.STARTING:
            raise _refused(rank.process, Answer(False, problem=Problem.STARTING, error="it is still starting"), "")
        if rank.status.problem:
            raise _refused(rank.process, rank.status, "")
        if wanted == State.IDLE and state == State.ATTACHED:
            text = f"it is attached already, recording into {rank.status.journal}"
            raise _refused(rank.process, Answer(False, problem=Problem.ATTACHED, error=text), "")
    if wanted == State.ATTACHED:
        ranks = [rank for rank in ranks if rank.status.state == State.ATTACHED]
        if not ranks:
            answer = Answer(False, problem=Problem.NOT_ATTACHED, error="it is not attached")
            raise _refused(schedulers[0], answer, "")
    return ranks


def _reach(process: TargetProcess, sockets: Mapping[int, Path], folder: Path) -> Rank:
    where = f"process {process.pid} ({process.title or process.role})"
    path = sockets.get(process.pid)
    if path is None:
        raise NoTarget(
            f"it is not on standby: no control socket in {folder}",
            where,
            f"start the server with {STANDBY_VARIABLE}=1 (kvwitness serve --standby); without a restart, {_OUTSIDE}",
        )
    try:
        return Rank(process, path, ask(path, STATUS))
    except ControlError as error:
        raise NoTarget(f"its control socket does not answer: {error}", where, "look whether it still runs") from error


def _refused(process: TargetProcess, answer: Answer, undone: str) -> UserError:
    where = f"process {process.pid} ({process.title or process.role})"
    return UserError(f"{answer.error}{undone}", where, _REMEDIES.get(answer.problem, _OUTSIDE))


# --- what --------------------------------------------------------------------------------------------


def _every_rank(ranks: Sequence[Rank], command: str) -> list[Answer]:
    """Send a command to all ranks at once: they work in step."""
    if not ranks:
        return []
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: _send(rank, command), ranks))


def _send(rank: Rank, command: str) -> Answer:
    try:
        return ask(rank.socket, command)
    except ControlError as error:
        return Answer(False, rank.process.pid, Problem.FAILED, str(error))


def _ask(count: int) -> None:
    if not sys.stdin.isatty():
        raise UserError("nobody is there to be asked", "kvwitness attach", "say --yes")
    if not click.confirm(f"Attach to {count} scheduler{'s' if count > 1 else ''}?", err=True):
        raise click.Abort


# --- words -------------------------------------------------------------------------------------------


def _pairs(ranks: Sequence[Rank], answers: Sequence[Answer]) -> Iterator[tuple[Rank, Answer]]:
    return zip(ranks, answers, strict=True)


def _name(rank: Rank) -> str:
    known = rank.status.ranks
    numbers = [f"{name[:2]} {known[name]}" for name in ("tp_rank", "pp_rank", "dp_rank") if known.get(name) is not None]
    return f"scheduler {rank.process.pid}" + (f" ({', '.join(numbers)})" if numbers else "")


def _show(target: Target, ranks: Sequence[Rank]) -> None:
    first = ranks[0].status
    core = f", {first.tree_core}" if first.tree_core not in ("", "NoneType") else ""
    click.echo(f"SGLang {first.sglang}, {first.tree_class}{core}, write policy {first.write_policy}", err=True)
    for process in target.processes:
        click.echo(f"  {process.pid:>8}  {process.role}", err=True)
    expected = _expected_ranks(first.ranks)
    if len(ranks) < expected:
        note(f"{len(ranks)} of {expected} ranks run here: attach to the others where they run, or nothing is confirmed")
    note("way in: standby, by the control socket; no process is stopped, nothing is injected")


def _expected_ranks(ranks: Mapping[str, Any]) -> int:
    tp, pp = int(ranks.get("tp_size") or 1), int(ranks.get("pp_size") or 1)
    # With data-parallel attention the replicas share the ranks of the tensor-parallel group.
    dp = 1 if ranks.get("attn_tp_size") else int(ranks.get("dp_size") or 1)
    return tp * pp * dp


def _attached_line(rank: Rank, answer: Answer) -> str:
    snapshot = answer.snapshot
    whole = "" if snapshot.get("complete") else " (the snapshot goes on, or ended early)"
    return (
        f"{_name(rank)}: {answer.hooks} functions hooked in {answer.pause_us / 1000:.1f} ms; resident at attach: "
        f"{snapshot.get('l1_tokens', 0)} tokens in L1, {snapshot.get('l2_tokens', 0)} in L2{whole}"
    )


def _facts(rank: Rank, answer: Answer) -> dict[str, Any]:
    return {
        "pid": rank.process.pid,
        "ranks": rank.status.ranks,
        "journal": answer.journal,
        "hooks": answer.hooks,
        "pause_us": answer.pause_us,
        "snapshot": answer.snapshot,
        "restored": answer.restored,
        "not_restored": list(answer.not_restored),
    }
