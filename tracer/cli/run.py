"""``kvwitness run``: drive a server through a protocol and write what was seen into a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from kvwitness.collectors.environment import find_server_processes, host_facts, locate_kvwitness_dir
from kvwitness.collectors.server_info import ServerInfoUnavailable
from kvwitness.collectors.standby import ControlError, ask, sockets_in
from kvwitness.patches.schema.control import STATUS, State
from kvwitness.tracer.bundle.abc import inputs_of_run
from kvwitness.tracer.bundle.places import recorded_journals
from kvwitness.tracer.bundle.rows import rows_of
from kvwitness.tracer.bundle.write import BundleInfo, check_destination, write_bundle
from kvwitness.tracer.cli.address import web_address
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.errors import INTERRUPTED, UserError
from kvwitness.tracer.cli.expect import met_expectations, unmet_expectations
from kvwitness.tracer.cli.findings import note_findings
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.cli.program import program
from kvwitness.tracer.cli.table import print_requests
from kvwitness.tracer.interrupt import finishing
from kvwitness.tracer.protocol.abc import AbcRun, Progress, UnfitServer, run_abc
from kvwitness.tracer.protocol.client import ServerClient, ServerUnavailable
from kvwitness.tracer.protocol.observer import JournalObserver
from kvwitness.tracer.protocol.options import AbcOptions
from kvwitness.tracer.spans.otlp_json import span_lines
from kvwitness.tracer.stand.progress import reporting

_DEFAULTS = AbcOptions()


@click.group()
def run() -> None:
    """Drive a running server through a protocol, judge what it did, and keep the evidence.

    \b
    Example:
      kvwitness run abc --url http://127.0.0.1:30000 --out bundle
    """


@run.command("abc")
@click.option(
    "--url",
    required=True,
    metavar="URL",
    callback=web_address("http://127.0.0.1:30000"),
    help="The server, http://127.0.0.1:30000 for example.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Bundle to write: a folder, or a .zip.")
@click.option("--replace", is_flag=True, help="Replace the bundle that is at --out.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Where the server records.  [default: asked of the server's processes]",
)
@click.option("--prefix-tokens", type=int, default=_DEFAULTS.prefix_tokens, show_default=True)
@click.option("--question-tokens", type=int, default=_DEFAULTS.question_tokens, show_default=True)
@click.option("--output-tokens", type=int, default=_DEFAULTS.output_tokens, show_default=True)
@click.option("--fills", type=int, help="Unrelated prompts before C.  [default: until the prefix has left L1]")
@click.option("--fill-tokens", type=int, help="Length of an unrelated prompt.  [default: as long as A]")
@click.option("--evict-host", is_flag=True, help="Push the prefix out of L2 as well.")
@click.option("--second-hit", is_flag=True, help="Send A twice (write_through_selective needs it).")
@click.option("--flush", "flush_between_bc", is_flag=True, help="Fault: empty the server's cache before C.")
@click.option("--control", is_flag=True, help="Control run, on a server without HiCache.")
@click.option("--warmups", type=int, default=_DEFAULTS.warmups, show_default=True, help="Prompts before A.")
@click.option("--seed", type=int, help="Of the prompts.  [default: drawn and recorded]")
@click.option("--dp-rank", type=int, help="Data-parallel rank to send to.")
@click.option("--keep-prompts", is_flag=True, help="Keep the token ids of A, B and C in the bundle.")
@click.option("--timeout", "timeout_s", type=float, default=120.0, show_default=True, help="Silence to bear, in s.")
@click.option("--api-key", envvar="KVWITNESS_API_KEY", help="Also from KVWITNESS_API_KEY.")
@click.option("--admin-api-key", envvar="KVWITNESS_ADMIN_API_KEY", help="Also from KVWITNESS_ADMIN_API_KEY.")
@click.option(
    "--expect", is_flag=True, help="Exit 1 unless A was recomputed, B's L1 read and C's L2 read are confirmed."
)
@json_option
@click.pass_context
def abc_command(
    ctx: click.Context,
    /,
    url: str,
    out: Path,
    replace: bool,
    directory: Path | None,
    timeout_s: float,
    api_key: str | None,
    admin_api_key: str | None,
    expect: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Send A, B, unrelated prompts and C, and keep the evidence.

    A computes a prefix, B reuses it from L1, the unrelated prompts push it out of L1, C asks for it again.
    Ctrl-C ends the run: what was recorded until then becomes a bundle that says so, and the exit code is 130.

    \b
    Example:
      kvwitness run abc --url http://127.0.0.1:30000 --out bundle --expect
    """
    with bundle_errors():
        check_destination(out, replace=replace)
    client = ServerClient(url, timeout_s=timeout_s, api_key=api_key, admin_api_key=admin_api_key)
    with client, reporting() as progress:
        with _run_errors(url):
            client.check()
        folder, journals_from = _find_journals_folder(url, directory)
        done = _run(AbcOptions(**options), client, folder, progress)
        with finishing(note), bundle_errors():
            progress.phase("Writing the bundle")
            paths = recorded_journals(folder) if folder else []
            inputs = inputs_of_run(done, host_facts(), find_server_processes(url), paths, journals_from)
            info = write_bundle(out, inputs, spans=span_lines, replace=replace)
    unmet = unmet_expectations(info.verdicts, done.records) if expect else ()
    _report(done, info, unmet, as_json)
    if expect and not unmet and not done.stopped:
        note(met_expectations())
    if done.interrupted:
        ctx.exit(INTERRUPTED)
    ctx.exit(1 if unmet or done.stopped else 0)


def _find_journals_folder(url: str, named: Path | None) -> tuple[Path | None, str]:
    """The folder, and where it comes from; or None and why."""
    if named is not None:
        if not named.is_dir():
            raise UserError("there is no such folder", str(named), "name the folder that `kvwitness serve` printed")
        if not recorded_journals(named):
            raise UserError(
                "there are no journals",
                str(named),
                "name the folder that `kvwitness serve` printed",
            )
        return named, f"{named} (named)"
    found = locate_kvwitness_dir(url)
    if found.path is None:
        note(
            f"warning: no journals, so nothing can be confirmed: {found.reason}; "
            "start the server with `kvwitness serve`, or name its folder with --dir"
        )
        return None, f"none: {found.reason}"
    _refuse_standby(url, found.path)
    return found.path, f"{found.path} (found through the server's processes)"


def _refuse_standby(url: str, folder: Path) -> None:
    """A server on standby records nothing before it is asked: the run would wait for what never comes."""
    serving = {process.pid for process in find_server_processes(url).processes}
    with suppress(ControlError):
        for pid, socket in sockets_in(folder).items():
            if pid in serving and ask(socket, STATUS).state == State.IDLE:
                raise UserError("it is on standby and records nothing", url, f"kvwitness attach --url {url} first")


def _run(options: AbcOptions, client: ServerClient, folder: Path | None, progress: Progress) -> AbcRun:
    with _run_errors(client.url):
        return run_abc(options, client, JournalObserver(folder) if folder else None, progress)


@contextmanager
def _run_errors(url: str) -> Iterator[None]:
    try:
        yield
    except UnfitServer as error:
        raise UserError(f"this run would prove nothing: {error}", url, "change the server or the run") from error
    except (ServerUnavailable, ServerInfoUnavailable) as error:
        raise UserError(str(error), url, "check --url, and that the server is up") from error
    except ValueError as error:
        raise UserError(str(error), "kvwitness run abc", "see `kvwitness run abc --help`") from error


def _report(done: AbcRun, info: BundleInfo, unmet: Sequence[str], as_json: bool) -> None:
    rows = rows_of(info.verdicts, done.records)
    if as_json:
        print_json(
            {
                "bundle": str(info.path),
                "run_id": done.run_id,
                "stopped": done.stopped,
                "findings": done.findings,
                "unmet": unmet,
                "requests": rows,
            }
        )
    else:
        ours = [row for row in rows if row.series]
        print_requests(ours)
        click.echo(f"bundle: {info.path}")
        if others := len(rows) - len(ours):
            click.echo(f"        also holds {others} other requests of this server: {program()} show {info.path}")
    note_findings(done.findings)
    if done.stopped:
        note(f"the run did not reach its end: {done.stopped}")
    for line in unmet:
        note(f"not as expected: {line}")
