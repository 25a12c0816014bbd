"""The HiCache controller of SGLang 0.5.22 and 0.5.23: which host slots were written and read, and when.

Host slot indices are CPU tensors and do not depend on the tree core: they are the identity that the chain
of evidence rests on. All methods run on the scheduler thread; copies are asynchronous on streams, so
completion is what the scheduler's own polling of the finish events sees.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import UNIFIED, Args, Hook, Kwargs, argument
from kvwitness.patches.schema.events import (
    BackupAcked,
    BackupQueued,
    BackupRejected,
    Direction,
    LoadDone,
    LoadQueued,
    Tail,
    TransferStarted,
)
from kvwitness.patches.witness import Witness

BASE = "sglang.srt.managers.cache_controller"
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
TREE = "sglang.srt.mem_cache.unified_radix_cache"


def _after_write(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    controller = args[0]
    tokens = len(argument(args, kwargs, 1, "device_indices"))
    if controller is not w.controller or tokens == 0:
        return
    node = int(argument(args, kwargs, 3, "node_id", -1))
    req = w.req_id(w.current_req())
    if result is None:
        w.emit(BackupRejected, req, node, tokens, int(controller.mem_pool_host.available_size()))
        return
    start, end = w.span_of(node)
    w.emit(BackupQueued, req, node, start, end, tokens, int(bool(w.evict_calls)), tail=w.slot_runs(result))


def _after_load(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if args[0] is not w.controller:
        return
    attempt = w.loading
    if attempt is not None:
        attempt.load_called = True
        attempt.load_failed = result is None
    slots = argument(args, kwargs, 1, "host_indices")
    tokens = len(slots)
    if result is None or tokens == 0:
        return
    node = int(argument(args, kwargs, 3, "node_id", -1))
    # The tree loads the evicted end of the path: the positions are the last ones before the anchor's end.
    end = w.span_of(node)[1]
    start = end - tokens if end >= 0 else -1
    req = w.req_id(attempt.req if attempt is not None else None)
    w.emit(LoadQueued, req, node, start, end, tokens, tail=w.slot_runs(slots))


def _enter_start_writing(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    return args[0].ack_write_queue[-1] if args[0].ack_write_queue else None


def _after_start_writing(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    queue = args[0].ack_write_queue
    if not queue or queue[-1] is token:
        return
    ack = queue[-1]
    transfer = _started(w, ack, Direction.D2H)
    for node in ack.node_ids:
        w.transfer_of_write[node] = (transfer, ack)


def _enter_start_loading(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    return args[0].ack_load_queue[-1] if args[0].ack_load_queue else None


def _after_start_loading(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    queue = args[0].ack_load_queue
    if queue and queue[-1] is not token:
        ack = queue[-1]
        w.transfer_of_load[id(ack)] = (_started(w, ack, Direction.H2D), ack)


def _started(w: Witness, ack: Any, direction: int) -> int:
    transfer = w.next_transfer()
    w.emit(
        TransferStarted,
        transfer,
        direction,
        int(ack.num_tokens),
        int(ack.num_bytes),
        int(ack.timing_enabled),
        tail=Tail.ints(ack.node_ids),
    )
    return transfer


def _duration_ns(ack: Any) -> int:
    """Device time of the copies of a completed transfer; -1 where the device's events have no timing."""
    if not ack.timing_enabled:
        return -1
    return int(ack.start_event.elapsed_time(ack.finish_event) * 1e6)


def _after_write_ack(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    node = int(argument(args, kwargs, 1, "ack_id"))
    transfer, ack = w.transfer_of_write.pop(node, (0, None))
    w.emit(BackupAcked, transfer, node, -1 if ack is None else _duration_ns(ack))


def _enter_loading_check(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    controller = args[0].cache_controller
    queue = controller.ack_load_queue if controller is not None else None
    return list(queue) if queue else None


def _after_loading_check(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if token is None:
        return
    left = {id(ack) for ack in args[0].cache_controller.ack_load_queue}
    for ack in token:
        if id(ack) in left:
            continue
        transfer, _ = w.transfer_of_load.pop(id(ack), (0, None))
        w.emit(
            LoadDone,
            transfer,
            int(ack.num_tokens),
            int(ack.num_bytes),
            _duration_ns(ack),
            tail=Tail.ints(ack.node_ids),
        )


def _controller(attribute: str, module: str, owner: str, parameters: str, link: str, **observers: Any) -> Hook:
    return Hook(
        name=f"controller.{attribute}",
        module=module,
        owner=owner,
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=(link,),
        family=UNIFIED,
        **observers,
    )


HOOKS: tuple[Hook, ...] = (
    _controller(
        "write", HYBRID, "HybridCacheController", "device_indices priority node_id", "backed_up", seen=_after_write
    ),
    _controller("load", HYBRID, "HybridCacheController", "host_indices priority node_id", "read", seen=_after_load),
    _controller(
        "start_writing",
        BASE,
        "HiCacheController",
        "",
        "backed_up",
        enter=_enter_start_writing,
        seen=_after_start_writing,
    ),
    _controller(
        "start_loading",
        BASE,
        "HiCacheController",
        "",
        "read",
        enter=_enter_start_loading,
        seen=_after_start_loading,
    ),
    Hook(
        name="tree.finish_write_through_ack",
        module=TREE,
        owner="UnifiedRadixCache",
        attribute="_finish_write_through_ack",
        parameters=("self", "ack_id"),
        links=("backed_up",),
        family=UNIFIED,
        seen=_after_write_ack,
    ),
    Hook(
        name="tree.loading_check",
        module=TREE,
        owner="UnifiedRadixCache",
        attribute="loading_check",
        parameters=("self",),
        links=("read",),
        family=UNIFIED,
        enter=_enter_loading_check,
        seen=_after_loading_check,
    ),
)
