"""Faults that strike the run from outside: a journal that is cut, a scheduler that is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.schema import format as fmt
from kvwitness.patches.schema.events import LoadQueued
from kvwitness.tracer.judgement import SCHEDULER_ROLE

_POLL_S = 0.1


def cut_journals(directory: Path) -> None:
    """Cut every scheduler journal off in the middle of what was written, inside a record."""
    for path in find_journals(directory):
        if read_journal(path).role != SCHEDULER_ROLE:
            continue
        written = len(path.read_bytes().rstrip(b"\0"))
        os.truncate(path, fmt.HEADER_BYTES + (written - fmt.HEADER_BYTES) // 2)


class KillDuringLoad(threading.Thread):
    """Kills processes with SIGKILL as soon as a load-back was queued in the journals."""

    def __init__(self, directory: Path, pids: Iterable[int]) -> None:
        super().__init__(daemon=True)
        self._directory = directory
        self._pids = tuple(pids)
        self._stop_asked = threading.Event()
        self.killed = False

    def run(self) -> None:
        while not self._stop_asked.wait(_POLL_S):
            if self._load_queued():
                for pid in self._pids:
                    os.kill(pid, signal.SIGKILL)
                self.killed = True
                return

    def _load_queued(self) -> bool:
        journals = [read_journal(path) for path in find_journals(self._directory)]
        return any(isinstance(event, LoadQueued) for journal in journals for event in journal.events)

    def stop(self) -> None:
        """End without killing, if it has not happened yet."""
        self._stop_asked.set()
        self.join()
