"""What `kvwitness attach` says where there is nothing to attach to: one line, exit 2, nothing touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from standby.fakes import sglang

from cli.conftest import Command
from kvwitness.patches.config import Config, Faults
from kvwitness.patches.schema import control
from kvwitness.patches.standby import wait

SLEEP = "import time; time.sleep(60)"


@contextmanager
def child(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def refused(kvwitness: Command, *arguments: object) -> str:
    result = kvwitness("attach", *arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and result.stdout == ""
    return result.stderr


def test_a_server_must_be_named(kvwitness: Command) -> None:
    assert "give --url or --pid" in refused(kvwitness)
    assert "give --url or --pid" in refused(kvwitness, "--url", "http://127.0.0.1:1", "--pid", 1)


def test_nobody_listens(kvwitness: Command) -> None:
    assert "no process listens on port 1" in refused(kvwitness, "--url", "http://127.0.0.1:1")


def test_another_machine(kvwitness: Command) -> None:
    assert "is not this machine" in refused(kvwitness, "--url", "http://192.0.2.1:30000")


def test_no_such_process(kvwitness: Command) -> None:
    with child("sleep", "0") as process:
        process.wait()
        assert "there is no such process" in refused(kvwitness, "--pid", process.pid)


def test_a_process_that_has_ended(kvwitness: Command) -> None:
    with child("sleep", "0") as process:
        psutil.Process(process.pid)
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert "it has ended" in refused(kvwitness, "--pid", process.pid)


def test_not_python(kvwitness: Command) -> None:
    with child("sleep", "60") as process:
        assert "not a Python process" in refused(kvwitness, "--pid", process.pid)
        assert process.poll() is None


def test_python_and_not_sglang(kvwitness: Command) -> None:
    with child(sys.executable, "-c", SLEEP) as process:
        assert "not SGLang" in refused(kvwitness, "--pid", process.pid)
        assert process.poll() is None


def test_stopped(kvwitness: Command) -> None:
    with child(sys.executable, "-c", SLEEP, "sglang.launch_server") as process:
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            pass
        assert "stopped" in refused(kvwitness, "--pid", process.pid)
        process.send_signal(signal.SIGCONT)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a process of another user")
def test_another_users(kvwitness: Command) -> None:
    process = subprocess.Popen(["/bin/sleep", "60"], user=65534)
    try:
        assert "another user" in refused(kvwitness, "--pid", process.pid)
    finally:
        process.kill()
        process.wait()


def test_sglang_without_standby(kvwitness: Command, tmp_path: Path) -> None:
    with child(sys.executable, "-c", SLEEP, "sglang.launch_server", KVWITNESS_DIR="") as process:
        text = refused(kvwitness, "--pid", process.pid)
        assert "without KVWITNESS_DIR" in text and "serve --standby" in text and "run abc" in text
        text = refused(kvwitness, "--pid", process.pid, "--dir", tmp_path)
        assert "no scheduler is among its processes" in text
    with child(sys.executable, "-c", f"import sys; sys.argv[0]; {SLEEP}", "sglang.launch_server") as process:
        (tmp_path / control.FOLDER).mkdir(mode=0o700)
        # A socket that its process left behind.
        (tmp_path / control.FOLDER / control.socket_name(process.pid)).touch(mode=0o600)
        assert "does not answer" in refused(kvwitness, "--pid", process.pid, "--dir", tmp_path)


def test_a_folder_that_others_can_write_to(kvwitness: Command, tmp_path: Path) -> None:
    (tmp_path / control.FOLDER).mkdir()
    (tmp_path / control.FOLDER).chmod(0o777)
    with child(sys.executable, "-c", SLEEP, "sglang.launch_server") as process:
        assert "written to by others" in refused(kvwitness, "--pid", process.pid, "--dir", tmp_path)


def test_what_records_since_it_started_needs_no_attaching(tmp_path: Path) -> None:
    """This process holds a journal open, and has no control socket."""
    from kvwitness.collectors.target import TargetProcess
    from kvwitness.tracer.cli import ranks
    from kvwitness.tracer.cli.errors import UserError

    ours = TargetProcess(os.getpid(), "scheduler", "sglang::scheduler")
    with (tmp_path / "scheduler-1-1.kvwj").open("wb"), pytest.raises(UserError) as told:
        ranks.reach(ours, {}, tmp_path)
    assert "it records already, into" in told.value.what and "kvwitness show" in told.value.what_to_do


def test_it_asks_before_it_touches(kvwitness: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the server here: a scheduler of its own making, which nothing steps."""
    from kvwitness.collectors.target import Target, TargetProcess
    from kvwitness.tracer.cli import ranks

    ours = TargetProcess(os.getpid(), "scheduler", "sglang::scheduler")
    monkeypatch.setattr(ranks, "target_of", lambda pid: Target(f"process {pid}", (ours,), tmp_path))
    with sglang() as module:
        wait.SchedulerWatch(Config(tmp_path, 4 << 20, Faults(), standby=True)).start()
        scheduler = module.Scheduler()
        result = kvwitness("attach", "--pid", os.getpid())
        assert result.exit_code == 2 and "say --yes" in result.stderr and "HiRadixCache" in result.stderr
        assert list(tmp_path.glob("*.kvwj")) == [] and scheduler.steps == 0
        result = kvwitness("detach", "--pid", os.getpid())
        assert result.exit_code == 2 and "not attached" in result.stderr
