"""``kvwitness serve``: run a server with tracing on, as if kvwitness were not there."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import click

from kvwitness.collectors.journal import find_journals
from kvwitness.collectors.standby import STANDBY_VARIABLE
from kvwitness.patches.start import INHERITED
from kvwitness.tracer.cli.digest import DIGEST_VARIABLE, digest_option
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.stand.paths import stand_path

WAY_IN: Final = "way-in"
"""Folder within the data directory that makes SGLang load the hooks: it goes when the data goes."""

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WATCHED: Final = (*_FORWARDED, signal.SIGCHLD)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the journals go.  [default: kvwitness-data/<time>]",
)
@click.option("--standby", is_flag=True, help="Record nothing until `kvwitness attach` asks for it.")
@digest_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@json_option
@click.pass_context
def serve(
    ctx: click.Context,
    directory: Path | None,
    standby: bool,
    digest: str,
    command: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run COMMAND, which starts an SGLang server, with tracing switched on.

    Signals are passed on to COMMAND and its exit code is returned. Nothing is installed; everything that is
    written goes into one directory.

    \b
    Example:
      kvwitness serve -- python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
    """
    if shutil.which(command[0]) is None:
        raise UserError("there is no such program", command[0], "check the command after --")
    target = (directory or Path("kvwitness-data") / f"{datetime.now():%Y%m%d-%H%M%S}").absolute()
    try:
        target.mkdir(parents=True, exist_ok=True)
        way_in = stand_path(target / WAY_IN, stand=False)
    except OSError as error:
        raise UserError(
            f"the data directory cannot be made ({error.strerror or error})", str(target), "name another with --dir"
        ) from error
    if as_json:
        print_json({"directory": str(target)})
    elif standby:
        note(f"kvwitness is on standby: kvwitness attach --dir {target} --url URL")
    else:
        note(f"kvwitness records into {target}")
    environment = child_environment(os.environ, target, way_in)
    if standby:
        environment[STANDBY_VARIABLE] = "1"
    if digest:
        environment[DIGEST_VARIABLE] = digest
    code = run_child(command, environment)
    if not as_json and not standby and not find_journals(target):
        note(f"nothing was recorded into {target}: no SGLang process that loads the hooks was seen")
    ctx.exit(code)


def child_environment(outer: Mapping[str, str], directory: Path, way_in: Path) -> dict[str, str]:
    """The environment of the traced server."""
    rest = outer.get("PYTHONPATH")
    path = f"{way_in}{os.pathsep}{rest}" if rest else str(way_in)
    # A server above this one has nothing to do with it.
    kept = {name: value for name, value in outer.items() if name != INHERITED}
    return {**kept, "KVWITNESS_DIR": str(directory), "PYTHONPATH": path}


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``command`` to its end, passing signals on; its exit code, or 128 plus the signal that ended it."""
    # Blocked signals are waited for instead of handled, which also tells who sent them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    # Inherited as "ignored", the end of the child would go unnoticed.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        try:
            child = os.posix_spawnp(command[0], list(command), dict(environment), setsigmask=before)
        except OSError as error:
            raise UserError(
                f"it cannot be started ({error.strerror or error})", command[0], "check the command after --"
            ) from error
        return _wait(child)
    finally:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(child: int) -> int:
    while True:
        seen = signal.sigwaitinfo(_WATCHED)
        if seen.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        elif seen.si_code <= 0:
            # Sent by a process. What the terminal sends (code above 0) reaches the child by itself, and a
            # second interrupt would cut short the server's own shutdown.
            os.kill(child, seen.si_signo)
