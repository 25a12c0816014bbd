"""Where the stand keeps what it builds. Never inside a checkout: it is large and shared by checkouts."""

from __future__ import annotations

import os
from pathlib import Path

HOME_VARIABLE = "KVWITNESS_STAND_HOME"


def stand_home() -> Path:
    """The folder that holds every environment, model and stand path.

    `KVWITNESS_STAND_HOME` if set, else `$XDG_CACHE_HOME/kvwitness/stand`, else
    `~/.cache/kvwitness/stand`. It may not exist yet.
    """
    explicit = os.environ.get(HOME_VARIABLE)
    if explicit:
        return Path(explicit).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    base = Path(cache) if cache else Path.home() / ".cache"
    return base.expanduser().absolute() / "kvwitness" / "stand"
