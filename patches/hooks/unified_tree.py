"""UnifiedRadixCache: what all its releases share, and node ids (SGLang 0.5.17 to 0.5.23, Python or Rust core).

Node objects (0.5.12 to 0.5.16) have :mod:`kvwitness.patches.hooks.unified_obj` besides.

Per-node work inside the Rust core is not visible from Python; every decision that moves KV between tiers
passes through the methods hooked here, on the scheduler thread. Node spans come from the core's own
read-only ``collect_path_info`` (0.5.22 and newer) or from the nodes themselves (Python core), asked *before*
the core changes the node.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import UNIFIED, UNIFIED_OBJ, Args, Hook, Kwargs, argument
from kvwitness.patches.hooks import common
from kvwitness.patches.hooks.nodes import FULL
from kvwitness.patches.schema.events import EvictedL1, Eviction
from kvwitness.patches.witness import Witness

MODULE = "sglang.srt.mem_cache.unified_radix_cache"
OWNER = "UnifiedRadixCache"


# --- L1 eviction -------------------------------------------------------------------------------------


def _has_inner_evict(tree: Any) -> bool:
    """SGLang 0.5.20 and newer evict in ``_evict``, which ``evict`` calls."""
    return hasattr(type(tree), "_evict")


def _enter_outer_evict(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    return None if _has_inner_evict(args[0]) else common.enter_evict(w, args, kwargs)


def _leave_outer_evict(w: Witness, token: Any) -> None:
    if token is not None:
        common.leave_evict(w, token)


def _after_outer_evict(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if token is not None:
        common.after_evict(w, token, result, args, kwargs)


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
    w.emit(EvictedL1, common.evict_call(w), node, start, end, how, tokens, lost)


def _after_device_leaf(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    evicted = Eviction.DEMOTED if token[3] else Eviction.DROPPED
    _emit_victim(w, token, Eviction.STAGED if result is not None else evicted, args, kwargs)


def _after_demote(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    _emit_victim(w, token, Eviction.DEMOTED, args, kwargs)


def _after_drop_subtree(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    how = Eviction.DROPPED_HOST_PRESSURE if result else Eviction.KEPT
    _emit_victim(w, token, how, args, kwargs)


# --- load-back ---------------------------------------------------------------------------------------


def _after_load_spec(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if w.loading is not None:
        kv, other_pools = result
        w.loading.spec_built = True
        w.loading.wanted = len(kv.host_indices)
        w.loading.other_pools = bool(other_pools)


def _hook(
    attribute: str, parameters: str, links: str, *, name: str = "", family: str = UNIFIED, **observers: Any
) -> Hook:
    return Hook(
        name=f"tree.{name or attribute.lstrip('_')}",
        module=MODULE,
        owner=OWNER,
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=tuple(links.split()),
        family=family,
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


def _shared(family: str) -> tuple[Hook, ...]:
    """The same functions with the same observers in both families: one wrapper serves them."""
    return (
        # Remembers the tree also while nothing is recorded yet (late start).
        _hook("_reset_full", "", "epoch", family=family, seen=common.after_reset, always=True),
        _hook("init_hicache", "server_args params", "instance", family=family, seen=common.after_init, always=True),
        _hook("match_prefix", "params", "resident_l1 resident_l2 left_l1", family=family, seen=common.after_match),
        # Up to 0.5.21; the end of a request is tree.on_release (scheduler.py).
        _hook(
            "cache_unfinished_req",
            "req chunked",
            "born",
            name="checkpoint_into_tree",
            family=family,
            enter=common.enter_inserting,
            leave=common.leave_inserting,
        ),
        _hook("insert", "params", "born", family=family, seen=common.after_insert),
        _hook(
            "evict",
            "params",
            "left_l1",
            family=family,
            enter=_enter_outer_evict,
            leave=_leave_outer_evict,
            seen=_after_outer_evict,
        ),
        _hook(
            "evict_host",
            "num_tokens",
            "",
            family=family,
            enter=common.enter_evict_host,
            seen=common.after_evict_host,
        ),
        _hook(
            "init_load_back",
            "params",
            "read",
            family=family,
            enter=common.enter_init_load_back,
            leave=common.leave_init_load_back,
            seen=common.after_init_load_back,
        ),
    )


HOOKS: tuple[Hook, ...] = (
    *_shared(UNIFIED),
    *_shared(UNIFIED_OBJ),
    # 0.5.21, and 0.5.22 and newer.
    *(
        _hook(
            attribute,
            "req up_to",
            "born",
            name="checkpoint_into_tree",
            enter=common.enter_inserting,
            leave=common.leave_inserting,
        )
        for attribute in ("insert_req", "checkpoint_into_tree")
    ),
    _hook("_evict", "params", "left_l1", enter=common.enter_evict, leave=common.leave_evict, seen=common.after_evict),
    _hook("_evict_device_leaf", "node_id tracker", "left_l1", enter=_enter_victim, seen=_after_device_leaf),
    _hook("_demote", "node_id tracker", "left_l1", enter=_enter_victim, seen=_after_demote),
    _hook("_drop_subtree_no_host", "node_id tracker", "left_l1", enter=_enter_victim, seen=_after_drop_subtree),
    _core_hook("rust_core", "sglang.srt.mem_cache.rust_tree_core.adapter", "RustUnifiedTreeCore"),
    _core_hook("python_core", "sglang.srt.mem_cache.unified_cache.unified_tree_core", "UnifiedTreeCore"),
)
