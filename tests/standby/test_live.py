"""Into processes that were started without kvwitness: real gdb, real CPython, a small scheduler."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gdb_tools import needs_gdb, way_into

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.collectors.live import inject as inject_module
from kvwitness.collectors.live.gdb import NotInjected
from kvwitness.collectors.live.inject import inject
from kvwitness.collectors.live.interpreter import PENDING, RUN, Interpreter, NoInterpreter, interpreter_of
from kvwitness.collectors.live.preflight import GDB, LiveWay
from kvwitness.collectors.standby import ask
from kvwitness.patches.schema import control
from kvwitness.patches.standby import live
from kvwitness.tracer.ledger.derive import derive
from standby.fakes import HiRadixCache, Scheduler, sglang
from standby.served import served
from standby.test_standby import LOOP, MATCH, Loop

QUOTA = 4 << 20


def pythons() -> list[str]:
    """The Python of this environment, and others of this machine that can be gone into."""
    versions = Path(sys.base_prefix).parent
    found = [sys.executable]
    for v in ("3.12", "3.13", "3.14"):
        here = [*map(str, sorted(versions.glob(f"{v}*/bin/python{v}"))), shutil.which(f"python{v}")]
        found += [here[0]] if here[0] is not None else []
    return found


# --- the Python of another process ---------------------------------------------------------------


def test_the_addresses_are_those_that_the_process_itself_uses() -> None:
    found = interpreter_of(os.getpid())
    assert found.version == sys.version_info[:3]
    for name in (PENDING, RUN):
        assert found.addresses[name] == ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value


def test_what_is_no_python_has_no_addresses() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        with pytest.raises(NoInterpreter, match="no symbols"):
            interpreter_of(process.pid)
    finally:
        process.kill()
        process.wait()


# --- what is injected ----------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A scheduler of this process that was constructed without kvwitness."""
    with sglang():
        running = Loop(Scheduler())
        yield running
        running.end()


def run_here(tmp_path: Path) -> Any:
    """What `inject` does, but that this very process runs the text."""
    with inject_module._request(os.getpid(), tmp_path, QUOTA) as request:
        exec(inject_module._text(request, mapped=False)[0], {})
        return inject_module._wait(os.getpid(), request)


def test_a_request_opens_a_socket_that_goes_with_the_attachment(loop: Loop, tmp_path: Path) -> None:
    others = set(threading.enumerate())
    report = run_here(tmp_path)
    assert report.ok, report
    assert Scheduler.get_next_batch_to_run is LOOP and HiRadixCache.match_prefix is MATCH
    socket = Path(report.socket)
    assert [path.name for path in socket.parent.iterdir()] == [control.socket_name(os.getpid())]
    assert ask(socket, control.STATUS).way == control.Way.LIVE
    assert ask(socket, control.ATTACH, about={"tool": "gdb 13.1", "stopped_us": 210_000}).ok
    assert ask(socket, control.LEAVE).problem == control.Problem.ATTACHED
    assert ask(socket, control.DETACH).ok
    assert not socket.exists() and not live.is_in()
    for thread in set(threading.enumerate()) - others:
        thread.join(30.0)  # The socket's own thread ends a little after its last answer.
    assert set(threading.enumerate()) <= others
    assert Scheduler.get_next_batch_to_run is LOOP and HiRadixCache.match_prefix is MATCH
    (journal,) = [read_journal(path) for path in find_journals(tmp_path)]
    attached = derive(journal).facts.shown["attach"]
    assert (attached["way"], attached["tool"], attached["stopped_us"]) == ("live", "gdb 13.1", 210_000)
    assert attached["pause_us"] >= 0 and "snapshot" in attached


def test_nobody_comes_and_it_leaves_by_itself(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvwitness.patches.standby import listener

    monkeypatch.setattr(listener, "_IDLE_S", 0.05)
    report = run_here(tmp_path)
    assert report.ok
    while live.is_in():
        pass
    assert not Path(report.socket).exists()


def test_a_second_request_is_refused_while_one_is_in(loop: Loop, tmp_path: Path) -> None:
    report = run_here(tmp_path)
    again = run_here(tmp_path)
    assert (again.ok, again.problem) == (False, control.Problem.OTHERS)
    assert ask(Path(report.socket), control.LEAVE).ok and not live.is_in()


def test_a_request_that_was_withdrawn_does_nothing(loop: Loop, tmp_path: Path) -> None:
    with inject_module._request(os.getpid(), tmp_path, QUOTA) as request:
        text = inject_module._text(request, mapped=False)[0]
    exec(text, {})
    # The thread that looks for the request has nothing to show for it: it ends.
    while any(thread.name.startswith("Dummy") for thread in threading.enumerate()):
        pass
    assert not live.is_in() and list((tmp_path / control.FOLDER).iterdir()) == []


def test_a_process_without_a_scheduler_says_so(tmp_path: Path) -> None:
    assert run_here(tmp_path).problem == control.Problem.NO_SCHEDULER


def test_a_socket_that_cannot_be_made_is_reported(loop: Loop, tmp_path: Path) -> None:
    (tmp_path / control.FOLDER / control.socket_name(os.getpid())).mkdir(parents=True, mode=0o700)
    (tmp_path / control.FOLDER).chmod(0o700)
    assert run_here(tmp_path).problem == control.Problem.NO_JOURNAL
    assert not live.is_in()


def test_a_scheduler_that_does_not_come_by_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_STEP_S", 0.05)
    with sglang():
        assert run_here(tmp_path).problem == control.Problem.NO_STEP
        assert Scheduler.get_next_batch_to_run is LOOP


# --- by gdb --------------------------------------------------------------------------------------


@needs_gdb
@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_rounds_of_attach_and_detach_leave_nothing(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has no kvwitness to import, and threads that want the GIL. In the end kvwitness is another one."""
    another = tmp_path / "another" / "patches"
    shutil.copytree(inject_module.patches_folder(), another, ignore=shutil.ignore_patterns("__pycache__"))
    environment_python = python if python != sys.executable else str(Path(sys.executable).resolve())
    with served(python=environment_python) as server:
        (pid,) = server.schedulers
        process = psutil.Process(pid)
        (before,) = server.states()
        assert before["kvwitness"] is None
        way = way_into(pid)
        sizes = []
        for number in range(5):
            if number == 4:
                monkeypatch.setattr(inject_module, "patches_folder", lambda: another)
            injection = inject(pid, way, tmp_path, QUOTA)
            assert injection.report.ok, injection
            assert injection.tool.startswith("gdb " if way.tool == GDB else "sys.remote_exec, Python 3.14.")
            assert (injection.stopped_us > 0) is (way.tool == GDB)
            socket = Path(injection.report.socket)
            attached = ask(socket, control.ATTACH)
            assert attached.ok and attached.hooks, attached
            assert ask(socket, control.DETACH).not_restored == ()
            (after,) = server.states()
            while "kvwitness-standby" in after["threads"]:  # It has answered, and is about to end.
                (after,) = server.states()
            sizes.append((process.num_fds(), len(process.memory_maps(grouped=False))))
        assert after["originals"] and after["same_path"] and after["new_names"] == []
        assert after["threads"] == before["threads"]
        assert after["kvwitness"] == str(another / "__init__.py")
        # By the third Python has taken what memory it needs for good.
        assert sizes[3] == sizes[2]
        assert len(find_journals(tmp_path)) == 5
        assert list((tmp_path / control.FOLDER).iterdir()) == []


@needs_gdb
def test_a_main_thread_that_runs_no_python_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject_module, "_CLAIM_S", 0.3)
    with served("--asleep") as server:
        (pid,) = server.schedulers
        with pytest.raises(NotInjected, match="ran no Python"):
            inject(pid, way_into(pid), tmp_path, QUOTA)
        assert list((tmp_path / control.FOLDER).iterdir()) == []
        (state,) = server.states()
        assert state["originals"] and state["kvwitness"] is None


# --- by CPython itself ---------------------------------------------------------------------------


def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> LiveWay:
    """The target's executable is a script that stands in for Python 3.14."""
    stub = tmp_path / "python3.14"
    stub.write_text(f"#!/bin/sh\n{program}\n")
    stub.chmod(0o755)
    readlink = Path.readlink
    monkeypatch.setattr(Path, "readlink", lambda self: stub if self.name == "exe" else readlink(self))
    return LiveWay(Interpreter((3, 14, 0), {}), None)


def test_remote_exec_is_called_by_the_targets_own_interpreter(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = remote(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/said; cp "$6" {tmp_path}/script.py')
    monkeypatch.setattr(inject_module, "_wait", lambda pid, request: inject_module.Report(True))
    injection = inject(os.getpid(), way, tmp_path / "data", QUOTA)
    assert injection.tool == "sys.remote_exec, Python 3.14.0" and injection.stopped_us == 0
    said = (tmp_path / "said").read_text()
    assert "sys.remote_exec" in said and str(os.getpid()) in said


def test_what_remote_exec_says_is_passed_on(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way = remote(tmp_path, monkeypatch, "echo 'RuntimeError: Remote debugging is not enabled' >&2; exit 1")
    with pytest.raises(NotInjected, match="not enabled"):
        inject(os.getpid(), way, tmp_path / "data", QUOTA)
    assert list((tmp_path / "data" / control.FOLDER).iterdir()) == []
    way = remote(tmp_path, monkeypatch, "echo 'PermissionError: [Errno 1]' >&2; exit 1")
    with pytest.raises(NotInjected) as denied:
        inject(os.getpid(), way, tmp_path / "data", QUOTA)
    assert denied.value.denied


def test_the_request_names_what_to_load(tmp_path: Path) -> None:
    with inject_module._request(1, tmp_path, QUOTA) as request:
        asked = json.loads(request.read_text())
        assert (request.stat().st_mode & 0o777, request.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert asked["directory"] == str(tmp_path) and Path(asked["patches"], "standby", "live.py").is_file()
