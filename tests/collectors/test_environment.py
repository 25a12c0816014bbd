"""Facts about this machine, and finding a running server's journals. The servers are real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvwitness.collectors import environment
from kvwitness.collectors.environment import (
    DIRECTORY_VARIABLE,
    find_kvwitness_dir,
    find_server_processes,
    host_facts,
    locate_kvwitness_dir,
    parse_gpus,
)

LISTEN = """
import os, socket, subprocess, sys
server = socket.create_server(("127.0.0.1", 0))
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1], "--api-key", "s3cret"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE)
worker.stdout.readline()
print(server.getsockname()[1], flush=True)
sys.stdin.read()
worker.stdin.close()
worker.wait()
"""
IDLE = "print(flush=True); input()"


@contextmanager
def listening(worker: str = IDLE, cwd: Path | None = None, **variables: str) -> Iterator[str]:
    """A process that listens and has one worker; gives its URL."""
    plain = {name: value for name, value in os.environ.items() if name != DIRECTORY_VARIABLE}
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, worker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**plain, **variables},
        cwd=cwd,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def test_the_directory_is_read_from_the_servers_environment(tmp_path: Path) -> None:
    with listening(KVWITNESS_DIR=str(tmp_path)) as url:
        assert find_kvwitness_dir(url) == tmp_path


def test_a_relative_directory_is_the_servers_and_not_ours(tmp_path: Path) -> None:
    with listening(cwd=tmp_path, KVWITNESS_DIR="journals") as url:
        assert find_kvwitness_dir(url) == tmp_path / "journals"


def test_an_open_journal_is_enough(tmp_path: Path) -> None:
    journal = tmp_path / "scheduler-1-2.kvwj"
    with listening(worker=f"held = open({str(journal)!r}, 'wb'); {IDLE}") as url:
        assert find_kvwitness_dir(url) == tmp_path


def test_a_server_without_it_is_told_from_no_server() -> None:
    with listening() as url:
        assert locate_kvwitness_dir(url).reason == f"the server runs without {DIRECTORY_VARIABLE}"
    assert locate_kvwitness_dir(url).reason.startswith("no process listens on port")


def test_another_machines_processes_are_not_looked_for_here() -> None:
    located = locate_kvwitness_dir("http://192.0.2.1:30000")
    assert located.path is None
    assert "192.0.2.1" in located.reason


def test_processes_of_another_user_give_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: psutil.Process) -> dict[str, str]:
        raise psutil.AccessDenied(self.pid)

    with listening(KVWITNESS_DIR=str(tmp_path)) as url:
        monkeypatch.setattr(psutil.Process, "environ", refuse)
        located = locate_kvwitness_dir(url)
    assert located.path is None
    assert "another user" in located.reason


def test_the_servers_process_tree_is_described_without_its_secrets() -> None:
    with listening() as url:
        found = find_server_processes(url)
    assert len(found.processes) == 2
    server, worker = found.processes
    assert worker.parent == server.pid
    assert worker.command[-2:] == ("--api-key", "<redacted>")
    assert all(process.rss_bytes and not process.unknown for process in found.processes)


def test_facts_about_this_machine_are_there_or_listed_as_unknown() -> None:
    facts = host_facts()
    assert facts.memory_total_bytes >= facts.memory_available_bytes > 0
    assert facts.cpu_model or "cpu_model" in facts.unknown
    assert facts.numa_nodes or "numa_nodes" in facts.unknown
    assert facts.gpus or any(line.startswith("gpus") for line in facts.unknown)


def test_gpus_as_nvidia_smi_lists_them() -> None:
    (gpu, other) = parse_gpus("0, NVIDIA H200, 570.86.15, 143771, 4\n1, NVIDIA H200, 570.86.15, [N/A], [N/A]\n")
    assert (gpu.name, gpu.driver, gpu.memory_total_mib, gpu.memory_used_mib) == ("NVIDIA H200", "570.86.15", 143771, 4)
    assert (other.index, other.memory_total_mib) == (1, None)


def test_an_nvidia_smi_that_fails_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "gpus: nvidia-smi ended with 9" in host_facts().unknown


def test_an_nvidia_smi_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, environment.GPU_TIMEOUT_S)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "gpus: nvidia-smi: TimeoutExpired" in host_facts().unknown
