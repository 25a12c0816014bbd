"""L3 (storage): what the controller's storage threads found, and what raised there. SGLang 0.4.10 and newer.

SGLang logs an exception on these threads and goes on as if nothing had been found (0.5.22 and newer), or the thread
ends without a word (before). Either way the request is answered, and only these events say why its prefix was not
read from storage. External backends (mooncake, hf3fs, nixl, aibrix, dynamic) are called through the same methods.

All of it is recorded from the thread that it happens on. Nothing of the operation is kept.
"""

from __future__ import annotations

import sys
from typing import Any

from kvwitness.patches.contract import Args, Hook, Kwargs, argument
from kvwitness.patches.schema.events import StorageBackedUp, StorageFailed, StorageLookedUp, StorageWork
from kvwitness.patches.witness import Witness

BASE = ("sglang.srt.managers.cache_controller", "HiCacheController")
HYBRID = ("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller", "HybridCacheController")

_BATCH = "batch_hashes batch_host_indices extra_info kv_derived_transfers"


def _rid(operation: Any) -> str:
    """The request that a prefetch is for; a backup is for none."""
    return str(getattr(operation, "request_id", ""))


def _observers(work: int) -> dict[str, Any]:
    def enter(w: Witness, args: Args, kwargs: Kwargs) -> tuple[Any, Any, Any]:
        return args[0], argument(args, kwargs, 1, "operation"), sys.exc_info()[1]

    def leave(w: Witness, token: Any) -> None:
        controller, operation, before = token
        raised = sys.exc_info()[1]
        if raised is None or raised is before or controller is not w.controller:
            return
        rid = _rid(operation)
        text = f"{type(raised).__name__}: {raised}"[:300]
        w.emit(StorageFailed, work, w.text(rid) if rid else 0, tail=text.encode("utf-8", "replace"))

    return {"enter": enter, "leave": leave}


def _after_query(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if token[0] is w.controller:
        rid = _rid(token[1])
        w.emit(StorageLookedUp, w.text(rid) if rid else 0, int(result[1]))


def _after_backup(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if token[0] is w.controller:
        operation = token[1]
        asked = len(getattr(operation, "hash_value", None) or ()) * w.page_size
        w.emit(StorageBackedUp, asked, int(operation.completed_tokens))


def _hook(place: tuple[str, str], attribute: str, parameters: str, work: int, **observers: Any) -> Hook:
    return Hook(
        name=f"storage.{attribute.lstrip('_')}",
        module=place[0],
        owner=place[1],
        attribute=attribute,
        parameters=("self", "operation", *parameters.split()),
        links=(),
        **_observers(work),
        **observers,
    )


HOOKS: tuple[Hook, ...] = (
    *(_hook(place, "_storage_hit_query", "", StorageWork.LOOK_UP, seen=_after_query) for place in (BASE, HYBRID)),
    # Where there is a batch below it, the transfer itself catches what that raises.
    _hook(BASE, "_page_transfer", "", StorageWork.READ),
    _hook(BASE, "_page_transfer_kv_batch", _BATCH, StorageWork.READ),
    _hook(BASE, "_page_backup", "", StorageWork.WRITE, seen=_after_backup),
)
