"""The way into a scheduler that was started without kvwitness: its side, once something was injected.

Runs on a thread of its own that ends when the control socket is there. From then on everything goes as on
standby, but that the socket and its thread end with the attachment.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from kvwitness.patches.config import Config, Faults
from kvwitness.patches.install import installed
from kvwitness.patches.schema.control import Problem
from kvwitness.patches.standby import wait
from kvwitness.patches.standby.listener import Listener
from kvwitness.patches.standby.step import NoLoop, NoStep, meet

SOURCE = ""
"""Which state of the source files this process has loaded; set by the bootstrap."""
_CONSTRUCTOR = "Scheduler.__init__"
_STEP_S = 15.0

_listener: Listener | None = None


def is_in() -> bool:
    """Whether a control socket that came in here is open."""
    return _listener is not None and _listener.listening


def enter(settings: dict[str, Any]) -> dict[str, Any]:
    """Open a control socket for the scheduler of this process; what came of it.

    ``settings``: ``directory`` (the data folder) and ``quota_bytes``. Nothing of SGLang is changed when this
    returns; while it waits for the scheduler to come by, the beginning of its step is wrapped.
    """
    global _listener
    if is_in():
        return _refuse(Problem.OTHERS, "kvwitness is in it already")
    if installed() is not None:
        return _refuse(Problem.OTHERS, "it records since it was started")
    if wait.is_waiting():
        return _refuse(Problem.OTHERS, "it is on standby")
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return _refuse(Problem.FAILED, "its Python runs without the GIL")
    module = sys.modules.get(wait.MODULE)
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return _refuse(Problem.NO_SCHEDULER, "no scheduler of SGLang is loaded in it")
    if _is_being_constructed():
        return _refuse(Problem.STARTING, "it is still starting (loading the model, making the pools)")
    config = Config(Path(settings["directory"]), settings["quota_bytes"], Faults(), standby=True)
    try:
        scheduler = meet(module.Scheduler, _STEP_S)
    except NoStep as error:
        if _is_being_constructed():
            return _refuse(Problem.STARTING, "it is still starting (loading the model, making the pools)")
        return _refuse(Problem.NO_STEP, str(error))
    except NoLoop as error:
        return _refuse(Problem.UNKNOWN_TREE, str(error))
    listener = Listener(config, stays=False)
    try:
        listener.start()
    except OSError as error:
        return _refuse(Problem.NO_JOURNAL, str(error))
    listener.ready(scheduler)
    _listener = listener
    return {"ok": True, "socket": listener.path}


def _is_being_constructed() -> bool:
    """Whether the main thread is inside the scheduler's constructor (names of functions alone are looked at)."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_qualname == _CONSTRUCTOR:
            return True
        frame = frame.f_back
    return False


def _refuse(problem: str, text: str) -> dict[str, Any]:
    return {"ok": False, "problem": problem, "error": text}
