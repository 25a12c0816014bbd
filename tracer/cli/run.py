"""``kvwitness run``: drive a server through a protocol and write what was seen into a bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvwitness.tracer.addresses import is_web_address
from kvwitness.tracer.bundle.abc import NO_CONTROL
from kvwitness.tracer.bundle.layout import sha256
from kvwitness.tracer.bundle.rows import rows_of
from kvwitness.tracer.bundle.write import check_destination
from kvwitness.tracer.cli.address import web_address
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.control import ControlServer, control_server
from kvwitness.tracer.cli.driving import Done, Job, drive, server_info
from kvwitness.tracer.cli.errors import INTERRUPTED, UserError
from kvwitness.tracer.cli.expect import met_expectations, unmet_expectations
from kvwitness.tracer.cli.findings import note_findings
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.cli.program import program
from kvwitness.tracer.cli.resuming import resumed
from kvwitness.tracer.cli.table import print_requests
from kvwitness.tracer.protocol.abc import AbcRun
from kvwitness.tracer.protocol.options import AbcOptions, Api, Order
from kvwitness.tracer.protocol.questions import BadQuestions, read_questions
from kvwitness.tracer.protocol.sweep import default_lengths, parse_lengths
from kvwitness.tracer.stand.progress import reporting

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS: Final = AbcOptions()
_SWEEP_REPEATS: Final = 10
_SHOWN_ROUNDS: Final = 3
_NOT_OF_THE_RUN: Final = frozenset(
    {"url", "out", "replace", "directory", "timeout_s", "api_key", "admin_api_key", "control_url", "control_cmd"}
    | {"expect", "as_json", "resume"}
)
"""Parameters that may be given anew when a run is resumed; all others are those of its bundle."""


@click.group()
def run() -> None:
    """Drive a running server through a protocol, judge what it did, and keep the evidence.

    \b
    Example:
      kvwitness run abc --url http://127.0.0.1:30000 --out bundle --repeats 20
      kvwitness run sweep --url http://127.0.0.1:30000 --out sweep
    """


def _where(command: F) -> F:
    """Which server, and where the bundle goes."""
    for option in reversed(
        (
            click.option(
                "--url",
                required=True,
                metavar="URL",
                callback=web_address("http://127.0.0.1:30000"),
                help="The server, http://127.0.0.1:30000 for example.",
            ),
            click.option("--out", type=click.Path(path_type=Path), help="Bundle to write: a folder, or a .zip."),
            click.option("--replace", is_flag=True, help="Replace the bundle that is at --out."),
            click.option(
                "--resume",
                type=click.Path(path_type=Path),
                metavar="BUNDLE",
                help="Go on with a run that was cut short; --out is its bundle unless given.",
            ),
            click.option(
                "--dir",
                "directory",
                type=click.Path(path_type=Path),
                help="Where the server records.  [default: asked of the server's processes]",
            ),
        )
    ):
        command = option(command)
    return command


def _control(command: F) -> F:
    """The control."""
    for option in reversed(
        (
            click.option(
                "--control-url", metavar="URL", help="A server without HiCache, else the same: it gets the same load."
            ),
            click.option(
                "--control-cmd",
                metavar="CMD",
                help="Start that server by this command after the run, and stop it.  [its address: --port in CMD]",
            ),
        )
    ):
        command = option(command)
    return command


def _how(command: F) -> F:
    """What both protocols are asked to do."""
    for option in reversed(
        (
            click.option("--clients", type=click.IntRange(1, 256), default=_DEFAULTS.clients, show_default=True,
                         help="Requests of a series under way at once."),
            click.option("--question-tokens", type=int, default=_DEFAULTS.question_tokens, show_default=True),
            click.option("--output-tokens", type=int, default=_DEFAULTS.output_tokens, show_default=True),
            click.option("--fills", type=int, help="Unrelated prompts before C.  [default: until A's prefix left L1]"),
            click.option("--fill-tokens", type=int, help="Length of an unrelated prompt.  [default: as long as A]"),
            click.option("--second-hit", is_flag=True, help="Send A twice (write_through_selective needs it)."),
            click.option("--warmups", type=int, default=_DEFAULTS.warmups, show_default=True, help="Prompts before A."),
            click.option("--seed", type=int, help="Of the prompts.  [default: drawn and recorded]"),
            click.option("--dp-rank", type=int, help="Data-parallel rank to send to."),
            click.option("--timeout", "timeout_s", type=float, default=120.0, show_default=True,
                         help="Silence to bear, in s."),
            click.option("--api-key", envvar="KVWITNESS_API_KEY", help="Also from KVWITNESS_API_KEY."),
            click.option("--admin-api-key", envvar="KVWITNESS_ADMIN_API_KEY",
                         help="Also from KVWITNESS_ADMIN_API_KEY."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


@run.command("abc")
@_where
@_control
@click.option("--repeats", type=click.IntRange(1, 10_000), default=_DEFAULTS.repeats, show_default=True,
              help="Rounds, each with a prefix of its own.")  # fmt: skip
@click.option("--order", type=click.Choice([one.value for one in Order]), default=_DEFAULTS.order.value,
              show_default=True, help="rounds: A B evict C, over and over; series: all A, all B ...")  # fmt: skip
@click.option("--api", type=click.Choice([one.value for one in Api]), default=_DEFAULTS.api.value, show_default=True)
@click.option("--prefix-tokens", type=int, default=_DEFAULTS.prefix_tokens, show_default=True)
@click.option("--document", type=click.Path(path_type=Path), help="Text file to use as the prefix.")
@click.option("--questions", "questions_file", type=click.Path(path_type=Path),
              help="YAML file with questions and reference answers.")  # fmt: skip
@_how
@click.option("--evict-host", is_flag=True, help="Push the prefix out of L2 as well.")
@click.option("--flush", "flush_between_bc", is_flag=True, help="Fault: empty the server's cache before C.")
@click.option("--control", is_flag=True, help="This server is itself the control, without HiCache.")
@click.option("--keep-prompts", is_flag=True, help="Keep the token ids of A, B and C in the bundle.")
@click.option(
    "--expect", is_flag=True, help="Exit 1 unless A was recomputed, B's L1 read and C's L2 read are confirmed."
)
@json_option
@click.pass_context
def abc_command(
    ctx: click.Context,
    /,
    control_url: str | None,
    control_cmd: str | None,
    order: str,
    api: str,
    document: Path | None,
    questions_file: Path | None,
    expect: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Send A, B, unrelated prompts and C, and keep the evidence.

    A computes a prefix, B reuses it from L1, the unrelated prompts push it out of L1, C asks for it again.
    With a control the same load then goes to a server without HiCache. Ctrl-C ends the run: what was recorded until
    then becomes a bundle that says so (exit code 130), and --resume goes on with it.

    \b
    Example:
      kvwitness run abc --url http://127.0.0.1:30000 --out bundle --expect
      kvwitness run abc --url http://127.0.0.1:30000 --out bundle --repeats 20 \\
          --control-cmd 'python -m sglang.launch_server --model-path MODEL --port 30001'
      kvwitness run abc --url http://127.0.0.1:30000 --resume bundle
    """
    control = _control_of(control_url, control_cmd)
    if control is not None and options["flush_between_bc"]:
        raise UserError("a run with a control flushes no cache", "--flush", "leave one of the two out")
    text, named = _document(document)
    if questions_file is not None:
        named["questions"] = _questions(questions_file)
    chosen = {"order": Order(order), "api": Api(api), **named}
    job = _job(ctx, control, options, chosen, text)
    done = _drive(job)
    unmet = unmet_expectations(done.bundle.verdicts, done.run.records) if expect else ()
    _report(done, unmet, as_json)
    if expect and not unmet and not done.run.stopped:
        note(met_expectations())
    _exit(ctx, done, bool(unmet))


@run.command("sweep")
@_where
@_control
@click.option("--lengths", metavar="TOKENS,...", help="Prefix lengths.  [default: six, up to half of L1]")
@click.option("--repeats", type=click.IntRange(1, 1_000), default=_SWEEP_REPEATS, show_default=True,
              help="Rounds at each length.")  # fmt: skip
@_how
@json_option
@click.pass_context
def sweep_command(
    ctx: click.Context,
    /,
    control_url: str | None,
    control_cmd: str | None,
    lengths: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure from which prefix length on an L2 read pays.

    TTFT is measured cold, from L1 and from L2: each round is A (cold), B (L1), an eviction and C (L2) with a prefix of
    its own, the lengths in turn. The answer may be "never on this stand".

    \b
    Example:
      kvwitness run sweep --url http://127.0.0.1:30000 --out sweep --lengths 128,512,2048 --repeats 20
    """
    chosen = {} if options["resume"] else {"lengths": _lengths(lengths, options)}
    done = _drive(_job(ctx, _control_of(control_url, control_cmd), options, chosen, None))
    if as_json:
        _report(done, (), as_json)
    else:
        # Statistics take a second to load, and may be left out where only runs are made.
        from kvwitness.tracer.cli.sweeping import echo_sweep

        echo_sweep(done.run.records, done.bundle.verdicts)
        click.echo(f"bundle: {done.bundle.path}")
        note_findings(done.run.findings)
        _note_ends(done, ())
    _exit(ctx, done, False)


# --- from options to a job -----------------------------------------------------------------------------


def _job(
    ctx: click.Context, control: ControlServer | None, options: dict[str, Any], chosen: dict[str, Any], text: str | None
) -> Job:
    out, resume = options.pop("out"), options.pop("resume")
    replace = options.pop("replace")
    where = {name: options.pop(name) for name in ("url", "directory", "timeout_s", "api_key", "admin_api_key")}
    if resume is not None:
        _refuse_anew(ctx)
        with bundle_errors():
            check_destination(out or resume, replace=out is None or replace)
        return resumed(
            Job(out=out or resume, options=_DEFAULTS, replace=out is None or replace, control=control, **where), resume
        )
    if out is None:
        raise UserError("there is no place for the bundle", "--out", "name a folder or a .zip")
    with bundle_errors():
        check_destination(out, replace=replace)
    return Job(
        out=out, options=AbcOptions(**options, **chosen), replace=replace, control=control, document=text, **where
    )


def _refuse_anew(ctx: click.Context) -> None:
    for name in ctx.params.keys() - _NOT_OF_THE_RUN:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = next(one.opts[0] for one in ctx.command.params if one.name == name)
            raise UserError("a resumed run keeps its own", option, "leave it out, or start a new run")


def _control_of(url: str | None, command: str | None) -> ControlServer | None:
    try:
        control = control_server(url, command)
    except ValueError as error:
        raise UserError(f"it is no command: {error}", "--control-cmd", "quote it as a shell would want it") from error
    if control is not None and not is_web_address(control.url):
        raise UserError("it is not the address of a server", f"--control-url {control.url!r}", "write http://HOST:PORT")
    return control


def _document(path: Path | None) -> tuple[str | None, dict[str, Any]]:
    """The text of the prefix, and what the run records about it."""
    if path is None:
        return None, {}
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"it cannot be read: {error}", str(path), "name a text file in UTF-8") from error
    if not text.strip():
        raise UserError("it is empty", str(path), "name a text that is long enough to be worth a cache")
    return text, {"document": str(path), "document_sha256": sha256(text.encode())}


def _questions(path: Path) -> Any:
    try:
        return read_questions(path)
    except BadQuestions as error:
        raise UserError(str(error), str(path), "see the example in docs/protocol.md") from error


def _lengths(text: str | None, options: dict[str, Any]) -> tuple[int, ...]:
    try:
        if text is not None:
            return parse_lengths(text)
        job = Job(options["url"], Path(), _DEFAULTS, api_key=options["api_key"], timeout_s=options["timeout_s"])
        with job.client() as client:
            return default_lengths(server_info(client), options["question_tokens"] + options["output_tokens"])
    except ValueError as error:
        raise UserError(str(error), "--lengths", "name lengths in tokens, 128,512,2048 for example") from error


def _drive(job: Job) -> Done:
    with reporting() as progress:
        return drive(job, progress)


# --- what the user sees --------------------------------------------------------------------------------


def _report(done: Done, unmet: Sequence[str], as_json: bool) -> None:
    run_, info = done.run, done.bundle
    rows = rows_of(info.verdicts, run_.records)
    if as_json:
        print_json(
            {
                "bundle": str(info.path),
                "run_id": run_.run_id,
                "stopped": run_.stopped,
                "control": done.control,
                "findings": run_.findings,
                "unmet": unmet,
                "requests": rows,
            }
        )
    else:
        ours = [row for row in rows if row.series]
        rounds = {record.rid: record.round for record in run_.records}
        shown = _first_rounds(run_)
        first = [row for row in ours if rounds.get(row.request) in shown and row.series in ("A", "B", "C")]
        print_requests(ours if run_.options.rounds == 1 else first)
        if run_.options.rounds > 1:
            click.echo(f"        and {len(ours) - len(first)} more: {program()} show {info.path}")
        click.echo(f"bundle: {info.path}")
        if run_.options.rounds > 1:
            click.echo(f"next:   {program()} report {info.path}")
        if others := len(rows) - len(ours):
            click.echo(f"        also holds {others} other requests of this server: {program()} show {info.path}")
    note_findings(run_.findings)
    _note_ends(done, unmet)


def _first_rounds(run_: AbcRun) -> set[int]:
    """The rounds to show: complete ones, where there are any. One that was begun again has a number behind the last."""
    total = run_.options.rounds
    whole = {one.round for one in run_.records if one.series == "C" and one.error is None and one.round is not None}
    begun = whole or {one.round for one in run_.records if one.round is not None}
    return set(sorted(begun, key=lambda number: number % total)[:_SHOWN_ROUNDS])


def _note_ends(done: Done, unmet: Sequence[str]) -> None:
    if done.run.stopped:
        note(f"the run did not reach its end: {done.run.stopped}")
        if done.run.missing and done.run.options.rounds > 1:
            protocol = "sweep" if done.run.options.lengths else "abc"
            note(f"go on with: `kvwitness run {protocol} --url {done.run.server.url} --resume {done.bundle.path}`")
    if done.control != NO_CONTROL:
        note(f"the control run: {done.control}")
    for line in unmet:
        note(f"not as expected: {line}")


def _exit(ctx: click.Context, done: Done, unmet: bool) -> None:
    if done.run.interrupted:
        ctx.exit(INTERRUPTED)
    ctx.exit(1 if unmet or done.run.stopped or done.control_failed else 0)
