"""UnifiedRadixCache of SGLang 0.5.22 and 0.5.23, with the Rust or the Python tree core.

Per-node work inside the Rust core is not visible from Python; every decision that moves KV between tiers
passes through the methods hooked here, on the scheduler thread. Node spans come from the core's own
read-only ``collect_path_info``, asked *before* the core changes the node.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import UNIFIED, Args, Hook, Kwargs, argument
from kvwitness.patches.instance import describe_instance, find_pools
from kvwitness.patches.schema.events import (
    Cause,
    EvictBegin,
    EvictedL1,
    EvictEnd,
    EvictHost,
    Eviction,
    FactKind,
    Inserted,
    LoadBackDecided,
    Matched,
    Refusal,
    Reset,
    Tail,
)
from kvwitness.patches.witness import Allocation, LoadAttempt, Witness

MODULE = "sglang.srt.mem_cache.unified_radix_cache"
OWNER = "UnifiedRadixCache"
FULL = 0
"""ComponentType.FULL: the full-attention KV that the claims are about."""


def _is_watched(w: Witness, tree: Any) -> bool:
    """The first tree of the process is the scheduler's; another one would mix two sets of node ids."""
    if w.tree is None:
        w.tree, w.family = tree, UNIFIED
        w.page_size = int(getattr(tree, "page_size", 1))
    return w.tree is tree


# --- reset, set-up -----------------------------------------------------------------------------------


def _after_reset(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if _is_watched(w, args[0]):
        w.emit(Reset, 1)


def _after_init_hicache(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    tree = args[0]
    if not _is_watched(w, tree):
        return
    w.controller = tree.cache_controller
    w.pools = find_pools(tree)
    w.on_open.append(lambda: w.facts(FactKind.INSTANCE, describe_instance(w)))
    w.facts(FactKind.INSTANCE, describe_instance(w))


# --- match -------------------------------------------------------------------------------------------


def _after_match(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if not _is_watched(w, args[0]):
        return
    params = argument(args, kwargs, 1, "params")
    req = params.req
    best = result.best_match_node
    device, host = int(result.device_prefix_len), int(result.host_hit_length)
    path = w.path_tail(best) if (device or host) else b""
    number = w.req_id(req)
    if number and w.match_purpose:
        # The tail of the matched range may end between two cells of the digest grid.
        w.digest(req, req.full_untruncated_fill_ids, points=(device, device + host))
    w.emit(
        Matched,
        number,
        len(params.key),
        device,
        host,
        _node(result.last_device_node),
        _node(best),
        int(result.swa_host_hit_length),
        int(result.mamba_host_hit_length),
        w.match_purpose,
        tail=path,
    )


def _node(node: Any) -> int:
    return node if isinstance(node, int) else -1


# --- insert ------------------------------------------------------------------------------------------


def _enter_checkpoint(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    before, w.inserting = w.inserting, argument(args, kwargs, 1, "req")
    return before


def _leave_checkpoint(w: Witness, token: Any) -> None:
    w.inserting = token


def _after_insert(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if not _is_watched(w, args[0]):
        return
    params = argument(args, kwargs, 1, "params")
    tokens = len(params.key)
    req = w.inserting
    if req is not None:
        w.digest(req, req.full_untruncated_fill_ids[:tokens], points=(tokens,))
    node = _node(result.last_device_node)
    w.emit(Inserted, w.req_id(req), tokens, int(result.prefix_len), node, tail=w.path_tail(node))


# --- L1 eviction -------------------------------------------------------------------------------------


def _enter_evict(w: Witness, args: Args, kwargs: Kwargs) -> int:
    call = w.next_call()
    params = argument(args, kwargs, 1, "params")
    cause, reqs = w.allocation()
    w.emit(
        EvictBegin,
        call,
        cause,
        int(params.num_tokens),
        int(params.swa_num_tokens),
        int(params.mamba_num),
        tail=Tail.ints(reqs),
    )
    w.evict_calls.append(call)
    return call


def _leave_evict(w: Witness, token: Any) -> None:
    w.evict_calls.pop()


def _after_evict(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    w.emit(EvictEnd, token, int(result.num_tokens_evicted))


def _call(w: Witness) -> int:
    return w.evict_calls[-1] if w.evict_calls else 0


def _enter_victim(w: Witness, args: Args, kwargs: Kwargs) -> tuple[int, int, int, bool, int]:
    """Node, span, whether it has a host copy, full tokens freed so far: all before the core lets go of it."""
    node = argument(args, kwargs, 1, "node_id")
    tracker = argument(args, kwargs, 2, "tracker")
    start, end = w.span_of(node)
    return node, start, end, bool(args[0].tree_core.is_backuped(node)), tracker.get(FULL, 0)


def _emit_victim(w: Witness, token: Any, how: int, args: Args, kwargs: Kwargs) -> None:
    node, start, end, backed, before = token
    tokens = argument(args, kwargs, 2, "tracker").get(FULL, 0) - before
    lost = tokens if not backed and how in (Eviction.DROPPED, Eviction.DROPPED_HOST_PRESSURE) else 0
    w.emit(EvictedL1, _call(w), node, start, end, how, tokens, lost)


def _after_device_leaf(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    evicted = Eviction.DEMOTED if token[3] else Eviction.DROPPED
    _emit_victim(w, token, Eviction.STAGED if result is not None else evicted, args, kwargs)


def _after_demote(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    _emit_victim(w, token, Eviction.DEMOTED, args, kwargs)


def _after_drop_subtree(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    how = Eviction.DROPPED_HOST_PRESSURE if result else Eviction.KEPT
    _emit_victim(w, token, how, args, kwargs)


# --- L2 eviction -------------------------------------------------------------------------------------


def _after_evict_host(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    component = argument(args, kwargs, 2, "component_type", FULL)
    if int(component) != FULL:
        return
    cause, reqs = w.allocation()
    asked = int(argument(args, kwargs, 1, "num_tokens"))
    w.emit(EvictHost, w.next_call(), cause, asked, int(result), reqs[0] if reqs else 0)


# --- load-back ---------------------------------------------------------------------------------------


def _enter_init_load_back(w: Witness, args: Args, kwargs: Kwargs) -> tuple[Any, LoadAttempt]:
    attempt = LoadAttempt(argument(args, kwargs, 1, "params").req)
    before, w.loading = w.loading, attempt
    w.allocations.append(Allocation(Cause.LOAD_BACK, (attempt.req,)))
    return before, attempt


def _leave_init_load_back(w: Witness, token: Any) -> None:
    w.loading = token[0]
    w.allocations.pop()


def _after_init_load_back(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    attempt: LoadAttempt = token[1]
    params = argument(args, kwargs, 1, "params")
    loaded = int(result[0]) if result is not None else 0
    promised = int(params.host_hit_length)
    if not (promised or loaded or attempt.spec_built):
        return
    reason = Refusal.NONE if loaded else _refusal(w, attempt)
    w.emit(
        LoadBackDecided,
        w.req_id(attempt.req),
        _node(params.best_match_node),
        promised,
        loaded,
        attempt.wanted,
        reason,
    )


def _refusal(w: Witness, attempt: LoadAttempt) -> int:
    """SGLang returns no reason: it follows from which of its own steps were reached."""
    if attempt.load_failed:
        return Refusal.ALLOCATION_FAILED
    if not attempt.spec_built:
        return Refusal.UNKNOWN
    if attempt.wanted == 0:
        return Refusal.NOTHING_TO_LOAD
    threshold = int(getattr(w.tree, "load_back_threshold", 0))
    if attempt.wanted < max(1, threshold) and not attempt.other_pools:
        return Refusal.TOO_SHORT
    return Refusal.UNKNOWN if attempt.load_called else Refusal.NO_DEVICE_SLOTS


def _after_load_spec(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if w.loading is not None:
        kv, other_pools = result
        w.loading.spec_built = True
        w.loading.wanted = len(kv.host_indices)
        w.loading.other_pools = bool(other_pools)


def _hook(attribute: str, parameters: str, links: str, **observers: Any) -> Hook:
    return Hook(
        name=f"tree.{attribute.lstrip('_')}",
        module=MODULE,
        owner=OWNER,
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=tuple(links.split()),
        family=UNIFIED,
        **observers,
    )


def _core_hook(name: str, module: str, owner: str) -> Hook:
    return Hook(
        name=f"{name}.build_load_back_spec",
        module=module,
        owner=owner,
        attribute="build_load_back_spec",
        parameters=("self", "node_id", "req"),
        links=(),
        family=UNIFIED,
        seen=_after_load_spec,
    )


HOOKS: tuple[Hook, ...] = (
    # Remembers the tree also while nothing is recorded yet (late start).
    _hook("_reset_full", "", "epoch", seen=_after_reset, always=True),
    _hook("init_hicache", "server_args params", "instance", seen=_after_init_hicache, always=True),
    _hook("match_prefix", "params", "resident_l1 resident_l2 left_l1", seen=_after_match),
    _hook(
        "checkpoint_into_tree",
        "req up_to",
        "born",
        enter=_enter_checkpoint,
        leave=_leave_checkpoint,
    ),
    _hook("insert", "params", "born", seen=_after_insert),
    _hook("_evict", "params", "left_l1", enter=_enter_evict, leave=_leave_evict, seen=_after_evict),
    _hook("_evict_device_leaf", "node_id tracker", "left_l1", enter=_enter_victim, seen=_after_device_leaf),
    _hook("_demote", "node_id tracker", "left_l1", enter=_enter_victim, seen=_after_demote),
    _hook("_drop_subtree_no_host", "node_id tracker", "left_l1", enter=_enter_victim, seen=_after_drop_subtree),
    _hook("evict_host", "num_tokens", "", seen=_after_evict_host),
    _hook(
        "init_load_back",
        "params",
        "read",
        enter=_enter_init_load_back,
        leave=_leave_init_load_back,
        seen=_after_init_load_back,
    ),
    _core_hook("rust_core", "sglang.srt.mem_cache.rust_tree_core.adapter", "RustUnifiedTreeCore"),
    _core_hook("python_core", "sglang.srt.mem_cache.unified_cache.unified_tree_core", "UnifiedTreeCore"),
)
