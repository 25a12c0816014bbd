"""The HiCache controller: which host slots were written and read, and when. SGLang 0.5.2 to 0.5.23.

Host slot indices are CPU tensors and do not depend on the tree: they are the identity that the chain of
evidence rests on. All methods run on the scheduler thread; copies are asynchronous on streams, so
completion is what the scheduler's own polling of the finish events sees.

- 0.5.22 and newer submit backups merged, after ``write`` (``start_writing``); before, ``write`` submits at
  once, so that the launch is seen inside it and recorded after it.
- Acknowledgements carry tokens and bytes since 0.5.18. Before, tokens are those of the queued operations and
  bytes those of the copy functions that were called (:mod:`kvwitness.patches.hooks.copies`).
- Durations exist where the acknowledgement says that its events have timing (loads 0.5.16, both 0.5.18).

SGLang 0.4 copies in threads of the controller: :mod:`kvwitness.patches.hooks.threads`.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import HIRADIX, NOTHING, UNIFIED, UNIFIED_OBJ, Args, Hook, Kwargs, argument
from kvwitness.patches.hooks import copies, threads
from kvwitness.patches.hooks.hiradix import demote_staged
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
from kvwitness.patches.witness import Launch, Witness

BASE = "sglang.srt.managers.cache_controller"
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
UNIFIED_TREE = "sglang.srt.mem_cache.unified_radix_cache"
HIRADIX_TREE = "sglang.srt.mem_cache.hiradix_cache"

_OF_STATES = -1
"""In place of a transfer's number: there was no full-attention KV in it (recurrent states or window KV alone)."""


def _passes_through(w: Witness) -> bool:
    """Host memory keeps nothing (``--hicache-host-memory-mode buffer_only``): what is written there goes on to storage.

    Its copies have ids of their own, below zero, which the tree does not know.
    """
    return getattr(w.tree, "host_memory_mode", "cache") == "buffer_only"


# --- backup ------------------------------------------------------------------------------------------


def _enter_write(w: Witness, args: Args, kwargs: Kwargs) -> tuple[Any, list[Any]]:
    before, w.submissions = w.submissions, []
    return before, w.submissions


def _leave_write(w: Witness, token: Any) -> None:
    w.submissions = token[0]


def _after_write(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    controller = args[0]
    tokens = len(argument(args, kwargs, 1, "device_indices"))
    if controller is w.controller and tokens and not _passes_through(w):
        node = int(argument(args, kwargs, 3, "node_id", -1))
        req = w.req_id(w.current_req())
        if result is None:
            w.emit(BackupRejected, req, node, tokens, int(controller.mem_pool_host.available_size()))
        else:
            start, end = w.span_of(node)
            w.emit(BackupQueued, req, node, start, end, tokens, int(bool(w.evict_calls)), tail=w.slot_runs(result))
            threads.write_handed_over(w, node, tokens)
    # What was launched inside is recorded now that it is known what for.
    for launch in token[1]:
        _write_started(w, launch)


def _enter_start_writing(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    controller = args[0]
    if not controller.write_queue or _passes_through(w):
        return NOTHING
    copies.forget(w, Direction.D2H)
    if w.digester is not None and controller is w.controller:
        w.digester.queued(Direction.D2H, controller.write_queue)
    return (controller.ack_write_queue[-1] if controller.ack_write_queue else None), _waiting(controller.write_queue)


def _after_start_writing(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    last, waiting = token
    queue = args[0].ack_write_queue
    if not queue or queue[-1] is last or args[0] is not w.controller:
        return
    ack = queue[-1]
    if w.digester is not None:
        w.digester.launched(ack)
    launch = _launch(w, ack, Direction.D2H, *waiting)
    if w.submissions is not None:
        w.submissions.append(launch)
    else:
        _write_started(w, launch)


def _write_started(w: Witness, launch: Launch) -> None:
    ack = launch.ack
    for node in ack.node_ids:
        w.transfer_of_write[node] = (_OF_STATES, ack)
    if launch.tokens:
        transfer = _started(w, Direction.D2H, launch)
        for node in launch.nodes:
            w.transfer_of_write[node] = (transfer, ack)


# --- load --------------------------------------------------------------------------------------------


def _after_load(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if args[0] is not w.controller:
        return
    attempt = w.loading
    slots = argument(args, kwargs, 1, "host_indices")
    tokens = len(slots)
    if attempt is not None:
        attempt.load_called = True
        attempt.load_failed = result is None
        attempt.wanted = attempt.wanted or tokens
    if result is None or tokens == 0:
        return
    node = int(argument(args, kwargs, 3, "node_id", -1))
    if _passes_through(w):
        # From storage: it continues what the request has in L1.
        plan = getattr(attempt.req, "staged_prefetch_plan", None) if attempt is not None else None
        start = -1 if plan is None else int(plan.device_prefix_len)
        end = start + tokens if start >= 0 else -1
    else:
        # The tree loads the evicted end of the path: the positions are the last ones before the anchor's end.
        end = w.span_of(node)[1]
        start = end - tokens if end >= 0 else -1
    req = w.req_id(attempt.req if attempt is not None else None)
    w.emit(LoadQueued, req, node, start, end, tokens, tail=w.slot_runs(slots))
    threads.load_queued(w, node, tokens)


def _enter_start_loading(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    controller = args[0]
    if not controller.load_queue:
        return NOTHING
    copies.forget(w, Direction.H2D)
    if w.digester is not None and controller is w.controller:
        w.digester.queued(Direction.H2D, controller.load_queue)
    return (controller.ack_load_queue[-1] if controller.ack_load_queue else None), _waiting(controller.load_queue)


def _after_start_loading(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    last, waiting = token
    queue = args[0].ack_load_queue
    if queue and queue[-1] is not last and args[0] is w.controller:
        ack = queue[-1]
        if w.digester is not None:
            w.digester.launched(ack)
        launch = _launch(w, ack, Direction.H2D, *waiting)
        w.transfer_of_load[id(ack)] = (_started(w, Direction.H2D, launch) if launch.tokens else _OF_STATES, launch)


# --- launch and completion ---------------------------------------------------------------------------


def _waiting(operations: Any) -> tuple[int, list[int]]:
    """Tokens of full-attention KV in what waits, and the nodes of which there is none: they are no part of the claims.

    A hybrid model's recurrent states, or its window KV, are also copied alone.
    """
    tokens, without = 0, []
    for operation in operations:
        size = len(operation.device_indices)
        tokens += size
        if not size:
            without += operation.node_ids
    return tokens, without


def _launch(w: Witness, ack: Any, direction: int, waiting: int, without: list[int]) -> Launch:
    tokens = int(getattr(ack, "num_tokens", 0)) or waiting
    size = getattr(ack, "num_bytes", None)
    size = copies.bytes_called(w, direction) if size is None else int(size)
    nodes = [node for node in ack.node_ids if node not in without] if without else ack.node_ids
    return Launch(ack, nodes, tokens, size)


def _started(w: Witness, direction: int, launch: Launch) -> int:
    transfer = w.next_transfer()
    timed = int(getattr(launch.ack, "timing_enabled", False))
    w.emit(TransferStarted, transfer, direction, launch.tokens, launch.size, timed, tail=Tail.ints(launch.nodes))
    if w.digester is not None:
        w.digester.named(launch.ack, transfer)
    return transfer


def _duration_ns(ack: Any) -> int:
    """Device time of the copies of a completed transfer; -1 where the device's events have no timing."""
    if not getattr(ack, "timing_enabled", False):
        return -1
    return int(ack.start_event.elapsed_time(ack.finish_event) * 1e6)


def _write_acked(w: Witness, node: int) -> None:
    transfer, ack = w.transfer_of_write.pop(node, (0, None))
    if transfer == _OF_STATES or (not transfer and _passes_through(w)):
        return
    w.emit(BackupAcked, transfer, node, -1 if ack is None else _duration_ns(ack))


def _after_write_ack(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if w.family == UNIFIED:
        _write_acked(w, int(argument(args, kwargs, 1, "ack_id")))


def _enter_writing_check(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    if args[0] is not w.tree or w.family == UNIFIED:
        return NOTHING
    waiting = args[0].ongoing_write_through
    return list(waiting) if waiting else NOTHING


def _after_writing_check(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    left = args[0].ongoing_write_through
    for node in token:
        if node not in left:
            _write_acked(w, node)
    if w.staged and argument(args, kwargs, 1, "write_back", False):
        demote_staged(w)


def _enter_loading_check(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    tree = args[0]
    controller = tree.cache_controller
    if controller is None or tree is not w.tree:
        return NOTHING
    if not controller.ack_load_queue:  # an empty list; the queue of SGLang 0.4 is always true
        return NOTHING
    waiting = tree.ongoing_load_back if threads.in_use(w) else controller.ack_load_queue
    return list(waiting) if waiting else NOTHING


def _after_loading_check(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if threads.in_use(w):
        threads.loads_acknowledged(w, [node for node in token if node not in args[0].ongoing_load_back])
        return
    left = {id(ack) for ack in args[0].cache_controller.ack_load_queue}
    for ack in token:
        if id(ack) in left:
            continue
        unseen = 0, Launch(ack, ack.node_ids, 0, 0)
        transfer, launch = w.transfer_of_load.pop(id(ack), unseen)
        if transfer == _OF_STATES:
            continue
        nodes = Tail.ints(launch.nodes)
        w.emit(LoadDone, transfer, launch.tokens, launch.size, _duration_ns(ack), tail=nodes)


# --- declarations ------------------------------------------------------------------------------------


def _controller(attribute: str, module: str, parameters: str, links: str, family: str, **observers: Any) -> Hook:
    return Hook(
        name=f"controller.{attribute}",
        module=module,
        owner="HybridCacheController" if module == HYBRID else "HiCacheController",
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=tuple(links.split()),
        family=family,
        **observers,
    )


def _of_class(module: str, family: str) -> tuple[Hook, ...]:
    """The methods of one of the two controller classes that a tree family uses.

    HiRadixCache uses the plain one, or the hybrid one for models with further pools (0.5.12 and newer).
    """
    writing = {"enter": _enter_write, "leave": _leave_write, "seen": _after_write}
    return (
        _controller("write", module, "device_indices priority node_id", "backed_up", family, **writing),
        _controller("load", module, "host_indices priority node_id", "read", family, seen=_after_load),
    )


def _launching(module: str, family: str) -> tuple[Hook, ...]:
    """Absent in SGLang 0.4, where threads launch; the hybrid controller has its own in 0.5.10 to 0.5.17.

    HiRadixCache's links do not rest on them by declaration: a launch that was not seen is missed by itself.
    """
    backed_up, read = ("content", "content") if family == HIRADIX else ("backed_up content", "read content")
    writing = {"enter": _enter_start_writing, "seen": _after_start_writing}
    loading = {"enter": _enter_start_loading, "seen": _after_start_loading}
    return (
        _controller("start_writing", module, "", backed_up, family, **writing),
        _controller("start_loading", module, "", read, family, **loading),
    )


def _tree(attribute: str, parameters: str, link: str, family: str, **observers: Any) -> Hook:
    hiradix = family == HIRADIX
    return Hook(
        name=f"{'hiradix' if hiradix else 'tree'}.{attribute.lstrip('_')}",
        module=HIRADIX_TREE if hiradix else UNIFIED_TREE,
        owner="HiRadixCache" if hiradix else "UnifiedRadixCache",
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=(link,),
        family=family,
        **observers,
    )


def _loading_check(family: str) -> Hook:
    return _tree("loading_check", "", "read", family, enter=_enter_loading_check, seen=_after_loading_check)


def _writing_check(family: str) -> Hook:
    """Trees of node objects forget a backup when it is acknowledged, by whatever function."""
    return _tree(
        "writing_check", "write_back", "backed_up", family, enter=_enter_writing_check, seen=_after_writing_check
    )


HOOKS: tuple[Hook, ...] = (
    *threads.HOOKS,
    *_of_class(HYBRID, UNIFIED),
    *_of_class(HYBRID, UNIFIED_OBJ),
    *_of_class(BASE, HIRADIX),
    *_launching(BASE, UNIFIED),
    *_launching(BASE, HIRADIX),
    *_launching(BASE, UNIFIED_OBJ),
    *_launching(HYBRID, UNIFIED),
    *_launching(HYBRID, UNIFIED_OBJ),
    _tree("_finish_write_through_ack", "ack_id", "backed_up", UNIFIED, seen=_after_write_ack),
    _writing_check(UNIFIED_OBJ),
    _writing_check(HIRADIX),
    *(_loading_check(family) for family in (UNIFIED, UNIFIED_OBJ, HIRADIX)),
)
