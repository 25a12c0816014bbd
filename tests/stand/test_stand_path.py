from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvwitness.patches.stand.faults import UnknownFaultError
from kvwitness.tracer.stand.environment import StandEnvironment
from kvwitness.tracer.stand.paths import kvwitness_version, patches_folder, stand_path
from kvwitness.tracer.stand.releases import NEWEST
from kvwitness.tracer.stand.server import ServerOptions, StandServer, StandServerError, log_tail

# What a process with only the folder on its path sees, as SGLang looks it up.
SEEN = """
from importlib.metadata import entry_points
for group in ("sglang.srt.platforms", "sglang.srt.plugins"):
    for point in sorted(entry_points(group=group)):
        print(point.dist.name, group.rsplit(".", 1)[1], point.name, point.value)
import kvwitness.patches.stand.entry as entry
print(entry.activate())
try:
    import kvwitness.tracer
except ImportError:
    print("no tracer")
"""


def seen_from(folder: Path) -> list[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("KVWITNESS", "PYTHON"))}
    # -S leaves out site-packages, and with it the installation that runs these tests.
    done = subprocess.run(
        [sys.executable, "-S", "-c", SEEN],
        env=env | {"PYTHONPATH": str(folder), "KVWITNESS_STAND": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_folder_for_any_sglang_has_the_plugin_and_no_platform(tmp_path: Path) -> None:
    folder = stand_path(tmp_path / "p")
    assert (folder / "kvwitness" / "patches").resolve() == patches_folder()
    assert seen_from(folder) == [
        "kvwitness plugins kvwitness kvwitness.patches.entry:plugin",
        "kvwitness.patches.stand.platform.StandPlatform",
        "no tracer",
    ]


def test_stand_comes_from_a_distribution_of_its_own(tmp_path: Path) -> None:
    folder = stand_path(tmp_path / "p", stand=True)
    assert seen_from(folder)[:3] == [
        "kvwitness-cpu-stand platforms kvwitness_cpu_stand kvwitness.patches.stand.entry:activate",
        "kvwitness plugins kvwitness kvwitness.patches.entry:plugin",
        "kvwitness-cpu-stand plugins kvwitness_cpu_stand kvwitness.patches.stand.entry:plugin",
    ]


def test_making_it_again_changes_nothing_and_mends_a_stale_link(tmp_path: Path) -> None:
    folder = stand_path(tmp_path / "p", stand=True)
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    assert stand_path(tmp_path / "p", stand=True) == folder
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before

    link = folder / "kvwitness" / "patches"
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    stand_path(tmp_path / "p", stand=True)
    assert link.resolve() == patches_folder()


def test_default_folder_is_apart_for_stand_and_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVWITNESS_STAND_HOME", str(tmp_path))
    assert stand_path() != stand_path(stand=True)
    assert stand_path().is_relative_to(tmp_path)
    assert (stand_path() / f"kvwitness-{kvwitness_version()}.dist-info").is_dir()


def fake_server(
    tmp_path: Path,
    script: str,
    options: ServerOptions | None = None,
    start_timeout_s: float = 10,
    release: str = NEWEST,
) -> StandServer:
    """A server whose SGLang is a shell script."""
    python = tmp_path / "env" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    environment = StandEnvironment(root=tmp_path / "env", release=release)
    return StandServer(
        environment,
        tmp_path,
        options,
        workdir=tmp_path / "work",
        start_timeout_s=start_timeout_s,
        stop_grace_s=0.5,
    )


def test_server_that_dies_says_why(tmp_path: Path) -> None:
    with pytest.raises(StandServerError, match=r"(?s)ended with status 7.*out of paper"):
        fake_server(tmp_path, "echo out of paper; exit 7").start()


def test_server_that_never_answers_is_ended_with_its_children(tmp_path: Path) -> None:
    # It ignores SIGTERM, and so does its child.
    server = fake_server(tmp_path, "trap '' TERM; sleep 1000 & echo $!; wait", start_timeout_s=1.5)
    with pytest.raises(StandServerError, match="not healthy"):
        server.start()
    assert not runs(int((tmp_path / "work" / "server.log").read_text()))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_wrong_fault_is_refused_before_anything_starts(tmp_path: Path) -> None:
    server = fake_server(tmp_path, "exit 0", ServerOptions(faults="copy-explode"))
    with pytest.raises(UnknownFaultError):
        server.start()
    assert not (tmp_path / "work").exists()


def test_environment_of_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVWITNESS_STAND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SGLANG_PLUGINS", "something-else")
    monkeypatch.setenv("NO_PROXY", "example.invalid")
    options = ServerOptions(tree_core="python", tp_size=2, faults="copy-skip", extra_env={"KVWITNESS_DIR": "x"})
    env = fake_server(tmp_path, "exit 0", options).environ()

    assert "SGLANG_PLUGINS" not in env
    assert env["KVWITNESS_STAND"] == "1"
    assert env["KVWITNESS_STAND_FAULT"] == "copy-skip"
    assert env["KVWITNESS_DIR"] == "x"
    assert env["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] == "python"
    assert env["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert env["NO_PROXY"] == env["no_proxy"] == "example.invalid,127.0.0.1,localhost"


def test_a_port_that_is_taken_is_refused_at_once(tmp_path: Path) -> None:
    """Whoever listens there would be taken for the server."""
    server = fake_server(tmp_path, "exit 0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        server._port = other.getsockname()[1]
        with pytest.raises(StandServerError, match=f"port {server._port} is taken"):
            server.start()


def test_replicas_are_bound_by_the_newest_release_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVWITNESS_STAND_HOME", str(tmp_path / "home"))
    bound = {
        release: fake_server(tmp_path, "exit 0", ServerOptions(dp_size=2), release=release).environ()
        for release in (NEWEST, "0.5.17")
    }
    assert bound[NEWEST]["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in bound["0.5.17"]


def test_log_tail_is_one_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == "  (nothing was logged)"
    log.write_text("a\nb\nc\n")
    assert log_tail(log, 2) == "  b\n  c"
