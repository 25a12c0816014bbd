"""A storage class for HiCache's backend ``dynamic``: the file backend, with defects that a file asks for.

The file named by KVW_L3_FAIL holds words: ``look-up``, ``read``, ``write``. Each makes that call raise. ``hold`` keeps
a transfer waiting for as long as the word is there, ``hold-tail`` one of fewer pages than SGLang reads at a time.
``refuse-DP1`` keeps the scheduler of that rank from getting a backend.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

AT_A_TIME = 128


class Backend(HiCacheFile):
    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        title = Path("/proc/self/cmdline").read_text()
        for rank in (0, 1):
            if f"DP{rank}" in title:
                self._may(f"refuse-DP{rank}")
        super().__init__(storage_config, os.environ["KVW_L3_FOLDER"])

    def _asked(self, what: str) -> bool:
        asked = Path(os.environ["KVW_L3_FAIL"])
        return asked.exists() and what in asked.read_text().split()

    def _may(self, what: str) -> None:
        if self._asked(what):
            raise OSError(f"{what} refused on purpose")

    def batch_exists(self, *args: Any, **kwargs: Any) -> Any:
        self._may("look-up")
        return super().batch_exists(*args, **kwargs)

    def batch_get(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        self._may("read")
        while self._asked("hold") or (self._asked("hold-tail") and len(keys) < AT_A_TIME):
            time.sleep(0.02)
        return super().batch_get(keys, *args, **kwargs)

    def batch_set(self, *args: Any, **kwargs: Any) -> Any:
        self._may("write")
        return super().batch_set(*args, **kwargs)
