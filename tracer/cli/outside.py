"""``kvwitness attach --outside``: record what a server says of itself, without touching one of its processes."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvwitness.collectors.environment import find_server_processes, host_facts
from kvwitness.collectors.kv_events import KvSource, sources
from kvwitness.collectors.metrics import stamped
from kvwitness.collectors.server_info import ServerInfoUnavailable
from kvwitness.tracer.bundle.environment import environment_of_recording
from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.bundle.places import recorded_journals
from kvwitness.tracer.bundle.read import read_bundle_journals
from kvwitness.tracer.bundle.witnesses import Outside, derive_outside
from kvwitness.tracer.bundle.write import BundleInputs, check_destination, write_bundle
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.output import console, display, note, print_json, until_told
from kvwitness.tracer.cli.table import grade_text
from kvwitness.tracer.interrupt import finishing
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import CrossCheck
from kvwitness.tracer.outside.recorder import INTERVAL_S, Recorder, Stop, Wanted
from kvwitness.tracer.outside.records import FILES, Line, Writer, is_recording
from kvwitness.tracer.spans.live import stop_on_signal

RECORDING_SUFFIX: Final = ".recording"
_ANSWER: Final = {True: ("agree", "green"), False: ("DISAGREE", "bold red"), None: ("not comparable", "dim")}
_TELL_EVERY_S: Final = 10.0


def outside_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--outside`` and what belongs to it."""
    for option in reversed(
        (
            click.option(
                "--outside", is_flag=True, help="Touch no process: record what the server says, until Ctrl-C."
            ),
            click.option("--out", type=click.Path(path_type=Path), help="With --outside: bundle to write."),
            click.option(
                "--interval", "interval_s", type=float, default=INTERVAL_S, help="With --outside: between looks, in s."
            ),
            click.option("--for", "seconds", type=float, help="With --outside: end after so many seconds."),
            click.option(
                "--kv-events",
                metavar="ENDPOINT",
                help="With --outside: where the server publishes KV events.  [default: as its settings say]",
            ),
            click.option("--kv-replay", metavar="ENDPOINT", help="With --outside: where it repeats them."),
            click.option("--stacks", is_flag=True, help="With --outside: sample the schedulers' stacks with py-spy."),
            click.option("--api-key", envvar="KVWITNESS_API_KEY", help="With --outside: also from KVWITNESS_API_KEY."),
        )
    ):
        command = option(command)
    return command


def record_outside(
    url: str | None,
    directory: Path | None,
    as_json: bool,
    *,
    out: Path | None,
    interval_s: float,
    seconds: float | None,
    kv_events: str | None,
    kv_replay: str | None,
    stacks: bool,
    api_key: str | None,
) -> None:
    """Record a server from outside until Ctrl-C, and write a bundle of it."""
    if url is None or out is None:
        raise UserError("--outside needs --url and --out", "kvwitness attach", "see `kvwitness attach --help`")
    with bundle_errors():
        check_destination(out)
    folder = out.with_name(f"{out.name}{RECORDING_SUFFIX}")
    if folder.exists():
        raise UserError(
            "an earlier recording was not finished",
            str(folder),
            f"`kvwitness show {folder}` reads it; name another --out",
        )
    given = given_sources(kv_events, kv_replay)
    wanted = Wanted(url, interval_s, given, stacks=stacks, api_key=api_key, directory=directory)
    with recorder_errors(url), stop_on_signal(None) as stop, _folder(folder), Writer(folder) as writer:
        why, recorder = _record(wanted, writer, stop, seconds)
    with finishing(note), _kept_in(folder):
        files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
        environment = environment_of_recording(files, why, host_facts(), find_server_processes(url))
        metrics = {moment: stamped(snapshot) for moment, snapshot in recorder.metrics.items()}
        journals = recorded_journals(data) if (data := directory or recorder.directory) is not None else []
        inputs = BundleInputs(tuple(journals), environment=environment, metrics=metrics, witnesses=files)
        write_bundle(out, inputs)
        shutil.rmtree(folder)
    with bundle_errors():
        copies = read_bundle_journals(out)
    found = derive_outside(files, copies, judge(copies).instances)
    assert found is not None
    show_outside(found, str(out), as_json)


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """A recording that did not begin leaves no folder behind."""
    try:
        yield
    except ServerInfoUnavailable:
        if not is_recording(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """Where the bundle cannot be written, the recording stays where it is."""
    try:
        yield
    except (BundleError, OSError) as error:
        what = error.what if isinstance(error, BundleError) else f"it cannot be written: {error.strerror}"
        where = error.where if isinstance(error, BundleError) else str(error.filename)
        raise UserError(what, where, f"what was recorded is kept: `kvwitness show {folder}` reads it") from error


def given_sources(endpoint: str | None, replay: str | None) -> tuple[KvSource, ...] | None:
    """The KV events' sources that a user names; None when none is named."""
    if endpoint is None:
        if replay is not None:
            raise UserError("--kv-replay without --kv-events", "kvwitness", "name both")
        return None
    return sources(endpoint, replay, 1)


@contextmanager
def recorder_errors(url: str) -> Iterator[None]:
    """Turn what a recorder raises into the command's one error."""
    try:
        yield
    except ServerInfoUnavailable as error:
        raise UserError(str(error), url, "check --url, and that the server is up") from error
    except FileExistsError as error:
        raise UserError("it is there already", str(error.filename), "name another --out") from error


def _record(wanted: Wanted, writer: Writer, stop: Stop, seconds: float | None) -> tuple[str, Recorder]:
    told: set[str] = set()
    lock = threading.Lock()

    def sink(name: str, line: Line) -> None:
        with lock:
            writer.write(name, line)

    recorder = Recorder(wanted, sink)
    info = recorder.begin()
    note(f"recording SGLang {info.version or 'of unknown version'} at {wanted.url} from outside, {until_told(seconds)}")
    for witness, why in recorder.not_recorded.items():
        note(f"not recorded: {witness}: {why}")
    deadline = None if seconds is None else time.monotonic() + seconds
    while not stop.wait(_pause(wanted.interval_s, deadline)):
        recorder.round()
        for name, problem in writer.problems.items():
            if name not in told:
                note(f"warning: {name} takes no lines: {problem}; what is lost meanwhile is counted")
        told = set(writer.problems)
        if deadline is not None and time.monotonic() >= deadline:
            break
    why = "the time was up" if not stop.is_set() else "ended by the user"
    recorder.end(why)
    return why, recorder


def _pause(interval_s: float, deadline: float | None) -> float:
    return interval_s if deadline is None else max(0.0, min(interval_s, deadline - time.monotonic()))


# --- words ----------------------------------------------------------------------------------------------


def show_outside(outside: Outside, path: str, as_json: bool, doubt: str = "") -> None:
    """Print what a recording from outside says."""
    if as_json:
        print_json({"path": path, **msgspec.to_builtins(outside)})
        return
    display(console(), *_parts(outside, doubt))
    click.echo(f"recorded in {path}")


def _parts(outside: Outside, doubt: str) -> Iterator[RenderableType]:
    statement = outside.statement
    yield Text.assemble((doubt, "bold red"), (statement.sentence, "bold"), "  ", grade_text(statement.grade))
    if statement.raise_it:
        yield Text(f"for more than the server's word: {statement.raise_it}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("witness")
    table.add_column("recorded", overflow="fold")
    table.add_column("what is wrong with it", overflow="fold")
    for witness in statement.witnesses:
        table.add_row(witness.name, Text(witness.recorded), Text("; ".join(witness.gaps)))
    yield table
    if statement.checks:
        yield checks_table(statement.checks)
    for agreement in outside.agreements:
        yield Text(f"{agreement.instance}: {agreement.sentence}")
        for one in agreement.differences:
            yield Text(f"  {one.name}: {one.explanation}", style="dim")
    for gap in statement.gaps:
        yield Text.assemble(("missing: ", "bold"), gap)


def checks_table(checks: Sequence[CrossCheck]) -> Table:
    """Witnesses side by side."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("witnesses", "answer", "the one", "the other"):
        table.add_column(name)
    table.add_column("explanation", overflow="fold")
    for check in checks:
        word, style = _ANSWER[check.agrees]
        table.add_row(check.witness, Text(word, style=style), check.ours, check.theirs, Text(check.explanation))
    return table
