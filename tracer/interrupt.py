"""Steps that Ctrl-C must not cut short."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def finishing(say: Callable[[str], None]) -> Iterator[None]:
    """While a bundle is written Ctrl-C (and SIGTERM) is only answered: what was recorded exists nowhere else yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def answer(_signal: int, _frame: FrameType | None) -> None:
        # Whatever it interrupted, printing a line for example, has to go on.
        with suppress(RuntimeError):
            say("the bundle is being written, which takes seconds")

    before = {number: signal.signal(number, answer) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
