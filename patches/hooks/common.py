"""What the hooks of all tree families share: the same observation, read from arguments that differ by release.

SGLang passed single arguments until 0.5.7 (match), 0.5.9 (insert, evict, load-back) and parameter objects
since. Results changed from tuples over ``device_indices`` tensors, of which only the length is taken here,
to plain numbers in 0.5.22.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import HIMAMBA, HIRADIX, UNIFIED, UNIFIED_OBJ, Args, Kwargs, argument
from kvwitness.patches.hooks import nodes, threads
from kvwitness.patches.hooks.nodes import node_number
from kvwitness.patches.instance import describe_instance, find_pools
from kvwitness.patches.schema.events import (
    Cause,
    EvictBegin,
    EvictEnd,
    EvictHost,
    EvictHostBegin,
    FactKind,
    Inserted,
    L1Room,
    LoadBackDecided,
    Matched,
    MatchPurpose,
    Refusal,
    Reset,
    Tail,
)
from kvwitness.patches.witness import Allocation, LoadAttempt, Witness

# --- the tree that is watched ------------------------------------------------------------------------


def is_watched(w: Witness, tree: Any) -> bool:
    """The first tree of the process is the scheduler's; another one would mix two sets of node ids.

    Which family it is of follows from what it is, not from SGLang's version.
    """
    if w.tree is None:
        w.tree = tree
        w.page_size = int(getattr(tree, "page_size", 1))
        core = getattr(tree, "tree_core", None)
        if core is not None:
            w.family = UNIFIED
            w.find_path = nodes.by_path_info(tree) if hasattr(core, "collect_path_info") else nodes.by_node_id(tree)
        elif hasattr(tree, "tree_components"):
            w.family = UNIFIED_OBJ
            w.find_path = nodes.by_object(w, nodes.full_in_l1)
        else:
            w.family = HIMAMBA if hasattr(tree, "mamba_pool_host") else HIRADIX
            w.find_path = nodes.by_object(w, nodes.in_l1)
    return w.tree is tree


def _first(args: Args, kwargs: Kwargs, *names: str) -> Any:
    """The first argument after ``self``, whatever the release calls it."""
    return args[1] if len(args) > 1 else next(kwargs[name] for name in names if name in kwargs)


def after_reset(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if is_watched(w, args[0]):
        w.staged.clear()
        threads.forget(w)
        w.emit(Reset, 1)


def after_init(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    """HiCache is set up: from now on the controller and the pools are known."""
    tree = args[0]
    if not is_watched(w, tree):
        return
    w.controller = tree.cache_controller
    w.pools = find_pools(tree)
    w.on_open.append(lambda: w.facts(FactKind.INSTANCE, describe_instance(w)))
    w.facts(FactKind.INSTANCE, describe_instance(w))


# --- requests ----------------------------------------------------------------------------------------


def tokens_of(req: Any, least: int = 0) -> Any:
    """The request's token sequence so far, at least ``least`` tokens of it where the request has them."""
    known = getattr(req, "full_untruncated_fill_ids", None)
    if known is not None and len(known) >= max(least, 1):
        return known
    # It is brought up to date only when a prefill begins; ``fill_ids`` before 0.5.14 is cut to the chunk.
    return req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids


def admitted_req(w: Witness) -> Any:
    """The request that ``PrefillAdder.add_one_req`` is working on; None outside of it."""
    top = w.allocations[-1] if w.allocations else None
    return top.reqs[0] if top is not None and top.cause == Cause.PREFILL and isinstance(top.reqs, tuple) else None


def enter_inserting(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    before, w.inserting = w.inserting, argument(args, kwargs, 1, "req")
    return before


def leave_inserting(w: Witness, token: Any) -> None:
    w.inserting = token


# --- match -------------------------------------------------------------------------------------------


def after_match(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if not is_watched(w, args[0]):
        return
    asked = _first(args, kwargs, "params", "key")
    key = getattr(asked, "key", asked)
    req = getattr(asked, "req", None)
    if req is None and w.match_purpose == MatchPurpose.ADMISSION:
        req = w.matching
    device = getattr(result, "device_prefix_len", None)
    device = len(result.device_indices) if device is None else int(device)
    host = int(result.host_hit_length)
    best = _best_node(w, result, host)
    path = w.path_tail(best) if (device or host) else b""
    number = w.req_id(req)
    if number and w.match_purpose:
        # The tail of the matched range may end between two cells of the digest grid.
        w.digest(req, tokens_of(req, device + host), points=(device, device + host))
    w.emit(
        Matched,
        number,
        len(key),
        device,
        host,
        node_number(result.last_device_node),
        node_number(best),
        int(getattr(result, "swa_host_hit_length", 0)),
        int(getattr(result, "mamba_host_hit_length", 0)),
        w.match_purpose,
        tail=path,
    )


def _best_node(w: Witness, result: Any, host: int) -> Any:
    """The deepest matched node."""
    if w.family not in (HIRADIX, HIMAMBA):
        return result.best_match_node
    # Their last_host_node is the deepest *backed-up* node: above the device node when that is not.
    return result.last_host_node if host else result.last_device_node


# --- insert ------------------------------------------------------------------------------------------


def after_insert(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    tree = args[0]
    if not is_watched(w, tree):
        return
    given = _first(args, kwargs, "params", "key")
    key = getattr(given, "key", given)
    # Only whole pages get into the tree.
    tokens = len(key) // w.page_size * w.page_size
    req = w.inserting
    if req is not None:
        w.digest(req, tokens_of(req, tokens)[:tokens], points=(tokens,))
    node = getattr(result, "last_device_node", None)
    if node is None and w.family != UNIFIED:
        node = nodes.descend(tree, key, tokens)
    existing = int(getattr(result, "prefix_len", result))
    w.emit(Inserted, w.req_id(req), tokens, existing, node_number(node), tail=w.path_tail(node))


# --- L1 eviction -------------------------------------------------------------------------------------


def enter_evict(w: Witness, args: Args, kwargs: Kwargs) -> tuple[int, int]:
    call = w.next_call()
    params = _first(args, kwargs, "params", "num_tokens")
    cause, reqs = w.allocation()
    w.emit(
        EvictBegin,
        call,
        cause,
        int(getattr(params, "num_tokens", params)),
        int(getattr(params, "swa_num_tokens", 0)),
        int(getattr(params, "mamba_num", 0)),
        tail=Tail.ints(reqs),
    )
    w.emit(L1Room, call, _free_in_l1(args[0]))
    w.evict_calls.append(call)
    return call, int(getattr(args[0], "evictable_size_", 0))


def _free_in_l1(tree: Any) -> int:
    """Full-attention tokens that are free on the device, by the allocator's own count (the length of its free list).

    Why an eviction was larger than it had to be is told with it. No link rests on it, so that an allocator which does
    not say must not cost one: -1.
    """
    try:
        allocator = tree.token_to_kv_pool_allocator
        # With sliding-window KV beside it the allocator counts each, and before 0.5.10 has no count of both.
        count = getattr(allocator, "full_available_size", None) or allocator.available_size
        return int(count())
    except Exception:
        return -1


def leave_evict(w: Witness, token: Any) -> None:
    w.evict_calls.pop()


def after_evict(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    call, evictable = token
    freed = getattr(result, "num_tokens_evicted", None)
    if freed is None:
        # Before 0.5.10 the call returns nothing; the tree's own count of evictable tokens says it.
        freed = evictable - int(args[0].evictable_size_)
    w.emit(EvictEnd, call, int(freed))


def evict_call(w: Witness) -> int:
    """The L1 eviction that is going on; 0: none."""
    return w.evict_calls[-1] if w.evict_calls else 0


# --- L2 eviction -------------------------------------------------------------------------------------


def enter_evict_host(w: Witness, args: Args, kwargs: Kwargs) -> tuple[int, int]:
    """The number of the eviction (0: not one of full-attention KV), and the free host slots before it."""
    available = 0 if w.controller is None else int(w.controller.mem_pool_host.available_size())
    if int(argument(args, kwargs, 2, "component_type", nodes.FULL)) != nodes.FULL:
        return 0, available
    call = w.next_call()
    w.emit(EvictHostBegin, call, int(argument(args, kwargs, 1, "num_tokens")), available)
    return call, available


def after_evict_host(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    call, available = token
    if not call:
        return
    # HiRadixCache returns nothing: then the pool's own count says it.
    freed = int(w.controller.mem_pool_host.available_size()) - available if result is None else int(result)
    cause, reqs = w.allocation()
    asked = int(argument(args, kwargs, 1, "num_tokens"))
    w.emit(EvictHost, call, cause, asked, freed, reqs[0] if reqs else 0)


# --- load-back ---------------------------------------------------------------------------------------


def enter_init_load_back(w: Witness, args: Args, kwargs: Kwargs) -> tuple[Any, LoadAttempt]:
    params = _first(args, kwargs, "params", "last_node")
    req = getattr(params, "req", None)
    attempt = LoadAttempt(req if req is not None else admitted_req(w))
    before, w.loading = w.loading, attempt
    w.allocations.append(Allocation(Cause.LOAD_BACK, (attempt.req,) if attempt.req is not None else ()))
    return before, attempt


def leave_init_load_back(w: Witness, token: Any) -> None:
    w.loading = token[0]
    w.allocations.pop()


def after_init_load_back(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    attempt: LoadAttempt = token[1]
    params = _first(args, kwargs, "params", "last_node")
    if hasattr(params, "host_hit_length"):
        promised = int(params.host_hit_length)
        node = getattr(params, "best_match_node", None)
        node = getattr(params, "last_host_node", None) if node is None else node
    else:
        promised, node = int(argument(args, kwargs, 2, "host_hit_length", 0)), params
    loaded = 0
    if result is not None:
        loaded = int(result[0]) if isinstance(result[0], int) else len(result[0])
    load_back_decided(w, attempt, node, promised, loaded)


def load_back_decided(w: Witness, attempt: LoadAttempt, node: Any, promised: int, loaded: int) -> None:
    """The tree loaded ``loaded`` of the ``promised`` tokens that L2 has up to ``node``."""
    if not (promised or loaded or attempt.spec_built):
        return
    if w.family != UNIFIED and not attempt.load_called:
        attempt.wanted = promised
    reason = Refusal.NONE if loaded else _refusal(w, attempt)
    w.emit(
        LoadBackDecided,
        w.req_id(attempt.req),
        node_number(node),
        promised,
        loaded,
        attempt.wanted,
        reason,
    )


def _refusal(w: Witness, attempt: LoadAttempt) -> int:
    """SGLang returns no reason: it follows from which of its own steps were reached."""
    if attempt.load_failed:
        return Refusal.ALLOCATION_FAILED
    if not attempt.spec_built and w.family == UNIFIED:
        return Refusal.UNKNOWN
    if attempt.wanted == 0:
        return Refusal.NOTHING_TO_LOAD
    threshold = int(getattr(w.tree, "load_back_threshold", 0))
    if attempt.wanted < max(1, threshold) and not attempt.other_pools:
        return Refusal.TOO_SHORT
    if attempt.load_called or w.family in (HIRADIX, HIMAMBA):
        return Refusal.UNKNOWN
    return Refusal.NO_DEVICE_SLOTS


# --- node objects ------------------------------------------------------------------------------------


def enter_with_node(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    """Keep the node of ``write_backup`` or ``load_back`` at hand, for the controller is told its id only."""
    node = args[1] if len(args) > 1 else next(iter(kwargs.values()))
    w.nodes_at_hand[node.id] = node
    return node.id


def leave_with_node(w: Witness, token: Any) -> None:
    w.nodes_at_hand.pop(token, None)
