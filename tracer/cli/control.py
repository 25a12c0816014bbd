"""The control server of a run: one that is there, or one that is started for it and stopped again."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

import msgspec

from kvwitness.collectors.environment import DIRECTORY_VARIABLE
from kvwitness.tracer.protocol.client import ServerClient, ServerUnavailable
from kvwitness.tracer.stand.server import log_tail
from kvwitness.tracer.watchdog import killed_with_us

START_TIMEOUT_S: Final = 900.0
"""A large model takes minutes to load and to capture its graphs."""
_STOP_GRACE_S: Final = 30.0
_POLL_S: Final = 0.5
_DEFAULT_PORT: Final = 30000


class ControlFailed(Exception):
    """The control server did not come up; the message is one line, after it perhaps the end of its log."""


class ControlServer(msgspec.Struct, frozen=True):
    """Where the control is, and the command that starts it (None: it is there)."""

    url: str
    command: str | None = None


def control_server(url: str | None, command: str | None) -> ControlServer | None:
    """What the two options say; None for no control. Raises ``ValueError`` for a command that cannot be split."""
    if command is None:
        return None if url is None else ControlServer(url)
    return ControlServer(url or _address_in(shlex.split(command)), command)


def _address_in(words: list[str]) -> str:
    """The address that a command that starts a server says it will have."""
    said = {"--host": "127.0.0.1", "--port": str(_DEFAULT_PORT)}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in said:
            said[name] = value if equals else following
    host = said["--host"] if said["--host"] != "0.0.0.0" else "127.0.0.1"
    return f"http://{host}:{said['--port']}"


@contextmanager
def running_control(control: ControlServer, client: ServerClient) -> Iterator[None]:
    """The control server, up and healthy; one that was started is stopped at the end, with all of its processes.

    Raises :class:`ControlFailed`.
    """
    if control.command is None:
        yield
        return
    log_path = Path(tempfile.mkdtemp(prefix="kvwitness-control-")) / "control.log"
    # It must not write into the folder of the server that it is the control of.
    environ = {name: value for name, value in os.environ.items() if name != DIRECTORY_VARIABLE}
    with log_path.open("wb") as log:
        process = _start(control.command, environ, log)
        with killed_with_us(process.pid):
            try:
                _wait_healthy(process, control, client, log_path)
                yield
            finally:
                _stop(process)


def _start(command: str, environ: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            shlex.split(command),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ControlFailed(f"the control server cannot be started: {error.strerror or error}") from error


def _wait_healthy(process: subprocess.Popen[bytes], control: ControlServer, client: ServerClient, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if (status := process.poll()) is not None:
            raise ControlFailed(
                f"the control server ended with status {status} before it was healthy; "
                f"the end of {log}:\n{log_tail(log)}"
            )
        try:
            client.check()
            return
        except ServerUnavailable as error:
            if time.monotonic() > deadline:
                raise ControlFailed(
                    f"the control server was not healthy at {control.url} after {START_TIMEOUT_S:.0f} s ({error}); "
                    f"the end of {log}:\n{log_tail(log)}"
                ) from error
        time.sleep(_POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
