"""Wait for the scheduler of this process, and open the control socket beside it."""

from __future__ import annotations

import functools
import logging
import sys
import types
from typing import Any

from kvwitness.patches.config import Config
from kvwitness.patches.install import AfterImport
from kvwitness.patches.standby.listener import Listener

logger = logging.getLogger("kvwitness")

MODULE = "sglang.srt.managers.scheduler"
_CLASS = "Scheduler"

_waiting: SchedulerWatch | None = None


class SchedulerWatch:
    """Wraps the scheduler's constructor until it is called for the first time."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._finder: AfterImport | None = None

    def start(self) -> None:
        module = sys.modules.get(MODULE)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            self.imported(module)
        else:
            self._finder = AfterImport(self)
            sys.meta_path.insert(0, self._finder)

    def waits_for(self, name: str) -> bool:
        """Whether the import of module ``name`` is waited for."""
        return self._finder is not None and name == MODULE

    def imported(self, module: types.ModuleType) -> None:
        """The module is there: wrap the constructor."""
        if self._finder is not None:
            sys.meta_path.remove(self._finder)
            self._finder = None
        owner: Any = getattr(module, _CLASS)
        original = vars(owner)["__init__"]
        config = self._config

        @functools.wraps(original)
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if vars(owner).get("__init__") is init:
                owner.__init__ = original
            listener = _listen(config)
            original(scheduler, *args, **kwargs)
            if listener is not None:
                listener.ready(scheduler)

        owner.__init__ = init


def _listen(config: Config) -> Listener | None:
    listener = Listener(config)
    try:
        listener.start()
    except Exception as error:
        logger.warning("kvwitness cannot be attached to this process: %s", error)
        return None
    return listener


def stand_by(config: Config) -> None:
    """Set the standby of this process up, once."""
    global _waiting
    if _waiting is None:
        _waiting = SchedulerWatch(config)
        _waiting.start()


def is_waiting() -> bool:
    """Whether this process is on standby."""
    return _waiting is not None
