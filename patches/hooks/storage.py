"""L3 (storage) of SGLang 0.5.22 and 0.5.23, as far as the scheduler thread sees it.

The reads and writes themselves run on the controller's threads; their outcome is handed to the scheduler
thread, where these hooks stand.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import UNIFIED, Args, Hook, Kwargs, argument
from kvwitness.patches.schema.events import (
    PrefetchAsked,
    PrefetchDone,
    PrefetchRevoked,
    StorageBackupQueued,
    StorageChanged,
)
from kvwitness.patches.witness import Witness

MODULE = "sglang.srt.mem_cache.unified_radix_cache"


def _after_asked(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    tree = args[0]
    if not tree.enable_storage:
        return
    handle = argument(args, kwargs, 1, "request")
    node = int(argument(args, kwargs, 2, "last_host_node_id"))
    tokens = len(argument(args, kwargs, 3, "new_input_tokens"))
    start = len(argument(args, kwargs, 6, "matched_prefix_tokens") or ())
    issued = handle in tree.ongoing_prefetch
    w.emit(PrefetchAsked, w.text(handle.rid), node, start, tokens, int(issued))


def _enter_result(w: Witness, args: Args, kwargs: Kwargs) -> tuple[int, int, int, bytes]:
    operation = argument(args, kwargs, 1, "operation")
    completed = int(operation.completed_tokens)
    slots = w.slot_runs(operation.host_indices[:completed])
    return int(operation.storage_start), completed, int(operation.deadline_expired), slots


def _after_result(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    start, completed, deadline, slots = token
    handle = argument(args, kwargs, 1, "operation").handle
    loaded = int(args[0].prefetch_loaded_tokens_by_reqid.get(handle, 0))
    existing = completed - loaded if loaded else 0
    w.emit(PrefetchDone, w.text(handle.rid), start, completed, existing, loaded, deadline, tail=slots)


def _after_revoked(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    handle = argument(args, kwargs, 1, "request")
    w.emit(PrefetchRevoked, w.text(handle.rid), w.text("revoked before any page was read"))


def _after_storage_backup(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if args[0].enable_storage:
        node = int(argument(args, kwargs, 1, "node_id"))
        start, end = w.span_of(node)
        w.emit(StorageBackupQueued, node, end - start)


def _after_attach(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    w.emit(StorageChanged, 1, int(bool(result[0])), tail=str(result[1]).encode()[:500])


def _after_detach(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    w.emit(StorageChanged, 0, int(bool(result[0])), tail=str(result[1]).encode()[:500])


def _hook(attribute: str, parameters: str, links: tuple[str, ...], **observers: Any) -> Hook:
    return Hook(
        name=f"storage.{attribute.lstrip('_')}",
        module=MODULE,
        owner="UnifiedRadixCache",
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=links,
        family=UNIFIED,
        **observers,
    )


HOOKS: tuple[Hook, ...] = (
    _hook(
        "prefetch_from_storage",
        "request last_host_node_id new_input_tokens last_hash prefix_keys matched_prefix_tokens",
        ("prefetched",),
        seen=_after_asked,
    ),
    _hook("_handle_prefetch_result", "operation", ("prefetched",), enter=_enter_result, seen=_after_result),
    _hook("revoke_pending_prefetch", "request", (), seen=_after_revoked),
    _hook("write_backup_storage", "node_id", (), seen=_after_storage_backup),
    _hook("attach_storage_backend", "storage_backend", (), seen=_after_attach),
    _hook("detach_storage_backend", "", (), seen=_after_detach),
)
