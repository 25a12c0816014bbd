"""The running server that kvwitness is to be attached to: its processes, and whether they may be touched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from kvwitness.collectors.environment import (
    DIRECTORY_VARIABLE,
    directory_in_environment,
    directory_of_open_journal,
    server_of,
    server_tree,
)

SCHEDULER: Final = "scheduler"
DETOKENIZER: Final = "detokenizer"
CONTROLLER: Final = "data-parallel controller"
OTHER: Final = "server"
_TITLES: Final = {
    "sglang::scheduler": SCHEDULER,
    "sglang::detokenizer": DETOKENIZER,
    "sglang::data_parallel_controller": CONTROLLER,
}
_WORDS: Final = ("sglang", "launch_server")
_START: Final = "start the server with `kvwitness serve --standby --dir DIR -- COMMAND`"


class NoTarget(Exception):
    """There is nothing to attach to: what is wrong, where, and the next best way."""

    def __init__(self, what: str, where: str, what_to_do: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.what_to_do = what_to_do


class TargetProcess(msgspec.Struct, frozen=True):
    """One process of the server."""

    pid: int
    role: str
    title: str

    @property
    def where(self) -> str:
        """How it is named in a message."""
        return f"process {self.pid} ({self.title if self.role != OTHER and self.title else self.role})"


class Target(msgspec.Struct, frozen=True):
    """A server on this machine that belongs to this user."""

    where: str
    """As the user named it."""
    processes: tuple[TargetProcess, ...]
    directory: Path | None
    """Its data folder, from the environment that it was started with, or where it is recording to."""

    @property
    def schedulers(self) -> tuple[TargetProcess, ...]:
        """The schedulers, one per rank, by title."""
        return tuple(sorted((p for p in self.processes if p.role == SCHEDULER), key=lambda p: (p.title, p.pid)))

    @property
    def others(self) -> tuple[TargetProcess, ...]:
        """The processes that speak HTTP, and helpers."""
        return tuple(p for p in self.processes if p.role == OTHER)


def target_at(url: str) -> Target:
    """The server that listens at ``url``. Raises :class:`NoTarget`."""
    tree, reason = server_tree(url)
    if not tree:
        raise NoTarget(reason, url, "give the process id of the server with --pid, on the machine where it runs")
    return _target(url, tree)


def target_of(pid: int) -> Target:
    """The server that process ``pid`` belongs to. Raises :class:`NoTarget`."""
    where = f"process {pid}"
    try:
        process = psutil.Process(pid)
        _check(process, where)
        return _target(where, server_of(pid))
    except psutil.NoSuchProcess as error:
        raise NoTarget("there is no such process", where, "look it up with `ps`, or give --url") from error
    except psutil.AccessDenied as error:
        raise _foreign(where) from error


def _foreign(where: str) -> NoTarget:
    return NoTarget("it belongs to another user, or may not be looked at", where, "run kvwitness as the server's user")


def _check(process: psutil.Process, where: str) -> None:
    """Whether a process may be the server's. Raises :class:`NoTarget` or psutil.Error."""
    if process.status() == psutil.STATUS_ZOMBIE:
        raise NoTarget("it has ended", where, "give the id of a process that runs, or --url")
    if process.uids().effective != os.geteuid():
        raise _foreign(where)
    if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        raise NoTarget("it is stopped, or held by a debugger", where, "let it run on, and try again")
    with suppress(psutil.AccessDenied):
        name = Path(process.exe()).name
        if "python" not in name:
            raise NoTarget(f"it is not a Python process ({name})", where, "give the server's --url")


def _target(where: str, tree: Sequence[psutil.Process]) -> Target:
    found: list[TargetProcess] = []
    directory: Path | None = None
    recording: Path | None = None
    for process in tree:
        try:
            title = " ".join(process.cmdline()).strip()
            if process.uids().effective != os.geteuid():
                raise _foreign(where)
            # The environment and the open files are hidden from whoever may not trace the process.
            with suppress(psutil.AccessDenied):
                directory = directory or directory_in_environment(process)
                recording = recording or directory_of_open_journal(process)
        except psutil.AccessDenied as error:
            raise _foreign(where) from error
        except (psutil.Error, OSError):
            continue
        if title.startswith("sglang::"):
            title = title.split(maxsplit=1)[0]
        role = next((role for start, role in _TITLES.items() if title.startswith(start)), OTHER)
        found.append(TargetProcess(process.pid, role, title))
    _check(tree[0], where)
    if not any(word in process.title for process in found for word in _WORDS):
        raise NoTarget("it is a Python process, and not SGLang", where, "give the server's --url")
    return Target(where, tuple(found), recording or directory)


def folder_of(target: Target, named: Path | None) -> Path:
    """The data folder to look for control sockets in. Raises :class:`NoTarget`."""
    folder = named or target.directory
    if folder is None:
        raise NoTarget(f"it runs without {DIRECTORY_VARIABLE}, so nothing is on standby in it", target.where, _NEXT)
    if not folder.is_dir():
        raise NoTarget("there is no such folder", str(folder), "name the folder that `kvwitness serve` printed")
    return folder


_NEXT: Final = (
    f"without a restart, kvwitness attach --live goes into it; or {_START}; without either, what the server itself "
    "reports is left: kvwitness run abc --url URL"
)
