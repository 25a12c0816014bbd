"""Have something done on the scheduler's own thread, between two of its steps.

Every event loop of SGLang 0.4.9 to 0.5.23 calls ``self.get_next_batch_to_run`` once at the beginning of a step.
It is wrapped only while there is something to do: the assignment is the request, and when the work is done the
scheduler's thread puts the original back itself. No lock is involved: what the two threads share is a list,
whose ``pop`` decides who has the work.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

ATTRIBUTE = "get_next_batch_to_run"
_POLL_S = 0.002


class Work(Protocol):
    """Something to do in bounded pieces."""

    def step(self) -> bool:
        """Do a piece; True when nothing is left. What it raises ends it."""
        ...


class NoStep(Exception):
    """The scheduler did not come by in time; nothing was begun."""


class NoLoop(Exception):
    """The scheduler has no such function."""


def defining(kind: type) -> Any:
    """The class that defines the beginning of a step. Raises :class:`NoLoop`."""
    owner = next((c for c in kind.__mro__ if ATTRIBUTE in vars(c)), None)
    if owner is None:
        raise NoLoop(f"{kind.__name__} has no {ATTRIBUTE}")
    return owner


def meet(kind: type, timeout_s: float) -> Any:
    """The scheduler of class ``kind`` whose thread next begins a step. Raises :class:`NoStep`, :class:`NoLoop`."""
    owner = defining(kind)
    original = vars(owner)[ATTRIBUTE]
    came: list[Any] = []

    def restore() -> None:
        if vars(owner).get(ATTRIBUTE) is passing:
            setattr(owner, ATTRIBUTE, original)

    @functools.wraps(original)
    def passing(*args: Any, **kwargs: Any) -> Any:
        came.extend(args[:1])
        restore()
        return original(*args, **kwargs)

    setattr(owner, ATTRIBUTE, passing)
    deadline = time.monotonic() + timeout_s
    while not came and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    restore()
    if not came:
        raise NoStep(f"the scheduler did not begin a step in {timeout_s:.0f} s")
    return came[0]


class Stepper:
    """One piece of work for one scheduler. Used once."""

    def __init__(self, scheduler: Any, work: Work) -> None:
        self._scheduler = scheduler
        self._offered: list[Work] = [work]
        self._running: Work | None = None
        self.begun = False
        self.done = False
        self.error: BaseException | None = None
        self._owner = defining(type(scheduler))
        self._original: Any = vars(self._owner)[ATTRIBUTE]
        self._wrapper = self._wrap(self._original)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step_first(*args: Any, **kwargs: Any) -> Any:
            if not self.done and args and args[0] is self._scheduler:
                self._advance()
            return original(*args, **kwargs)

        return step_first

    def _advance(self) -> None:
        """On the scheduler's thread. Never raises."""
        try:
            if self._running is None:
                self._running = self._offered.pop()
                self.begun = True
            finished = self._running.step()
        except IndexError as error:
            if self.begun:
                self._end(error)
        except Exception as error:
            self._end(error)
        else:
            if finished:
                self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self.error = error
        self._restore()
        self._running = self._scheduler = None
        self.done = True

    def _restore(self) -> None:
        if vars(self._owner).get(ATTRIBUTE) is self._wrapper:
            setattr(self._owner, ATTRIBUTE, self._original)

    # --- on the thread that asks ---------------------------------------------------------------------

    def offer(self, timeout_s: float) -> None:
        """Ask, and wait until the scheduler has begun. Raises :class:`NoStep` when it does not."""
        setattr(self._owner, ATTRIBUTE, self._wrapper)
        if self._wait(lambda: self.begun, timeout_s):
            return
        try:
            self._offered.pop()
        except IndexError:
            return  # It came by just now.
        self._restore()
        raise NoStep(f"the scheduler did not begin a step in {timeout_s:.0f} s")

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready``, or the work has ended; whether that was in time."""
        return self._wait(lambda: self.done or ready(), timeout_s)

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True
