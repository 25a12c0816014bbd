"""L3 (storage), as far as the scheduler thread sees it: SGLang 0.5.22 and newer, and HiRadixCache of 0.4.10 to 0.5.18.

The reads and writes themselves run on the controller's threads, and their outcome is handed to the scheduler
thread, where these hooks stand. What goes wrong on those threads: :mod:`kvwitness.patches.hooks.storage_threads`.

Both families share what they say. UnifiedRadixCache names requests by handles and hands over the whole operation;
HiRadixCache names them by id and inserts what was read within ``check_prefetch_progress``.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import COMMON, HIRADIX, NOTHING, UNIFIED, Args, Hook, Kwargs, argument
from kvwitness.patches.schema.events import (
    PrefetchAsked,
    PrefetchDone,
    PrefetchRevoked,
    StorageBackupQueued,
    StorageChanged,
)
from kvwitness.patches.witness import Witness

UNIFIED_TREE = "sglang.srt.mem_cache.unified_radix_cache"
HIRADIX_TREE = "sglang.srt.mem_cache.hiradix_cache"
SCHEDULER = "sglang.srt.managers.scheduler"

# --- UnifiedRadixCache -------------------------------------------------------------------------------


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


def _enter_check(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    return _checking(w, args[0], argument(args, kwargs, 1, "request"))


def _enter_revoked(w: Witness, args: Args, kwargs: Kwargs) -> None:
    handle = argument(args, kwargs, 1, "request")
    info = args[0].ongoing_prefetch.get(handle)
    if info is not None:
        _revoked(w, args[0], handle.rid, info.operation)


# --- HiRadixCache ------------------------------------------------------------------------------------


def _after_asked_by_id(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    tree = args[0]
    if not tree.enable_storage:
        return
    rid = argument(args, kwargs, 1, "req_id")
    node = argument(args, kwargs, 2, "last_host_node")
    start = max(w.span_of(node)[1], 0)
    tokens, issued = len(argument(args, kwargs, 3, "new_input_tokens")), rid in tree.ongoing_prefetch
    if issued:
        w.storage_starts[rid] = start
    w.emit(PrefetchAsked, w.text(rid), int(node.id), start, tokens, int(issued))


def _enter_check_by_id(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    return _checking(w, args[0], argument(args, kwargs, 1, "req_id"))


def _checking(w: Witness, tree: Any, request: Any) -> Any:
    """The tree looks whether the request's prefetch may end now."""
    if tree is not w.tree or request not in tree.ongoing_prefetch:
        return NOTHING
    before, w.prefetching = w.prefetching, request
    w.host_inserted = None
    return before, request, tree.ongoing_prefetch[request]


def _leave_check(w: Witness, token: Any) -> None:
    w.prefetching = token[0]


def _after_check_by_id(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    _, rid, info = token
    if rid in args[0].ongoing_prefetch:
        return
    start = w.storage_starts.pop(rid, 0)
    inserted, w.host_inserted = w.host_inserted, None
    if inserted is None:
        if not hasattr(args[0], "_revoke_pending_prefetch"):
            w.emit(PrefetchRevoked, w.text(rid), w.text(_why_revoked(w, args[0], info[2])))
        return
    completed, existing, slots = inserted
    hit = len(getattr(info[2], "hash_value", None) or ()) * w.page_size
    loaded = completed - existing
    w.emit(PrefetchDone, w.text(rid), start, completed, existing, loaded, int(completed < hit), tail=slots)


def _after_host_insert(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if w.prefetching is not None and args[0] is w.tree:
        slots = argument(args, kwargs, 3, "host_value")
        w.host_inserted = len(slots), int(result), w.slot_runs(slots)


def _enter_revoked_by_id(w: Witness, args: Args, kwargs: Kwargs) -> None:
    rid = argument(args, kwargs, 1, "req_id")
    info = args[0].ongoing_prefetch.get(rid)
    if info is not None:
        w.storage_starts.pop(rid, None)
        _revoked(w, args[0], rid, info[2])


def _revoked(w: Witness, tree: Any, rid: str, operation: Any) -> None:
    w.emit(PrefetchRevoked, w.text(rid), w.text(_why_revoked(w, tree, operation)))


def _why_revoked(w: Witness, tree: Any, operation: Any) -> str:
    """SGLang gives no reason: it ended because the policy said so, or because too little was found."""
    if w.prefetching is not None:
        return f"cut short by the prefetch policy {tree.prefetch_stop_policy}"
    hit = len(getattr(operation, "hash_value", None) or ()) * w.page_size
    threshold = getattr(tree, "prefetch_threshold", None)
    return f"the look-up found {hit} tokens (fewer than {threshold} are not fetched), or no host memory was free"


# --- both --------------------------------------------------------------------------------------------


def _after_storage_backup(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if args[0].enable_storage:
        node: Any = args[1] if len(args) > 1 else next(iter(kwargs.values()))
        start, end = w.span_of(node)
        number = node if isinstance(node, int) else int(node.id)
        w.emit(StorageBackupQueued, number, end - start)


def _after_attach(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    asked = argument(args, kwargs, 1, "recv_req")
    policy = getattr(asked, "hicache_storage_prefetch_policy", None)
    policy = policy or getattr(getattr(args[0], "tree_cache", None), "prefetch_stop_policy", "unknown")
    text = f"{getattr(asked, 'hicache_storage_backend', None)} (prefetch policy {policy}): {result.message}"
    w.emit(StorageChanged, 1, int(bool(result.success)), tail=text.encode()[:500])


def _after_detach(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    w.emit(StorageChanged, 0, int(bool(result.success)), tail=str(result.message).encode()[:500])


def _hook(
    module: str, owner: str, family: str, attribute: str, parameters: str, link: str = "", **observers: Any
) -> Hook:
    return Hook(
        name=f"storage.{attribute.lstrip('_')}",
        module=module,
        owner=owner,
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=(link,) if link else (),
        family=family,
        **observers,
    )


def _unified(attribute: str, parameters: str, link: str = "", **observers: Any) -> Hook:
    return _hook(UNIFIED_TREE, "UnifiedRadixCache", UNIFIED, attribute, parameters, link, **observers)


def _hiradix(attribute: str, parameters: str, link: str = "", **observers: Any) -> Hook:
    return _hook(HIRADIX_TREE, "HiRadixCache", HIRADIX, attribute, parameters, link, **observers)


HOOKS: tuple[Hook, ...] = (
    _unified(
        "prefetch_from_storage",
        "request last_host_node_id new_input_tokens last_hash prefix_keys matched_prefix_tokens",
        "prefetched",
        seen=_after_asked,
    ),
    _unified("_handle_prefetch_result", "operation", "prefetched", enter=_enter_result, seen=_after_result),
    _unified("check_prefetch_progress", "request", enter=_enter_check, leave=_leave_check),
    _unified("revoke_pending_prefetch", "request", enter=_enter_revoked),
    _unified("write_backup_storage", "node_id", seen=_after_storage_backup),
    _hiradix(
        "prefetch_from_storage",
        "req_id last_host_node new_input_tokens last_hash",
        "prefetched",
        seen=_after_asked_by_id,
    ),
    _hiradix(
        "check_prefetch_progress",
        "req_id",
        "prefetched",
        enter=_enter_check_by_id,
        leave=_leave_check,
        seen=_after_check_by_id,
    ),
    _hiradix("_insert_helper_host", "node key host_value hash_value", "prefetched", seen=_after_host_insert),
    _hiradix("_revoke_pending_prefetch", "req_id", enter=_enter_revoked_by_id),
    _hiradix("write_backup_storage", "node", seen=_after_storage_backup),
    # Every rank answers for itself; what the tree never heard of (not idle) is answered here, too.
    _hook(SCHEDULER, "Scheduler", COMMON, "attach_hicache_storage_wrapped", "recv_req", seen=_after_attach),
    _hook(SCHEDULER, "Scheduler", COMMON, "detach_hicache_storage_wrapped", "recv_req", seen=_after_detach),
)
