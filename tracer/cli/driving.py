"""Drive a server through the protocol, with a control if there is one, and keep what was seen in a bundle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import msgspec

from kvwitness.collectors.environment import find_server_processes, host_facts, locate_kvwitness_dir
from kvwitness.collectors.memory import memory_of
from kvwitness.collectors.model_files import model_files
from kvwitness.collectors.server_info import ServerInfo, ServerInfoUnavailable, is_loopback
from kvwitness.collectors.standby import ControlError, ask, sockets_in
from kvwitness.patches.schema.control import STATUS, State
from kvwitness.tracer.bundle.abc import NO_CONTROL, Surroundings, inputs_of_run
from kvwitness.tracer.bundle.places import recorded_journals
from kvwitness.tracer.bundle.spare import Spare
from kvwitness.tracer.bundle.write import BundleInfo, BundleInputs, write_bundle
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.control import ControlFailed, ControlServer, running_control
from kvwitness.tracer.cli.errors import UserError, with_log
from kvwitness.tracer.cli.output import note
from kvwitness.tracer.interrupt import finishing
from kvwitness.tracer.protocol.abc import AbcRun, Progress, UnfitServer, run_abc
from kvwitness.tracer.protocol.client import ServerClient, ServerUnavailable
from kvwitness.tracer.protocol.control import ControlRefused, check_control, control_options
from kvwitness.tracer.protocol.observer import JournalObserver
from kvwitness.tracer.protocol.options import AbcOptions
from kvwitness.tracer.protocol.runner import Before
from kvwitness.tracer.spans.otlp_json import span_lines


class Job(msgspec.Struct, frozen=True):
    """What to do with which server, and where the bundle goes."""

    url: str
    out: Path
    options: AbcOptions
    replace: bool = False
    directory: Path | None = None
    timeout_s: float = 120.0
    api_key: str | None = None
    admin_api_key: str | None = None
    control: ControlServer | None = None
    document: str | None = None
    before: Before | None = None
    """What an earlier part of this run has done."""
    journals: tuple[Path, ...] = ()
    """Those of the earlier part that the folder does not hold any more."""
    earlier: tuple[str, ...] = ()
    """Why the earlier parts ended."""

    def client(self, url: str | None = None) -> ServerClient:
        return ServerClient(
            url or self.url, timeout_s=self.timeout_s, api_key=self.api_key, admin_api_key=self.admin_api_key
        )


class Done(msgspec.Struct, frozen=True):
    """The run and its bundle. ``control``: what became of the control run."""

    run: AbcRun
    bundle: BundleInfo
    control: str = NO_CONTROL

    @property
    def control_failed(self) -> bool:
        return self.control not in (NO_CONTROL, CONTROLLED)


CONTROLLED = "it reached its end"


def drive(job: Job, progress: Progress) -> Done:
    """Do the job. Raises :class:`UserError` before the first request; later on everything ends in the bundle."""
    with job.client() as client, _as_interrupt(), Spare(job.out) as spare:
        with run_errors(job.url):
            client.check()
        _check_control_early(job, client)
        folder, journals_from = find_journals_folder(job.url, job.directory)
        memory = {"before": memory_of(job.url)}
        with run_errors(job.url):
            observer = JournalObserver(folder) if folder else None
            run = run_abc(job.options, client, observer, progress, document=job.document, load=None, before=job.before)
        memory["after"] = memory_of(job.url)
        processes = find_server_processes(job.url)
        pids = {process.pid for process in processes.processes}
        control, told = _control_run(job, run, progress, pids)
        with finishing(note), bundle_errors():
            progress.phase("Writing the bundle")
            model = model_files(run.server.raw_server, run.server.raw_model, local=is_loopback(job.url))
            journals = _with_earlier(recorded_journals(folder) if folder else [], job.journals)
            around = Surroundings(told, model, memory, job.earlier)
            inputs = inputs_of_run(run, host_facts(), processes, journals, journals_from, around, control)
            info = write_bundle(job.out, inputs, spans=span_lines, replace=job.replace, spare=spare)
            for path in job.journals:
                path.unlink(missing_ok=True)
    return Done(run, info, told)


# --- the control ---------------------------------------------------------------------------------------


def _check_control_early(job: Job, client: ServerClient) -> None:
    """A control that is there is looked at before the first request, one that has to be started after the last."""
    if job.control is None or job.control.command is not None:
        return
    url = job.control.url
    with job.client(url) as other, run_errors(url):
        other.check()
        try:
            check_control(client.server_info(), other.server_info())
        except ControlRefused as error:
            raise UserError(str(error), url, "start another control server, or leave --control-url out") from error


def _control_run(job: Job, run: AbcRun, progress: Progress, subject_pids: set[int]) -> tuple[BundleInputs | None, str]:
    """The control run's part of the bundle, and in words what became of it."""
    if job.control is None:
        return None, NO_CONTROL
    if run.stopped is not None:
        return None, "not made: the run itself did not reach its end"
    control = job.control
    try:
        progress.phase("Control: starting the server" if control.command else "Control: the same load without HiCache")
        with job.client(control.url) as client, running_control(control, client):
            progress.phase("Control: the same load without HiCache")
            return _controlled(job, run, control.url, client, progress, subject_pids)
    except KeyboardInterrupt:
        return None, "interrupted by the user"
    except ControlFailed as error:
        return None, with_log(error, "control").what
    except (ControlRefused, UnfitServer, ServerUnavailable, ServerInfoUnavailable) as error:
        return None, f"refused: {error}"


def _controlled(
    job: Job, run: AbcRun, url: str, client: ServerClient, progress: Progress, subject_pids: set[int]
) -> tuple[BundleInputs, str]:
    check_control(run.server, client.server_info())
    found = locate_kvwitness_dir(url)
    processes = find_server_processes(url)
    pids = {process.pid for process in processes.processes}
    memory = {"before": memory_of(url)}
    observer = JournalObserver(found.path) if found.path else None
    options = control_options(run.options, run.seed)
    done = run_abc(options, client, observer, progress, document=job.document, load=run.load)
    memory["after"] = memory_of(url)
    # Both servers may write into one folder: to each its own.
    journals = [path for path in recorded_journals(found.path) if _pid_of(path) in pids] if found.path else []
    journals_from = f"{found.path} (found through the server's processes)" if found.path else f"none: {found.reason}"
    model = model_files(done.server.raw_server, done.server.raw_model, local=is_loopback(url))
    around = Surroundings(model=model, memory=memory)
    inputs = inputs_of_run(done, host_facts(), processes, journals, journals_from, around)
    return inputs, CONTROLLED if done.stopped is None else f"it did not reach its end: {done.stopped}"


def _pid_of(journal: Path) -> int | None:
    """The process that wrote a journal, by its name: ``<role>-<pid>-<start>.kvwj``."""
    parts = journal.stem.split("-")
    return int(parts[-2]) if len(parts) > 2 and parts[-2].isdigit() else None


# --- where things are ----------------------------------------------------------------------------------


def find_journals_folder(url: str, named: Path | None) -> tuple[Path | None, str]:
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


def _with_earlier(journals: Sequence[Path], earlier: Sequence[Path]) -> list[Path]:
    """A journal that is still written to has all of what the earlier bundle had of it."""
    names = {path.name for path in journals}
    return [*journals, *(path for path in earlier if path.name not in names)]


@contextmanager
def run_errors(url: str) -> Iterator[None]:
    """What is wrong before the first request, as one line."""
    try:
        yield
    except UnfitServer as error:
        raise UserError(f"this run would prove nothing: {error}", url, "change the server or the run") from error
    except (ServerUnavailable, ServerInfoUnavailable) as error:
        raise UserError(str(error), url, "check --url, and that the server is up") from error
    except ValueError as error:
        raise UserError(str(error), "kvwitness run", "see `kvwitness run --help`") from error


def server_info(client: ServerClient) -> ServerInfo:
    """What the server says of itself. Raises :class:`UserError`."""
    with run_errors(client.url):
        client.check()
        return client.server_info()


@contextmanager
def _as_interrupt() -> Iterator[None]:
    """A run that is asked to end (SIGTERM) ends as by Ctrl-C: with a bundle."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
