"""A small server in processes of its own, for tests that attach to one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("small_server.py")


class Served:
    """A server that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        self.pid = process.pid
        self.schedulers: list[int] = said["schedulers"]
        self.url = f"http://127.0.0.1:{said['port']}"

    def states(self) -> list[dict[str, Any]]:
        """What every scheduler says of itself."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        states: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return states


@contextmanager
def served(*arguments: str, python: str = sys.executable, before: Sequence[str] = ()) -> Iterator[Served]:
    """Start one (``before``: what its command begins with); it ends with the context."""
    command = [*before, python, str(PROGRAM), "sglang.launch_server", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Served(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)
