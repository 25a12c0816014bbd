"""Which start of which server this process belongs to, on which host, and which key its digests are made with.

All processes of one start share a random id. The process that starts the others makes it, right before it does so
(kvwitness.patches.hooks.launch), and leaves it in its environment, which they inherit. But so does everything else
that it starts: an id counts only where the process that made it is this one or an ancestor of it that lives. A shell
or a supervisor that starts servers one after the other makes none, and each launch makes its own, even within one
process. Where nothing is inherited (schedulers that Ray starts, other hosts) each process has an id of its own, and
which of them belong together is not known.

``KVWITNESS_START`` in the server's environment says so instead: the same text for every process of one start,
another one for each start.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, MutableMapping
from hashlib import blake2b
from pathlib import Path
from typing import Final

VARIABLE: Final = "KVWITNESS_START"
INHERITED: Final = "_KVWITNESS_STARTED_BY"
"""``<id>:<process id of its maker>:<when that process started>``."""

_ID_BYTES: Final = 8
_GENERATIONS: Final = 64
"""Ancestors that are looked at: real trees of processes have a dozen."""


def new_id() -> str:
    """An id for a start."""
    return secrets.token_hex(_ID_BYTES)


def is_id(text: object) -> bool:
    """Whether that is one."""
    return isinstance(text, str) and len(text) == 2 * _ID_BYTES and set(text) <= set("0123456789abcdef")


def given_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The id that the user's text stands for; None where there is none."""
    text = environ.get(VARIABLE)
    return _digest(b"start", text.encode("utf-8", "replace")) if text else None


def begin_launch(environ: MutableMapping[str, str] = os.environ) -> None:
    """This process is about to start the processes of a server."""
    environ.pop(INHERITED, None)
    me = os.getpid()
    since = _look_up(me)[1]
    environ[INHERITED] = f"{new_id()}:{me}:{since}"


def start_id(environ: Mapping[str, str] = os.environ) -> str:
    """The id of the start that this process belongs to: given, inherited, or one that it shares with nobody."""
    return given_id(environ) or _inherited(environ.get(INHERITED, "")) or new_id()


def _inherited(text: str) -> str | None:
    found, _, maker = text.partition(":")
    pid, _, since = maker.partition(":")
    if not is_id(found):
        return None
    candidate = os.getpid()
    try:
        for _ in range(_GENERATIONS):
            parent, started = _look_up(candidate)
            if str(candidate) == pid:
                return found if started == since else None
            candidate = int(parent)
    except (OSError, ValueError, IndexError):
        return None
    return None


def _look_up(pid: int) -> tuple[str, str]:
    """A process's parent, and its start in clock ticks since the machine's (a number is given again)."""
    # The name, in parentheses, can hold anything.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[1].decode(), fields[19].decode()


def host_id(name: str, key: bytes) -> str:
    """The host's name, which nobody can tell from it without the recording's key."""
    return _digest(b"host", name.encode("utf-8", "replace"), key)


def key_id(key: bytes) -> str:
    """Which key that is, without telling it."""
    return _digest(b"key", b"", key)


def _digest(what: bytes, data: bytes, key: bytes = b"") -> str:
    return blake2b(data, key=key, digest_size=_ID_BYTES, person=b"kvwitness:" + what).hexdigest()
