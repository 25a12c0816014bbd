"""Talk to processes that wait for kvwitness, through the control sockets below the server's data folder."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kvwitness.patches.schema import control

STANDBY_VARIABLE: Final = "KVWITNESS_STANDBY"
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 120.0
"""Attaching waits for the scheduler and for the snapshot."""

_HUNG_UP: Final = "it hung up: it belongs to another user, or is ending"


class ControlError(Exception):
    """No answer from a control socket; the message says why, in a few words."""


class Answer(msgspec.Struct, frozen=True):
    """What such a process answered. ``problem`` is one of ``control.Problem``, where it refused."""

    ok: bool
    pid: int = 0
    problem: str = ""
    error: str = ""
    state: str = ""
    way: str = ""
    sglang: str = ""
    directory: str = ""
    tree_class: str = ""
    tree_core: str = ""
    hicache: bool = False
    write_policy: str | None = None
    page_size: int | None = None
    ranks: dict[str, Any] = {}
    rounds: int = 0
    journal: str = ""
    hooks: int = 0
    pause_us: int = 0
    snapshot: dict[str, Any] = {}
    restored: int = 0
    not_restored: tuple[str, ...] = ()


def sockets_in(directory: Path) -> dict[int, Path]:
    """The control sockets below a data folder, by process id (that process may be gone).

    Raises :class:`ControlError` when the folder is not one that only this user can write to.
    """
    folder = directory / control.FOLDER
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ControlError(f"{folder} cannot be read: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise ControlError(f"{folder} can be written to by others")
    if found.st_uid != os.geteuid():
        raise ControlError(f"{folder} belongs to another user")
    return {
        int(path.name.removesuffix(control.SUFFIX)): path
        for path in sorted(folder.iterdir())
        if path.suffix == control.SUFFIX and path.stem.isdigit()
    }


def ask(path: Path, command: str, timeout_s: float = _ANSWER_S, about: Mapping[str, str | int] | None = None) -> Answer:
    """Send one command to a control socket; ``about`` is what goes with it: of an attachment, what its journal
    shall say of the way in and of the server's start.

    Returns when the connection was closed: a socket that goes with its attachment is gone by then. Raises
    :class:`ControlError`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(_CONNECT_S)
            with control.short_path(path.parent, path.name) as short:
                connection.connect(short)
            connection.settimeout(timeout_s)
            connection.sendall(json.dumps({"command": command, **(about or {})}).encode() + b"\n")
            raw = b""
            while part := connection.recv(1 << 16):
                raw += part
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise ControlError("nobody listens there any more") from error
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ControlError(_HUNG_UP) from error
        except TimeoutError as error:
            raise ControlError("no answer in time") from error
        except OSError as error:
            raise ControlError(error.strerror or str(error)) from error
    if not raw:
        raise ControlError(_HUNG_UP)
    try:
        return msgspec.json.decode(raw, type=Answer)
    except msgspec.DecodeError as error:
        raise ControlError(f"not an answer of kvwitness: {error}") from error
