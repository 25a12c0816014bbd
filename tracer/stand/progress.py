"""Telling a person, or a log file, how a long step is going."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.status import Status

PLAIN_INTERVAL_S = 30.0
"""Between two lines of one step in a log."""
_TICK_S = 1.0
_DETAIL_CHARS = 90


class Progress(Protocol):
    """What a long step reports to. `tick` says that it still goes on, and may be called from another thread."""

    def phase(self, title: str) -> None: ...

    def detail(self, text: str) -> None: ...

    def tick(self) -> None: ...


class SilentProgress:
    """Reports nothing (tests, and callers that only want the result)."""

    def phase(self, title: str) -> None:
        pass

    def detail(self, text: str) -> None:
        pass

    def tick(self) -> None:
        pass


class PlainProgress:
    """One line for each phase and one about every half minute within it: for logs and CI."""

    def __init__(self, out: TextIO, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._out = out
        self._interval_s = interval_s
        self._title = ""
        self._detail = ""
        self._phase_start = self._last_print = time.monotonic()
        self._lock = threading.RLock()

    def phase(self, title: str) -> None:
        with self._lock:
            self._title, self._detail = title, ""
            self._phase_start = self._last_print = time.monotonic()
            print(title, file=self._out, flush=True)

    def detail(self, text: str) -> None:
        self._detail = text[:_DETAIL_CHARS]
        self.tick()

    def tick(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._title and now - self._last_print >= self._interval_s:
                self._last_print = now
                tail = f": {self._detail}" if self._detail else ""
                print(f"{self._title} ({now - self._phase_start:.0f} s){tail}", file=self._out, flush=True)


class LiveProgress:
    """A spinner line that is rewritten in place: for a terminal."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console = console
        self._status = status
        self._title = ""
        self._detail = ""
        self._start = time.monotonic()

    def phase(self, title: str) -> None:
        self._leave()
        self._title, self._detail, self._start = title, "", time.monotonic()
        self.tick()

    def detail(self, text: str) -> None:
        self._detail = text[:_DETAIL_CHARS]
        self.tick()

    def tick(self) -> None:
        if not self._title:
            return
        elapsed = time.monotonic() - self._start
        self._status.update(f"{self._title} [dim]{elapsed:.0f} s  {_escaped(self._detail)}[/dim]")

    def _leave(self) -> None:
        """Leave a line behind for the phase that ends, so that the person sees where the time went."""
        if self._title:
            self._console.print(f"{self._title} [dim]{time.monotonic() - self._start:.0f} s[/dim]")
            self._title = ""


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


@contextmanager
def reporting(out: TextIO | None = None) -> Iterator[Progress]:
    """A `Progress` that suits `out` (standard error by default): live on a terminal, lines elsewhere."""
    stream = out if out is not None else sys.stderr
    if not stream.isatty():
        plain = PlainProgress(stream, PLAIN_INTERVAL_S)
        with _ticking(plain):
            yield plain
        return
    console = Console(file=stream)
    with console.status("") as status:
        live = LiveProgress(console, status)
        with _ticking(live):
            yield live
        live._leave()


@contextmanager
def _ticking(progress: Progress) -> Iterator[None]:
    """Tick all the time: a step that waits for a server or a download does not do it itself."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(_TICK_S):
            progress.tick()

    thread = threading.Thread(target=tick, name="kvwitness-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
