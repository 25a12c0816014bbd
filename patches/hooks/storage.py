"""L3 (storage), as the scheduler thread sees it: HiRadixCache 0.4.10 to 0.5.18, UnifiedRadixCache 0.5.17 and newer.

The reads and writes themselves run on the controller's threads, and their outcome is handed to the scheduler
thread, where these hooks stand. What goes wrong on those threads: :mod:`kvwitness.patches.hooks.storage_threads`.

Both families share what they say. UnifiedRadixCache hands over the whole operation, since 0.5.20 with a handle of the
request. HiRadixCache and UnifiedRadixCache of 0.5.17 and 0.5.18 name requests by id and put what was read into the tree
within ``check_prefetch_progress``.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import COMMON, HIRADIX, NOTHING, UNIFIED, Args, Hook, Kwargs, argument
from kvwitness.patches.schema.events import (
    PrefetchAsked,
    PrefetchDone,
    PrefetchRevoked,
    PrefetchStopped,
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


def _enter_result(w: Witness, args: Args, kwargs: Kwargs) -> tuple[Any, str, int, int, int, bytes]:
    operation = argument(args, kwargs, 1, "operation")
    handle = getattr(operation, "handle", None)
    rid = operation.request_id if handle is None else handle.rid
    request = rid if handle is None else handle
    stopped = w.prefetching == request and _stopped(w, args[0], rid, operation)
    late = getattr(operation, "deadline_expired", stopped and args[0].prefetch_stop_policy == "timeout")
    start = w.storage_starts.pop(rid, 0) if handle is None else operation.storage_start
    completed = int(operation.completed_tokens)
    slots = w.slot_runs(operation.host_indices[:completed])
    return request, rid, int(start), completed, int(late), slots


def _after_result(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    request, rid, start, completed, late, slots = token
    loaded = _loaded(args[0], request)
    existing = completed - loaded if loaded else 0
    w.emit(PrefetchDone, w.text(rid), start, completed, existing, loaded, late, tail=slots)


def _loaded(tree: Any, request: Any) -> int:
    """Tokens that the request's prefetch has put into L2."""
    return int(tree.prefetch_loaded_tokens_by_reqid.get(request, 0))


def _after_synced(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    """0.5.17 and 0.5.18: so many of the tokens that were read go into the tree; None: all of them are given up."""
    if result is None or args[0] is not w.tree or w.prefetching != argument(args, kwargs, 1, "req_id"):
        return
    slots = argument(args, kwargs, 5, "host_indices")[: int(result)]
    w.host_inserted = int(result), -1, w.slot_runs(slots)


def _enter_check(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    return _checking(w, args[0], argument(args, kwargs, 1, "request"))


def _enter_revoked(w: Witness, args: Args, kwargs: Kwargs) -> None:
    handle: Any = argument(args, kwargs, 1, "request")
    info = args[0].ongoing_prefetch.get(handle)
    if info is not None:
        _revoked(w, args[0], handle.rid, info.operation, w.prefetching == handle)


# --- by request id ------------------------------------------------------------------------------------


def _after_asked_by_id(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    tree = args[0]
    if not tree.enable_storage:
        return
    rid = argument(args, kwargs, 1, "req_id")
    node: Any = args[2] if len(args) > 2 else kwargs.get("last_host_node", kwargs.get("last_host_node_id"))
    start = max(w.span_of(node)[1], 0)
    tokens, issued = len(argument(args, kwargs, 3, "new_input_tokens")), rid in tree.ongoing_prefetch
    if issued:
        w.storage_starts[rid] = start
    number = node if isinstance(node, int) else int(node.id)
    w.emit(PrefetchAsked, w.text(rid), number, start, tokens, int(issued))


def _enter_check_by_id(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    return _checking(w, args[0], argument(args, kwargs, 1, "req_id"))


def _checking(w: Witness, tree: Any, request: Any) -> Any:
    """The tree looks whether the request's prefetch may end now."""
    if tree is not w.tree or request not in tree.ongoing_prefetch:
        return NOTHING
    before, w.prefetching = w.prefetching, request
    info = tree.ongoing_prefetch[request]
    operation = _operation(info)
    # Read as it is: SGLang's own question takes a lock that its storage threads hold at times.
    w.prefetch_ended = bool(getattr(operation, "_terminated_flag", getattr(operation, "_done_flag", False)))
    w.host_inserted = None
    return before, request, operation


def _operation(info: Any) -> Any:
    """HiRadixCache keeps tuples whose last is the operation, of three or four parts."""
    return info.operation if hasattr(info, "operation") else info[-1]


def _leave_check(w: Witness, token: Any) -> None:
    w.prefetching = token[0]


def _after_check_by_id(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    _, rid, operation = token
    tree = args[0]
    if rid in tree.ongoing_prefetch:
        return
    start = w.storage_starts.pop(rid, 0)
    inserted, w.host_inserted = w.host_inserted, None
    if inserted is None:
        if not (hasattr(tree, "_revoke_pending_prefetch") or hasattr(tree, "revoke_pending_prefetch")):
            _revoked(w, tree, rid, operation, checking=True)
        return
    completed, existing, slots = inserted
    if existing < 0:
        loaded = _loaded(tree, rid)
        existing = completed - loaded if loaded else 0
    stopped = _stopped(w, tree, rid, operation, completed)
    late = int(stopped and tree.prefetch_stop_policy == "timeout")
    w.emit(PrefetchDone, w.text(rid), start, completed, existing, completed - existing, late, tail=slots)


def _after_host_insert(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if w.prefetching is not None and args[0] is w.tree:
        slots = argument(args, kwargs, 3, "host_value")
        w.host_inserted = len(slots), int(result), w.slot_runs(slots)


def _enter_revoked_by_id(w: Witness, args: Args, kwargs: Kwargs) -> None:
    rid = argument(args, kwargs, 1, "req_id")
    info = args[0].ongoing_prefetch.get(rid)
    if info is not None:
        w.storage_starts.pop(rid, None)
        _revoked(w, args[0], rid, _operation(info), w.prefetching == rid)


def _stopped(w: Witness, tree: Any, rid: str, operation: Any, completed: int | None = None) -> bool:
    """The tree looks whether the prefetch may end, and ends it: had it come to its end, or does the policy say so?"""
    policy = tree.prefetch_stop_policy
    if w.prefetch_ended or policy == "wait_complete":
        return False
    found = _found(w, operation)
    read = int(operation.completed_tokens if completed is None else completed)
    if found and read >= found:
        return False
    w.emit(PrefetchStopped, w.text(rid), w.text(str(policy)), found, read)
    return True


def _found(w: Witness, operation: Any) -> int:
    return len(getattr(operation, "hash_value", None) or ()) * w.page_size


def _revoked(w: Witness, tree: Any, rid: str, operation: Any, checking: bool) -> None:
    stopped = checking and _stopped(w, tree, rid, operation)
    w.emit(PrefetchRevoked, w.text(rid), w.text(_why_revoked(w, tree, operation, stopped)))


def _why_revoked(w: Witness, tree: Any, operation: Any, stopped: bool) -> str:
    """SGLang gives no reason: it ended because the policy said so, or because too little was found."""
    if stopped:
        return f"cut short by the prefetch policy {tree.prefetch_stop_policy}"
    hit = _found(w, operation)
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
    module: str,
    owner: str,
    family: str,
    attribute: str,
    parameters: str,
    link: str = "",
    name: str = "",
    bound: bool = False,
    **observers: Any,
) -> Hook:
    return Hook(
        name=f"storage.{name or attribute.lstrip('_')}",
        module=module,
        owner=owner,
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=(link,) if link else (),
        family=family,
        bound=bound,
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
    # 0.5.17 to 0.5.19.
    _unified(
        "prefetch_from_storage",
        "req_id last_host_node_id new_input_tokens last_hash prefix_keys",
        "prefetched",
        seen=_after_asked_by_id,
    ),
    _unified(
        "_sync_and_check_hybrid_prefetch_result",
        "req_id operation completed_tokens hash_value host_indices last_host_node_id anchor_lock_params prefetch_key",
        "prefetched",
        name="handle_prefetch_result",
        seen=_after_synced,
    ),
    _unified(
        "check_prefetch_progress", "req_id", enter=_enter_check_by_id, leave=_leave_check, seen=_after_check_by_id
    ),
    _unified("_revoke_pending_prefetch", "req_id", enter=_enter_revoked_by_id),
    _unified("revoke_pending_prefetch", "req_id", enter=_enter_revoked_by_id),
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
    *(
        _hook(SCHEDULER, "Scheduler", COMMON, f"{what}_hicache_storage_wrapped", "recv_req", bound=True, seen=seen)
        for what, seen in (("attach", _after_attach), ("detach", _after_detach))
    ),
)
