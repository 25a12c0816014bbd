"""The Jaeger program: the one that JAEGER_BIN names, or one that is built once for each version of its module."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvwitness.tracer.spans.jaeger.errors import JaegerUnavailable, log_tail
from kvwitness.tracer.watchdog import killed_with_us

Progress = Callable[[str], None]

_TOOL: Final = "github.com/jaegertracing/jaeger/cmd/jaeger"
_PROGRESS_EVERY_S: Final = 15.0
_NAME_ONE: Final = "set JAEGER_BIN to a Jaeger v2 program"


def find_or_build_jaeger(progress: Progress, module_dir: Path) -> Path:
    """Return the path of a Jaeger v2 program, building it at most once per version of the Go module.

    ``JAEGER_BIN`` wins when it is set. Otherwise the program is built from the Go module in ``module_dir``
    and kept under ``${XDG_CACHE_HOME:-~/.cache}/kvwitness/jaeger/``. The first build takes minutes;
    ``progress`` gets a line now and then. Raises ``JaegerUnavailable`` when neither way is open.
    """
    named = os.environ.get("JAEGER_BIN")
    if named:
        path = Path(named).expanduser()
        _check(path, f"JAEGER_BIN={named}", "set it to a Jaeger v2 program, or unset it to build one")
        return path.absolute()

    go = shutil.which("go")
    if go is None:
        raise JaegerUnavailable(
            "there is no Jaeger: JAEGER_BIN is not set, and there is no `go` on PATH to build one with",
            f"install Go (the version in {module_dir / 'go.mod'} or newer), or {_NAME_ONE}",
        )
    folder = _cache_root() / _build_key(go, module_dir)
    program = folder / "jaeger"
    if program.exists():  # only ever put there whole and checked, by the rename in _build
        return program
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", progress):
        if not program.exists():
            _build(go, module_dir, program, progress)
    return program


def _check(path: Path, name: str, remedy: str) -> None:
    """Raise unless ``path`` runs and lists the component that only a Jaeger v2 has."""
    if not path.is_file():
        raise JaegerUnavailable(f"{name} is not a file", remedy)
    if not os.access(path, os.X_OK):
        raise JaegerUnavailable(f"{name} is not executable", remedy)
    try:
        # `version` prints nothing in a plain module build, `components` always answers.
        ran = subprocess.run(
            [path.absolute(), "components"], capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JaegerUnavailable(f"{name} does not run ({error})", remedy) from error
    if ran.returncode != 0 or "jaeger_query" not in ran.stdout:
        raise JaegerUnavailable(
            f"{name} is not a Jaeger v2: `components` ended with {ran.returncode} and did not list jaeger_query", remedy
        )


def _cache_root() -> Path:
    # The XDG specification says that a relative value is to be ignored.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".cache"
    return base / "kvwitness" / "jaeger"


def _build_key(go: str, module_dir: Path) -> str:
    """Name one build: the pinned modules with their hashes, and the Go that compiles them."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        try:
            content = (module_dir / name).read_bytes()
        except OSError as error:
            raise JaegerUnavailable(
                f"there is no Go module in {module_dir} to build Jaeger from",
                f"run it in a checkout of kvwitness, or {_NAME_ONE}",
            ) from error
        digest.update(f"{name} {len(content)}\n".encode() + content)
    # Asked inside the module: go.mod may select another toolchain than the one on PATH.
    ran = subprocess.run([go, "env", "GOVERSION", "GOOS", "GOARCH"], cwd=module_dir, capture_output=True, text=True)
    if ran.returncode != 0:
        raise JaegerUnavailable(
            f"`go env` failed in {module_dir}: {' '.join(ran.stderr.split())}", f"install a newer Go, or {_NAME_ONE}"
        )
    digest.update(ran.stdout.encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel drops it if this process dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is building Jaeger; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(go: str, module_dir: Path, program: Path, progress: Progress) -> None:
    """Build ``program``; the caller holds the lock, so leftovers here belong to builds that were killed."""
    folder = program.parent
    for leftover in folder.glob("build-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
    log = folder / "build.log"
    try:
        progress("building Jaeger from tests/jaeger (the first time takes some minutes)")
        started = time.monotonic()
        fresh = work / "jaeger"
        # -v names each package as it is compiled: that is what the progress lines count.
        command = [go, "build", "-v", "-trimpath", "-ldflags=-s -w", "-o", str(fresh), _TOOL]
        # Without cgo the build needs no C compiler; Jaeger's own releases are built so too.
        environment = {**os.environ, "CGO_ENABLED": "0"}
        with log.open("w") as output:
            # A session of its own, so that an interrupted build takes its compiler processes with it.
            building = subprocess.Popen(
                command,
                cwd=module_dir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                with killed_with_us(building.pid):
                    while building.poll() is None:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            building.wait(_PROGRESS_EVERY_S)
                            break
                        progress(_build_state(log, time.monotonic() - started))
            finally:
                if building.poll() is None:
                    os.killpg(building.pid, signal.SIGKILL)
                    building.wait()
        if building.returncode != 0:
            raise JaegerUnavailable(
                f"building Jaeger failed (`go build` ended with {building.returncode})",
                f"see the end of {log} above, or {_NAME_ONE}",
                log_tail(log),
            )
        _check(fresh, f"the new build {fresh}", f"see {log}")
        fresh.rename(program)
        progress(f"built Jaeger in {time.monotonic() - started:.0f} s: {program}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _build_state(log: Path, elapsed_s: float) -> str:
    lines = log.read_text(errors="replace").splitlines()
    fetched = sum(line.startswith("go: downloading ") for line in lines)
    compiled = len(lines) - fetched
    return f"building Jaeger: {elapsed_s:.0f} s, {fetched} modules fetched, {compiled} packages compiled"
