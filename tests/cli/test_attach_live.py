"""What `kvwitness attach --live` refuses: one line with the cause and the next best way, exit 2, nothing touched."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from gdb_tools import needs_gdb, no_gdb, saying_gdb
from standby.served import Served, served

from cli.conftest import Command
from cli.test_attach import SLEEP, child
from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.collectors.live import inject as inject_module
from kvwitness.collectors.live import preflight
from kvwitness.patches.schema import control
from kvwitness.patches.schema import events as ev
from kvwitness.patches.start import VARIABLE, given_id

KVWITNESS = [sys.executable, "-c", "from kvwitness.tracer.cli import main; main()"]
_SEIZE = 0x4206
_ALL_KINDS = 0x40000000


def refused(kvwitness: Command, server: Served, *arguments: object, untouched: bool = True) -> str:
    """The one line that a live attach to a small server ends with; its schedulers are as they were."""
    result = kvwitness("attach", "--url", server.url, "--live", "--yes", *arguments)
    assert result.exit_code == 2, result.stderr
    line: str = result.stderr.splitlines()[-1]
    assert line.startswith("error: ") and result.stdout == ""
    assert not list(Path.cwd().glob("kvwitness-data/*/*.kvwj"))
    if untouched:
        assert len([text for text in result.stderr.splitlines() if text.startswith("error")]) == 1
    return line


def as_before(server: Served) -> None:
    """SGLang's functions are its own, kvwitness was never loaded."""
    for state in server.states():
        assert state["originals"] and state["kvwitness"] is None


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def a_gdb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For what is seen before any gdb is run: whether this machine has one makes no difference."""
    monkeypatch.setenv("KVWITNESS_GDB", str(saying_gdb(tmp_path / "any")))


def test_without_gdb(kvwitness: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_gdb", no_gdb)
    with served() as server:
        line = refused(kvwitness, server)
        assert "gdb is not installed" in line and "pip install 'kvwitness[live]'" in line and "--standby" in line
        as_before(server)


@pytest.mark.parametrize(
    ("version", "flags", "enters"),
    [
        ("GNU gdb (Debian 13.1-3) 13.1", "fpu avx512f amx_tile amx_int8", False),
        ("GNU gdb (Debian 13.1-3) 13.1", "fpu avx512f", True),
        ("GNU gdb (GDB) 14.1", "fpu avx512f amx_tile amx_int8", True),
    ],
)
def test_a_gdb_that_is_too_old_for_the_processor(
    kvwitness: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, flags: str, enters: bool
) -> None:
    """Seen before anything is asked, and without letting a scheduler stand still."""
    gdb = saying_gdb(tmp_path / "old", version=version, then=f"touch {tmp_path}/entered; exit 1")
    monkeypatch.setenv("KVWITNESS_GDB", str(gdb))
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
    monkeypatch.setattr(preflight, "_CPUINFO", tmp_path / "cpuinfo")
    with served() as server:
        line = refused(kvwitness, server)
        assert (tmp_path / "entered").exists() is enters
        if not enters:
            assert f"gdb 13.1 ({gdb}) cannot go into processes on a processor with AMX" in line
            assert "gdb 14 and newer can" in line and "pip install 'kvwitness[live]' brings a newer one" in line
            shown = kvwitness("attach", "--url", server.url, "--live")
            assert shown.exit_code == 2 and len(shown.stderr.splitlines()) == 1 and "gdb 13.1" in shown.stderr
        as_before(server)


@needs_gdb
@pytest.mark.parametrize("given", ["", "run 7"])
def test_the_ranks_of_one_attachment_have_one_start(
    kvwitness: Command, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv(VARIABLE, given)
    starts = []
    with served("--ranks", "2") as server:
        for number in (1, 2):
            folder = Path(f"data{number}").absolute()
            assert kvwitness("attach", "--url", server.url, "--live", "--yes", "--dir", folder).exit_code == 0
            assert kvwitness("detach", "--url", server.url, "--dir", folder).exit_code == 0
            facts = [
                json.loads(e.json) for path in find_journals(folder) for e in read_journal(path).events if is_own(e)
            ]
            assert len(facts) == 2 and facts[0]["host"] == facts[1]["host"]
            assert facts[0]["key"] == facts[1]["key"]
            starts.append({process["start"] for process in facts})
    assert [len(found) for found in starts] == [1, 1]
    assert (starts[0] == starts[1] == {given_id()}) if given else starts[0] != starts[1]


def is_own(event: object) -> bool:
    return isinstance(event, ev.Facts) and event.kind == ev.FactKind.PROCESS


@contextmanager
def traced(pid: int) -> Iterator[None]:
    """Another debugger is attached to ``pid``."""
    ptrace: Any = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long] * 4
    if ptrace(_SEIZE, pid, 0, 0):
        pytest.skip("ptrace is not permitted here")
    try:
        yield
    finally:
        psutil.Process(pid).kill()
        os.waitpid(pid, _ALL_KINDS)  # It ends for its parent when its tracer has seen it end.


def test_another_debugger(kvwitness: Command) -> None:
    with served() as server, traced(server.schedulers[0]):
        line = refused(kvwitness, server)
        assert "another debugger is attached to it" in line and str(os.getpid()) in line


@pytest.mark.usefixtures("a_gdb")
def test_one_rank_is_stopped(kvwitness: Command) -> None:
    with served("--ranks", "2") as server:
        os.kill(server.schedulers[1], signal.SIGSTOP)
        while psutil.Process(server.schedulers[1]).status() != psutil.STATUS_STOPPED:
            pass
        assert f"process {server.schedulers[1]}" in (line := refused(kvwitness, server)) and "it is stopped" in line
        os.kill(server.schedulers[1], signal.SIGCONT)
        as_before(server)


def test_no_permission_to_trace() -> None:
    """As root without CAP_SYS_PTRACE, as in a container; the target has more capabilities than kvwitness."""
    drop = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    with served() as server:
        command = [*drop, *KVWITNESS, "attach", "--pid", str(server.pid), "--live", "--yes"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "the kernel does not allow" in done.stderr and "CAP_SYS_PTRACE" in done.stderr
        as_before(server)


@pytest.mark.parametrize(("scope", "says"), [("1", "ptrace_scope is 1"), ("3", "no process to attach")])
def test_yama(kvwitness: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str, says: str) -> None:
    def denied(path: str, flags: int) -> int:
        raise PermissionError(path)

    (tmp_path / "scope").write_text(f"{scope}\n")
    with served() as server:
        monkeypatch.setattr(preflight, "_YAMA", tmp_path / "scope")
        monkeypatch.setattr(preflight, "may_trace", lambda: False)
        monkeypatch.setattr(preflight.os, "open", denied)
        assert says in (line := refused(kvwitness, server)) and "serve --standby" in line


def test_ptrace_is_forbidden_to_gdb_alone(kvwitness: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A seccomp profile shows only when gdb tries."""
    monkeypatch.setenv("KVWITNESS_GDB", str(saying_gdb(tmp_path / "other", "ptrace: Operation not permitted.")))
    with served() as server:
        line = refused(kvwitness, server)
        assert "ptrace is not permitted" in line and "--cap-add SYS_PTRACE" in line
        as_before(server)
    assert not list(tmp_path.glob("kvwitness-data/*/control/*"))


@pytest.mark.usefixtures("a_gdb")
def test_a_port_that_is_not_open_yet(kvwitness: Command) -> None:
    """Schedulers load the model: they are not stopped for it."""
    with served("--not-listening") as server:
        result = kvwitness("attach", "--pid", server.pid, "--live", "--yes")
        assert result.exit_code == 2 and "still starting" in result.stderr and "try again" in result.stderr
        as_before(server)


@needs_gdb
def test_a_scheduler_that_is_still_being_constructed(kvwitness: Command) -> None:
    with served("--starting") as server:
        line = refused(kvwitness, server)
        assert "still starting (loading the model" in line and "try again" in line
        assert server.states()[0]["originals"]


@pytest.mark.usefixtures("a_gdb")
def test_a_server_that_says_it_has_no_hicache(kvwitness: Command) -> None:
    with served("--no-hicache") as server:
        assert "without HiCache" in (line := refused(kvwitness, server)) and "--enable-hierarchical-cache" in line
        as_before(server)


@needs_gdb
def test_a_server_that_does_not_say_it_has_no_hicache(kvwitness: Command, tmp_path: Path) -> None:
    with served("--no-hicache", "--quiet") as server:
        assert "without HiCache" in refused(kvwitness, server, "--dir", tmp_path / "data")
        assert server.states()[0]["originals"]
    assert list((tmp_path / "data" / control.FOLDER).iterdir()) == []


@needs_gdb
def test_one_rank_cannot_be_had_and_the_other_is_left_again(kvwitness: Command, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with served("--ranks", "2") as server:
        (data / control.FOLDER).mkdir(mode=0o700, parents=True)
        blocked = data / control.FOLDER / control.socket_name(server.schedulers[1])
        blocked.mkdir()
        line = refused(kvwitness, server, "--dir", data)
        assert f"process {server.schedulers[1]}" in line and "the other 1 were left again, nothing is attached" in line
        assert list((data / control.FOLDER).iterdir()) == [blocked]
        states = server.states()
        while any("kvwitness-standby" in state["threads"] for state in states):  # About to end.
            states = server.states()
        assert all(state["originals"] for state in states)


@needs_gdb
def test_a_main_thread_that_runs_no_python(kvwitness: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject_module, "_CLAIM_S", 0.3)
    with served("--asleep") as server:
        assert "its main thread ran no Python" in refused(kvwitness, server)
        as_before(server)


def test_an_older_python(kvwitness: Command) -> None:
    found = next(iter(sorted(Path(sys.base_prefix).parent.glob("3.10*/bin/python3.10"))), None)
    if found is None:
        pytest.skip("no Python 3.10 here")
    with served(python=str(found)) as server:
        assert "3.10 or older" in (line := refused(kvwitness, server)) and "run abc" in line
        assert server.states()[0]["originals"]


def test_another_container(kvwitness: Command) -> None:
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    with served(before=apart) as server:
        inside = psutil.Process(server.pid).children(recursive=True)
        result = kvwitness("attach", "--pid", inside[0].pid, "--live", "--yes")
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.stderr
        assert "another container (PID namespace)" in result.stderr and "docker exec" in result.stderr


def test_not_python_not_sglang_not_there(kvwitness: Command) -> None:
    cases = ((["sleep", "60"], "not a Python process"), ([sys.executable, "-c", SLEEP], "not SGLang"))
    for command, says in cases:
        with child(*command) as process:
            result = kvwitness("attach", "--pid", process.pid, "--live", "--yes")
            assert result.exit_code == 2 and says in result.stderr and len(result.stderr.splitlines()) == 1
            assert process.poll() is None
    result = kvwitness("attach", "--pid", process.pid, "--live", "--yes")
    assert result.exit_code == 2 and "there is no such process" in result.stderr


@pytest.mark.usefixtures("a_gdb")
def test_it_asks_and_shows_first(kvwitness: Command) -> None:
    with served("--ranks", "2") as server:
        result = kvwitness("attach", "--url", server.url, "--live")
        assert result.exit_code == 2 and "say --yes" in result.stderr
        assert "HiCache on" in result.stderr and "way in: live" in result.stderr
        assert all(str(pid) in result.stderr for pid in server.schedulers)
        as_before(server)


@pytest.mark.usefixtures("a_gdb")
def test_a_folder_that_others_can_write_to(kvwitness: Command, tmp_path: Path) -> None:
    """Whoever can write there could tell the process what to load."""
    (tmp_path / control.FOLDER).mkdir()
    (tmp_path / control.FOLDER).chmod(0o777)
    with served() as server:
        assert "written to by others" in refused(kvwitness, server, "--dir", tmp_path)
        as_before(server)


def test_only_names_a_scheduler_of_this_server(kvwitness: Command) -> None:
    with served() as server:
        assert "no scheduler of this server" in refused(kvwitness, server, "--only", os.getpid())


@needs_gdb
def test_attach_and_detach(kvwitness: Command, tmp_path: Path) -> None:
    """And what is there already is not gone into again: no process is stopped to find that out."""
    data = tmp_path / "data"
    with served("--ranks", "2") as server:
        result = kvwitness("attach", "--url", server.url, "--live", "--yes", "--dir", data)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.count("stood still for") == 2 and "gdb" in result.stdout
        assert "it records already" in refused(kvwitness, server)
        result = kvwitness("detach", "--url", server.url)
        assert result.exit_code == 0 and result.stdout.count("SGLang's own again") == 2
        assert all(state["originals"] for state in server.states())
        result = kvwitness("detach", "--url", server.url)
        assert result.exit_code == 2 and "it is not attached" in result.stderr
    assert len(list(data.glob("*.kvwj"))) == 2
