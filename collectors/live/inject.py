"""Leave a request in a running scheduler, and wait for what it says to it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from kvwitness.collectors.live.gdb import ADDRESS_DIGITS, NotInjected, Stop, run_in, size_of
from kvwitness.collectors.live.preflight import REMOTE_EXEC, LiveWay
from kvwitness.patches.schema import control

_ANSWER_S: Final = 30.0
"""Time that the main thread has to come to the call, load kvwitness and meet the scheduler."""
_CLAIM_S: Final = 15.0
_POLL_S: Final = 0.005
_EXEC_S: Final = 30.0
_BOOTSTRAP: Final = "standby/bootstrap.py"
_ADDRESS: Final = f"0x{'0' * ADDRESS_DIGITS}"


class Report(msgspec.Struct, frozen=True):
    """What the process said to the request. ``problem`` is one of ``control.Problem``, where it refused."""

    ok: bool
    problem: str = ""
    error: str = ""
    socket: str = ""


class Injection(msgspec.Struct, frozen=True):
    """A request that was left, and what came of it."""

    report: Report
    tool: str
    stopped_us: int


def inject(pid: int, way: LiveWay, directory: Path, quota_bytes: int) -> Injection:
    """Have the scheduler ``pid`` open its control socket below ``directory``.

    Nothing of SGLang is changed by it. Raises :class:`NotInjected`: the request was withdrawn, and the process
    does nothing about it any more.
    """
    with _request(pid, directory, quota_bytes) as request:
        if way.gdb is None:
            stop = _remote_exec(pid, way, request)
        else:
            text, address_at = _text(request)
            stop = run_in(pid, way.interpreter, way.gdb, text, address_at)
        report = _wait(pid, request)
    return Injection(report, stop.tool, round(stop.seconds * 1e6))


def patches_folder() -> Path:
    """The folder of this installation's ``kvwitness.patches``."""
    spec = importlib.util.find_spec("kvwitness.patches")
    if spec is None or not spec.submodule_search_locations:
        raise NotInjected("kvwitness.patches is not part of this installation")
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def _state_of(folder: Path) -> str:
    """Changes whenever one of the folder's source files does."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found = path.stat()
        digest.update(f"{path.relative_to(folder)} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


@contextmanager
def _request(pid: int, directory: Path, quota_bytes: int) -> Iterator[Path]:
    """The file that the process claims. When this ends there is nothing left to claim, and no file."""
    folder = directory / control.FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    patches = patches_folder()
    settings = {
        "patches": str(patches),
        "source": _state_of(patches),
        "directory": str(directory),
        "quota_bytes": quota_bytes,
    }
    path = folder / f"{pid}.{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(settings, file)
    try:
        yield path
    finally:
        for name in (path, _beside(path, control.CLAIMED), _beside(path, control.REPORT), _beside(path, ".py")):
            name.unlink(missing_ok=True)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}{ending}")


def _text(request: Path, *, mapped: bool = True) -> tuple[str, int]:
    """The Python source that is injected, and where it wants the address of its memory.

    It never raises: a pending call that fails would break whatever the scheduler is doing.
    """
    bootstrap = (patches_folder() / _BOOTSTRAP).read_text("ascii")

    def whole(size: int) -> str:
        source = f"{bootstrap}\nbegin({str(request)!r}, {_ADDRESS}, {size:10d})\n"
        # One statement that leaves no name in the process's __main__.
        return f"try:\n exec({source!a}, {{}})\nexcept BaseException:\n pass\n"

    text = whole(size_of(whole(0)) if mapped else 0)
    return text, text.index(_ADDRESS) + len("0x")


def _wait(pid: int, request: Path) -> Report:
    """The process's answer. Raises :class:`NotInjected` where the request was withdrawn in time, or it died."""
    answered = _beside(request, control.REPORT)
    begun = time.monotonic()
    while not answered.exists():
        waited = time.monotonic() - begun
        if not Path(f"/proc/{pid}").exists():
            raise NotInjected("it ended meanwhile")
        if waited > _CLAIM_S and _withdrawn(request):
            raise NotInjected(f"its main thread ran no Python for {_CLAIM_S:.0f} s")
        if waited > _CLAIM_S + _ANSWER_S:
            raise NotInjected("it took the request, and did not answer it")
        time.sleep(_POLL_S)
    try:
        return msgspec.json.decode(answered.read_bytes(), type=Report)
    except msgspec.DecodeError as error:
        raise NotInjected(f"it answered something else: {error}") from error


def _withdrawn(request: Path) -> bool:
    """Take the request back; False where the process has it already."""
    with suppress(FileNotFoundError):
        request.unlink()
        return True
    return False


def _remote_exec(pid: int, way: LiveWay, request: Path) -> Stop:
    """CPython's own way in, called by an interpreter of the target's own version: its executable itself."""
    script = _beside(request, ".py")
    script.write_text(_text(request, mapped=False)[0])
    call = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
    program = str(Path(f"/proc/{pid}/exe").readlink())
    try:
        done = subprocess.run(
            [program, "-I", "-S", "-c", call, str(pid), str(script)],
            capture_output=True,
            text=True,
            timeout=_EXEC_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInjected(f"{program} did not do it: {error}") from error
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise NotInjected(f"sys.remote_exec: {said}", denied="PermissionError" in said or "not permitted" in said)
    # The process is not stopped: its memory is written to while it runs.
    return Stop(0.0, f"{REMOTE_EXEC}, Python {way.interpreter.shown_version}")
