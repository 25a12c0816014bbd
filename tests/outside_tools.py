"""Servers that publish KV events, clients that keep them busy, and commands that run beside them."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvwitness.tracer.protocol.waiting import SystemClock, wait_until
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.server import ServerOptions, StandServer, free_port

CLIENTS = 4
PREFIX = 1500
MAIN = [sys.executable, "-c", "from kvwitness.tracer.cli import main; main()"]


def publishing(folder: Path | None) -> tuple[str, ...]:
    """Server arguments for KV events over sockets in a folder; None: over TCP, a port for each dp rank."""
    names = ("endpoint", "replay_endpoint")
    if folder is None:
        first, second = free_port(), free_port()
        sockets = {name: f"tcp://*:{port}" for name, port in zip(names, (first, second), strict=True)}
    else:
        sockets = {name: f"ipc://{folder}/{name}.sock" for name in names}
    return ("--kv-events-config", json.dumps({"publisher": "zmq", **sockets}))


@contextmanager
def serving(release: str, folder: Path, *, port: int = 0, **options: Any) -> Iterator[StandServer]:
    """A real server of a release."""
    environment = ensure_environment(SilentProgress(), release=release)
    model = ensure_model(environment, SilentProgress(), "qwen2")
    with StandServer(environment, model, ServerOptions(**options), workdir=folder, port=port) as server:
        yield server


def prompt(chance: random.Random) -> list[int]:
    return [chance.randrange(1, 1000) for _ in range(PREFIX)]


@dataclass
class Running:
    """A command that runs beside the test."""

    process: subprocess.Popen[str]
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)

    def said(self, text: str, timeout_s: float = 120.0) -> str:
        """The first line on standard error that holds ``text``; waits for it."""
        wait_for(lambda: any(text in line for line in self.err) or self.process.poll() is not None, timeout_s)
        found = [line for line in self.err if text in line]
        assert found, f"it did not say {text!r}: {self.err}"
        return found[0]

    def interrupt(self) -> int:
        """Ctrl-C, and the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=120)


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait until ``condition`` holds; the test fails when it does not come to that."""
    assert wait_until(condition, timeout_s, 0.05, SystemClock()), "it did not happen"


@contextmanager
def running(*arguments: str, **popen: Any) -> Iterator[Running]:
    """A command of kvwitness in a process of its own; killed when the block ends."""
    process = subprocess.Popen(
        [*MAIN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1, **popen
    )
    found = Running(process)
    assert process.stdout is not None and process.stderr is not None
    readers = [
        threading.Thread(target=_read, args=(process.stdout, found.out), daemon=True),
        threading.Thread(target=_read, args=(process.stderr, found.err), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        yield found
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for reader in readers:
            reader.join()


def _read(stream: Any, lines: list[str]) -> None:
    lines.extend(iter(stream.readline, ""))


def kvwitness(*arguments: str, expect: int = 0) -> dict[str, Any]:
    """The command with ``--json``, as a person would run it."""
    done = subprocess.run([*MAIN, *arguments, "--json"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == expect, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
