"""HiMambaRadixCache: the HiCache tree of models with a recurrent state (Mamba, linear attention).

SGLang 0.5.10 to 0.5.12 build it; 0.5.13 to 0.5.17 still have it. Its nodes are those of HiRadixCache with a
recurrent state besides the KV, and it is no subclass of it. What is observed is full-attention KV, the anchor
of the host pools: the states are another pool, and no link rests on them.

- A match ends where a state is, in L1 or in L2. Where only the state is in L2, SGLang up to 0.5.12 reports it
  as one token of host hit: what L2 has of the KV is taken from the nodes.
- States are evicted by a function of their own, which takes KV along, also from outside of ``evict``.
- With a leaf go those of its ancestors that hold no state and have no other child: that can be on the host's
  account too, and takes KV out of L1 that no eviction of L1 asked for.

The controller is the hybrid one of the unified trees, the checks of the acknowledgements are HiRadixCache's.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from kvwitness.patches.contract import HIMAMBA, HIRADIX, UNIFIED_OBJ, Args, Hook, Kwargs, argument
from kvwitness.patches.hooks import common, controller
from kvwitness.patches.hooks.hiradix import Victim, left_l1, victim_of
from kvwitness.patches.hooks.nodes import only_in_l2
from kvwitness.patches.schema.events import EvictBegin, EvictEnd, Eviction, Tail
from kvwitness.patches.witness import LoadAttempt, Witness

MODULE = "sglang.srt.mem_cache.hi_mamba_radix_cache"
BASE_MODULE = "sglang.srt.mem_cache.mamba_radix_cache"
OWNER = "HiMambaRadixCache"
BASE = "MambaRadixCache"

# --- match -------------------------------------------------------------------------------------------


class _Match(NamedTuple):
    """A match with its host hit taken apart: tokens of KV, and whether the state comes from L2."""

    device_indices: Any
    last_device_node: Any
    last_host_node: Any
    host_hit_length: int
    mamba_host_hit_length: int


def _state_only_in_l2(node: Any) -> bool:
    return node.mamba_value is None and node.mamba_host_value is not None


def _after_match(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    node = result.last_host_node
    match = _Match(result.device_indices, result.last_device_node, node, only_in_l2(node), int(_state_only_in_l2(node)))
    common.after_match(w, None, match, args, kwargs)


# --- insert ------------------------------------------------------------------------------------------


def _after_insert(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if args[0] is w.tree:
        common.after_insert(w, _, result, args, kwargs)


def _enter_cache(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    return common.enter_inserting(w, args, kwargs) if args[0] is w.tree else w.inserting


# --- L1 eviction -------------------------------------------------------------------------------------

_Call = tuple[int, int]


def _begin(w: Witness, tree: Any, tokens: int, states: int) -> _Call:
    """An eviction begins: its number, and the tree's count of evictable tokens."""
    call = w.next_call()
    cause, reqs = w.allocation()
    w.emit(EvictBegin, call, cause, tokens, 0, states, tail=Tail.ints(reqs))
    w.evict_calls.append(call)
    return call, int(tree.full_evictable_size_)


def _enter_evict(w: Witness, args: Args, kwargs: Kwargs) -> _Call:
    params = argument(args, kwargs, 1, "params")
    return _begin(w, args[0], int(params.num_tokens), int(params.mamba_num))


def _enter_evict_states(w: Witness, args: Args, kwargs: Kwargs) -> _Call | None:
    return None if w.evict_calls else _begin(w, args[0], 0, int(argument(args, kwargs, 1, "mamba_num")))


def _leave_evict(w: Witness, token: _Call | None) -> None:
    if token is not None:
        w.evict_calls.pop()


def _after_evict(w: Witness, token: _Call | None, result: Any, args: Args, kwargs: Kwargs) -> None:
    # The result of evict leaves out the KV that went with a state.
    if token is not None:
        call, evictable = token
        w.emit(EvictEnd, call, evictable - int(args[0].full_evictable_size_))


def _enter_victim(w: Witness, args: Args, kwargs: Kwargs) -> Victim:
    return victim_of(w, argument(args, kwargs, 1, "node"))


def _after_demotion(w: Witness, token: Victim, result: Any, args: Args, kwargs: Kwargs) -> None:
    left_l1(w, token, Eviction.DEMOTED, int(result[0]))


def _after_regular(w: Witness, token: Victim, result: Any, args: Args, kwargs: Kwargs) -> None:
    # The result counts the ancestors that went along, too.
    left_l1(w, token, Eviction.DROPPED, token[3])


def _enter_ancestor(w: Witness, args: Args, kwargs: Kwargs) -> Victim | None:
    node = argument(args, kwargs, 1, "node")
    return victim_of(w, node) if node.value is not None else None


def _after_ancestor(w: Witness, token: Victim | None, result: Any, args: Args, kwargs: Kwargs) -> None:
    if token is None:
        return
    if w.evict_calls:
        left_l1(w, token, Eviction.DROPPED, token[3])
        return
    # On the host's account: the eviction of L1 consists of it alone.
    call, _ = _begin(w, args[0], 0, 0)
    try:
        left_l1(w, token, Eviction.DROPPED, token[3])
    finally:
        w.evict_calls.pop()
    w.emit(EvictEnd, call, token[3])


# --- load-back ---------------------------------------------------------------------------------------


def _node_of(params: Any) -> Any:
    """The deepest matched node: ``best_match_node`` since 0.5.12."""
    node = getattr(params, "best_match_node", None)
    return params.last_host_node if node is None else node


def _enter_load_back(w: Witness, args: Args, kwargs: Kwargs) -> tuple[Any, LoadAttempt, int]:
    node = _node_of(argument(args, kwargs, 1, "params"))
    promised = only_in_l2(node)
    before, attempt = common.enter_init_load_back(w, args, kwargs)
    # A state that has to come back is loaded with however little KV.
    attempt.other_pools = _state_only_in_l2(node)
    return before, attempt, promised


def _after_load_back(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    _, attempt, promised = token
    node = _node_of(argument(args, kwargs, 1, "params"))
    common.load_back_decided(w, attempt, node, promised, len(result[0]))


# --- declarations ------------------------------------------------------------------------------------


def _hook(attribute: str, parameters: str, links: str, *, name: str = "", base: bool = False, **observers: Any) -> Hook:
    return Hook(
        name=f"himamba.{name or attribute.lstrip('_')}",
        module=BASE_MODULE if base else MODULE,
        owner=BASE if base else OWNER,
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=tuple(links.split()),
        family=HIMAMBA,
        **observers,
    )


def _of_the_controller(hook: Hook) -> bool:
    return hook.family == UNIFIED_OBJ and hook.owner in ("HybridCacheController", "HiCacheController")


def _of_the_checks(hook: Hook) -> bool:
    return hook.family == HIRADIX and hook.attribute in ("writing_check", "loading_check")


HOOKS: tuple[Hook, ...] = (
    _hook("__init__", "params server_args", "instance", seen=common.after_init, always=True),
    _hook("reset", "", "epoch", seen=common.after_reset, always=True),
    _hook("match_prefix", "params", "resident_l1 resident_l2 left_l1", seen=_after_match),
    _hook("insert", "params", "born", base=True, seen=_after_insert),
    _hook("cache_unfinished_req", "req chunked", "born", base=True, enter=_enter_cache, leave=common.leave_inserting),
    _hook("evict", "params", "left_l1", enter=_enter_evict, leave=_leave_evict, seen=_after_evict),
    _hook("evict_mamba", "mamba_num", "left_l1", enter=_enter_evict_states, leave=_leave_evict, seen=_after_evict),
    _hook("_evict_to_host", "node", "left_l1", name="demote", enter=_enter_victim, seen=_after_demotion),
    _hook("_evict_regular", "node", "left_l1", enter=_enter_victim, seen=_after_regular),
    _hook("_delete_tombstone_leaf", "node", "left_l1", enter=_enter_ancestor, seen=_after_ancestor),
    _hook("evict_host", "num_tokens", "", enter=common.enter_evict_host, seen=common.after_evict_host),
    _hook("write_backup", "node", "backed_up", enter=common.enter_with_node, leave=common.leave_with_node),
    _hook("load_back", "node", "read", enter=common.enter_with_node, leave=common.leave_with_node),
    _hook(
        "init_load_back",
        "params",
        "read",
        enter=_enter_load_back,
        leave=common.leave_init_load_back,
        seen=_after_load_back,
    ),
    *(dataclasses.replace(hook, family=HIMAMBA) for hook in controller.HOOKS if _of_the_controller(hook)),
    *(
        dataclasses.replace(hook, family=HIMAMBA, name=f"himamba.{hook.attribute}", module=MODULE, owner=OWNER)
        for hook in controller.HOOKS
        if _of_the_checks(hook)
    ),
)
