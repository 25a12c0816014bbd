"""Building a folder once, however many processes ask for it and whenever one of them is killed."""

from __future__ import annotations

import fcntl
import json
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvwitness.tracer.stand.progress import Progress

MARKER = "ready.json"
_TICK_S = 1.0
_TAIL_LINES = 25


class StandBuildError(RuntimeError):
    """A part of the stand could not be made. The message ends with the tail of the failing command."""


def is_ready(folder: Path) -> bool:
    """Whether `folder` was built to its end."""
    return (folder / MARKER).is_file()


def build_once(
    folder: Path,
    build: Callable[[Path], Mapping[str, str]],
    progress: Progress,
    usable: Callable[[Path], bool] = lambda _folder: True,
) -> Path:
    """Return `folder`, built by `build(folder)` unless a finished and `usable` one is there.

    The marker file, which holds what `build` returns, is written last; a folder without it is the
    remains of a build that was killed, and is deleted and built again in place. (A virtual environment
    holds absolute paths, so it cannot be built elsewhere and renamed.) A file lock makes a second
    process wait for the first and then use its result.
    """
    if is_ready(folder) and usable(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock"), progress):
        if is_ready(folder) and usable(folder):
            return folder
        if folder.exists():
            progress.phase(f"removing the unfinished or broken {folder.name}")
            # The marker goes first: were this removal itself killed, the rest must not look finished.
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder)
        folder.mkdir()
        facts = build(folder)
        marker = folder / (MARKER + ".tmp")
        marker.write_text(json.dumps(dict(facts), indent=1, sort_keys=True) + "\n")
        marker.rename(folder / MARKER)
    return folder


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.phase("waiting for another process that is building the same thing")
            while True:
                time.sleep(_TICK_S)
                progress.tick()
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    continue
        yield  # closing the file gives the lock back


def run_reported(
    argv: Sequence[str],
    log: Path,
    progress: Progress,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run `argv` to its end, appending its output to `log` and passing each line on as detail.

    Raises StandBuildError with the last lines of the output if the command fails. The command is ended
    if this process is interrupted meanwhile.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    tail: list[str] = []
    with log.open("a", buffering=1) as sink:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=None if env is None else dict(env),
        )
        reader = threading.Thread(target=_pump, args=(process, lines), daemon=True)
        reader.start()
        try:
            while True:
                try:
                    line = lines.get(timeout=_TICK_S)
                except queue.Empty:
                    progress.tick()
                    continue
                if line is None:
                    break
                sink.write(line)
                text = line.strip()
                if text:
                    tail = [*tail, text][-_TAIL_LINES:]
                    progress.detail(text)
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
    if code != 0:
        shown = "\n".join(f"  {text}" for text in tail)
        raise StandBuildError(f"exit status {code} from: {' '.join(argv)}\n{shown}\n(all output: {log})")


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
