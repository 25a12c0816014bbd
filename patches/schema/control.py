"""The control socket of a process that waits for kvwitness: where it is, and what is said over it.

One JSON object on one line each way, then the connection is closed. The folder belongs to the server's user
alone; the socket's path goes through a descriptor of the folder, for a path may be longer than a socket's name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

FOLDER: Final = "control"
SUFFIX: Final = ".sock"
LINE_LIMIT: Final = 1 << 16
"""Bytes of a request or an answer."""

STATUS: Final = "status"
ATTACH: Final = "attach"
DETACH: Final = "detach"
LEAVE: Final = "leave"
"""End the socket and its thread, where they came into a running process and nothing is attached."""

START: Final = "start"
"""With ``attach``: the id of the start, the same for all ranks (kvwitness.patches.start)."""

CLAIMED: Final = ".taken"
REPORT: Final = ".report"
"""What follows the name of a request that was injected: claimed by the process, answered by it."""


class Way:
    """How the hooks come into a process that serves already."""

    STANDBY: Final = "standby"
    LIVE: Final = "live"


class State:
    """What a process on standby is doing."""

    STARTING: Final = "starting"
    """The scheduler is being constructed: the model is loaded, the pools are made."""
    IDLE: Final = "idle"
    ATTACHED: Final = "attached"


class Problem:
    """Why a command was refused; the answer's text says more."""

    STARTING: Final = "starting"
    NO_HICACHE: Final = "no_hicache"
    UNKNOWN_TREE: Final = "unknown_tree"
    ATTACHED: Final = "attached"
    NOT_ATTACHED: Final = "not_attached"
    NO_STEP: Final = "no_step"
    """The scheduler did not come by in time: hung, paused, or the wrong loop."""
    NO_JOURNAL: Final = "no_journal"
    NO_SCHEDULER: Final = "no_scheduler"
    """The process has no scheduler of SGLang in it."""
    OTHERS: Final = "others"
    """kvwitness is there already: recording from the start, on standby, or another version at work."""
    FAILED: Final = "failed"


def socket_name(pid: int) -> str:
    """The socket's file name within the control folder."""
    return f"{pid}{SUFFIX}"


@contextmanager
def short_path(folder: Path, name: str) -> Iterator[str]:
    """A path to ``folder/name`` that fits into a socket's name, however long the folder's is (Linux)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
