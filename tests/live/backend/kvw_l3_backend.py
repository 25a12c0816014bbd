"""A storage class for HiCache's backend ``dynamic``: the file backend, with defects that a file asks for.

The file named by KVW_L3_FAIL holds words: ``look-up``, ``read``, ``write``. Each makes that call raise.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile


class Backend(HiCacheFile):
    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        super().__init__(storage_config, os.environ["KVW_L3_FOLDER"])

    def _may(self, what: str) -> None:
        asked = Path(os.environ["KVW_L3_FAIL"])
        if asked.exists() and what in asked.read_text().split():
            raise OSError(f"{what} refused on purpose")

    def batch_exists(self, *args: Any, **kwargs: Any) -> Any:
        self._may("look-up")
        return super().batch_exists(*args, **kwargs)

    def batch_get(self, *args: Any, **kwargs: Any) -> Any:
        self._may("read")
        return super().batch_get(*args, **kwargs)

    def batch_set(self, *args: Any, **kwargs: Any) -> Any:
        self._may("write")
        return super().batch_set(*args, **kwargs)
