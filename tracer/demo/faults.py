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
    """Cut every scheduler journal off inside its middle record."""
    for path in find_journals(directory):
        if read_journal(path).role == SCHEDULER_ROLE:
            records = _records(path.read_bytes())
            os.truncate(path, records[len(records) // 2] + fmt.HEAD_BYTES)


def _records(raw: bytes) -> list[int]:
    """Where the records of the first chunk begin."""
    at, found = fmt.HEADER_BYTES + fmt.CHUNK_HEADER.size, []
    while at + fmt.COMMIT.size <= len(raw) and (commit := fmt.COMMIT.unpack_from(raw, at)[0]):
        found.append(at)
        at += commit & fmt.COMMIT_LENGTH_MASK
    return found


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
