"""``kvwitness attach`` and ``detach``: begin and end recording on a server that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click

from kvwitness.collectors.server_info import ServerInfo
from kvwitness.collectors.standby import Answer
from kvwitness.collectors.target import NoTarget, Target, folder_of
from kvwitness.patches.schema.control import ATTACH, DETACH, START, State, Way
from kvwitness.patches.start import given_id, new_id
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.go_in import Plan, go_in, leave, plan, why_not_live
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.cli.outside import outside_options, record_outside
from kvwitness.tracer.cli.ranks import (
    Rank,
    every_rank,
    expected_ranks,
    find_target,
    no_target,
    ranks_waiting,
    refused,
)

_NOT_HTTP: Final = "the HTTP process is not attached to: a client's traceparent is not recorded"


def _target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option("--url", help="The server, http://127.0.0.1:30000 for example."),
            click.option("--pid", type=int, help="Any process of the server instead."),
            click.option(
                "--dir",
                "directory",
                type=click.Path(path_type=Path),
                help="Its data folder.  [default: asked of the server's processes; --live: kvwitness-data/<time>]",
            ),
        )
    ):
        command = option(command)
    return command


@click.command()
@_target_options
@click.option("--live", is_flag=True, help="Go into a server that was started without kvwitness.")
@click.option(
    "--only",
    type=int,
    multiple=True,
    metavar="PID",
    help="This scheduler and not the others (repeatable): nothing is confirmed that they had a part in.",
)
@click.option(
    "--quota-mb",
    type=click.IntRange(min=2),
    default=256,
    show_default=True,
    envvar="KVWITNESS_QUOTA_MB",
    help="Size of each journal, allocated at once (--live).",
)
@click.option("--yes", is_flag=True, help="Do not ask before the server is touched.")
@outside_options
@json_option
def attach(
    url: str | None,
    pid: int | None,
    directory: Path | None,
    live: bool,
    only: tuple[int, ...],
    quota_mb: int,
    yes: bool,
    as_json: bool,
    outside: bool,
    **recording: Any,
) -> None:
    """Begin to record on a running server; it is not restarted.

    A server that was started on standby is asked over its control socket and is not stopped. Any other is gone
    into with --live: each scheduler stands still for some tenths of a second, and then waits as one on standby.

    Every rank or none. What its cache holds at that moment is recorded, so that a later read of it can be
    confirmed ("resident at attach").

    \b
    Example:
      kvwitness attach --url http://127.0.0.1:30000
      kvwitness attach --url http://127.0.0.1:30000 --live --dir /data/kvw
      kvwitness attach --outside --url http://127.0.0.1:30000 --out bundle
    """
    if outside:
        record_outside(url, directory, as_json, **recording)
        return
    with no_target():
        target = find_target(url, pid)
        if live:
            planned = plan(target, only)
            if not as_json:
                _show_plan(target, planned)
            if not yes:
                _ask(len(planned.ways))
            if not as_json:
                note("going in: this takes some seconds, of which each scheduler stands still for some tenths")
            folder = directory or Path("kvwitness-data") / f"{datetime.now():%Y%m%d-%H%M%S}"
            ranks = go_in(planned, folder.absolute(), quota_mb)
            _note_missing(ranks)
        else:
            ranks = ranks_waiting(target, folder_of(target, directory), State.IDLE, only)
            if not as_json:
                _show_ranks(target, ranks)
            if not yes:
                _ask(len(ranks))
    answers = _attach_all(ranks)
    if as_json:
        print_json({"directory": ranks[0].status.directory, "ranks": [_facts(r, a) for r, a in _pairs(ranks, answers)]})
        return
    for rank, answer in _pairs(ranks, answers):
        click.echo(_attached_line(rank, answer))
    click.echo(f"recording into {ranks[0].status.directory}: kvwitness show {ranks[0].status.directory}")


def _attach_all(ranks: Sequence[Rank]) -> list[Answer]:
    """All ranks, or UserError and none."""
    try:
        answers = every_rank(ranks, ATTACH, {START: given_id() or new_id()})
        failed = [(rank, answer) for rank, answer in _pairs(ranks, answers) if not answer.ok]
        if failed:
            rank, answer = failed[0]
            done = sum(answer.ok for answer in answers)
            raise refused(rank.process, answer, f"; the other {done} were detached again" if done else "")
    except BaseException:
        every_rank(ranks, DETACH)
        leave([rank for rank in ranks if rank.status.way == Way.LIVE])
        raise
    return answers


@click.command()
@_target_options
@json_option
@click.pass_context
def detach(ctx: click.Context, url: str | None, pid: int | None, directory: Path | None, as_json: bool) -> None:
    """Put the server's own functions back and end the journals.

    A server that was started on standby stays so; of one that was gone into live, kvwitness leaves altogether.

    The exit code is 1 when a function could not be put back because something else has changed it since.

    \b
    Example:
      kvwitness detach --url http://127.0.0.1:30000
    """
    with no_target():
        target = find_target(url, pid)
        if target.directory is None and directory is None:
            raise NoTarget("it is not attached", target.where, "kvwitness attach begins to record")
        ranks = ranks_waiting(target, folder_of(target, directory), State.ATTACHED)
    answers = every_rank(ranks, DETACH)
    for rank, answer in _pairs(ranks, answers):
        if not answer.ok:
            raise refused(rank.process, answer)
    left = sorted({name for answer in answers for name in answer.not_restored})
    if as_json:
        print_json({"ranks": [_facts(r, a) for r, a in _pairs(ranks, answers)], "not_restored": left})
    else:
        for rank, answer in _pairs(ranks, answers):
            click.echo(f"{rank.name}: {answer.restored} functions are SGLang's own again; {answer.journal}")
    for name in left:
        note(f"{name} was changed by something else meanwhile and was left as it is")
    ctx.exit(1 if left else 0)


def _ask(count: int) -> None:
    if not sys.stdin.isatty():
        raise UserError("nobody is there to be asked", "kvwitness attach", "say --yes")
    if not click.confirm(f"Attach to {count} scheduler{'s' if count > 1 else ''}?", err=True):
        raise click.Abort


# --- words -------------------------------------------------------------------------------------------


def _pairs(ranks: Sequence[Rank], answers: Sequence[Answer]) -> Iterator[tuple[Rank, Answer]]:
    return zip(ranks, answers, strict=True)


def _show_ranks(target: Target, ranks: Sequence[Rank]) -> None:
    first = ranks[0].status
    core = f", {first.tree_core}" if first.tree_core not in ("", "NoneType") else ""
    click.echo(f"SGLang {first.sglang}, {first.tree_class}{core}, write policy {first.write_policy}", err=True)
    _show_processes(target, {rank.process.pid: rank.name for rank in ranks})
    _note_missing(ranks)
    tool, why = why_not_live([rank.process for rank in ranks])
    note("way in: standby, by the control socket; no process is stopped, nothing is injected")
    note(_NOT_HTTP)
    note(f"also open: {f'live ({tool}), ' if tool else ''}outside only" + (f"; not live: {why}" if why else ""))


def _show_plan(target: Target, planned: Plan) -> None:
    click.echo(_told(planned.server), err=True)
    _show_processes(target, {})
    ways = sorted({f"{way.tool}, Python {way.interpreter.shown_version}" for _, way in planned.ways})
    note(f"way in: live ({'; '.join(ways)}); each scheduler stands still for some tenths of a second")
    note("also open: outside only; not standby: the server was started without it")
    note(_NOT_HTTP)


def _told(server: ServerInfo | None) -> str:
    """What a server says of itself, for somebody who is to decide whether it is the right one."""
    if server is None:
        return "SGLang (it did not say what it is)"
    hicache = server.hicache
    sizes = [("tp", server.tp_size), ("pp", server.pp_size), ("dp", server.dp_size)]
    parts = [
        f"SGLang {server.version or '(version unknown)'}",
        server.model_path or "",
        ", ".join(f"{name} {size}" for name, size in sizes if size is not None),
        f"HiCache {'on' if hicache.enabled else 'not reported'}",
        f"write policy {hicache.write_policy}" if hicache.write_policy else "",
        f"page size {server.page_size}" if server.page_size else "",
    ]
    return ", ".join(filter(None, parts))


def _show_processes(target: Target, names: dict[int, str]) -> None:
    for process in target.processes:
        title = process.title if process.role != "server" else ""
        place = names.get(process.pid, title)
        click.echo(f"  {process.pid:>8}  {process.role}{f'  {place}' if place else ''}", err=True)


def _note_missing(ranks: Sequence[Rank]) -> None:
    expected = expected_ranks(ranks[0].status)
    if len(ranks) < expected:
        note(f"{len(ranks)} of {expected} ranks: without the others nothing is confirmed that they had a part in")


def _attached_line(rank: Rank, answer: Answer) -> str:
    snapshot = answer.snapshot
    whole = "" if snapshot.get("complete") else " (the snapshot goes on, or ended early)"
    stopped = int(rank.about.get("stopped_us", 0))
    stood = f"stood still for {stopped / 1e6:.2f} s ({rank.about['tool']}), " if stopped else ""
    return (
        f"{rank.name}: {stood}{answer.hooks} functions hooked in {answer.pause_us / 1000:.1f} ms; resident at attach: "
        f"{snapshot.get('l1_tokens', 0)} tokens in L1, {snapshot.get('l2_tokens', 0)} in L2{whole}"
    )


def _facts(rank: Rank, answer: Answer) -> dict[str, Any]:
    return {
        "pid": rank.process.pid,
        "ranks": rank.status.ranks,
        "way": rank.status.way,
        **rank.about,
        "journal": answer.journal,
        "hooks": answer.hooks,
        "pause_us": answer.pause_us,
        "snapshot": answer.snapshot,
        "restored": answer.restored,
        "not_restored": list(answer.not_restored),
    }
