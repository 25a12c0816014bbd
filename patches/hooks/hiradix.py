"""HiRadixCache: the HiCache tree of SGLang 0.4.6 to 0.5.18 (what only 0.4.6 to 0.4.8 have is in ``hiradix_04``).

Everything here runs on the scheduler thread. Nodes are objects; their ids start again at 0 with every reset,
so nothing is remembered across one. ``RadixCache`` is its base class and also what ``SchedulePolicy``
simulates its waiting queue with: methods of the base class are looked at only when called on the tree that
is watched.

What moves KV out of L1: ``_evict_backuped`` (0.4.6 to 0.5.15) or ``_detach_backuped`` (0.5.16 and newer,
which ``_evict_backuped`` calls), ``_evict_regular``, and ``_drop_subtree_no_host`` (0.5.16 and newer).
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import HIRADIX, Args, Hook, Kwargs, argument
from kvwitness.patches.hooks import common
from kvwitness.patches.schema.events import EvictedL1, Eviction
from kvwitness.patches.witness import Witness

MODULE = "sglang.srt.mem_cache.hiradix_cache"
BASE_MODULE = "sglang.srt.mem_cache.radix_cache"
OWNER = "HiRadixCache"

# --- set-up ------------------------------------------------------------------------------------------

# The signatures of the constructor: 0.5.6 and newer, 0.5.4, 0.5.2 and 0.4.10, 0.4.9, and before.
_POOLS = "req_to_token_pool token_to_kv_pool_allocator tp_cache_group page_size hicache_ratio hicache_size"
_CONSTRUCTORS = (
    "params server_args",
    f"{_POOLS} hicache_write_policy hicache_io_backend hicache_mem_layout enable_metrics",
    f"{_POOLS} hicache_write_policy hicache_io_backend hicache_mem_layout",
    f"{_POOLS} hicache_write_policy hicache_io_backend",
    f"{_POOLS} hicache_write_policy",
)

# --- insert ------------------------------------------------------------------------------------------


def _after_insert(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    # A plain RadixCache is the policy's own simulation, or a server without HiCache.
    if args[0] is w.tree:
        common.after_insert(w, _, result, args, kwargs)


def _enter_cache(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    if args[0] is not w.tree:
        return w.inserting
    return common.enter_inserting(w, args, kwargs)


# --- L1 eviction -------------------------------------------------------------------------------------

Victim = tuple[int, int, int, int]


def victim_of(w: Witness, node: Any) -> Victim:
    """Id, span and tokens of a node that is about to leave L1."""
    start, end = w.span_of(node)
    return int(node.id), start, end, len(node.value)


def left_l1(w: Witness, victim: Victim, how: int, tokens: int) -> None:
    number, start, end, _ = victim
    lost = tokens if how in (Eviction.DROPPED, Eviction.DROPPED_HOST_PRESSURE) else 0
    w.emit(EvictedL1, common.evict_call(w), number, start, end, how, tokens, lost)


def _enter_backuped(w: Witness, args: Args, kwargs: Kwargs) -> Victim | None:
    if hasattr(type(args[0]), "_detach_backuped"):
        return None
    return victim_of(w, argument(args, kwargs, 1, "node"))


def _after_backuped(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if token is not None:
        left_l1(w, token, Eviction.DEMOTED, int(result))


def _enter_detach(w: Witness, args: Args, kwargs: Kwargs) -> Victim:
    return victim_of(w, argument(args, kwargs, 1, "node"))


def _after_detach(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if token[0] in args[0].ongoing_write_through:
        # write_back: out of the tree, but its L1 slots are kept until its copy is complete.
        w.staged.append(token)
        left_l1(w, token, Eviction.STAGED, 0)
    else:
        left_l1(w, token, Eviction.DEMOTED, int(result))


def demote_staged(w: Witness) -> None:
    """The copies that an eviction waited for are complete: the nodes leave L1 now."""
    for victim in w.staged:
        left_l1(w, victim, Eviction.DEMOTED, victim[3])
    w.staged.clear()


def _enter_regular(w: Witness, args: Args, kwargs: Kwargs) -> Victim:
    return victim_of(w, argument(args, kwargs, 1, "node"))


def _after_regular(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    left_l1(w, token, Eviction.DROPPED, int(result))


def _enter_subtree(w: Witness, args: Args, kwargs: Kwargs) -> list[Victim]:
    waiting, victims = [argument(args, kwargs, 1, "root")], []
    while waiting:
        node = waiting.pop()
        if node.value is not None:
            victims.append(victim_of(w, node))
        waiting.extend(node.children.values())
    return victims


def _after_subtree(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    for victim in token:
        if result:
            left_l1(w, victim, Eviction.DROPPED_HOST_PRESSURE, victim[3])
        else:
            left_l1(w, victim, Eviction.KEPT, 0)


# --- declarations ------------------------------------------------------------------------------------


def _hook(attribute: str, parameters: str, links: str, *, name: str = "", base: bool = False, **observers: Any) -> Hook:
    return Hook(
        name=f"hiradix.{name or attribute.lstrip('_')}",
        module=BASE_MODULE if base else MODULE,
        owner="RadixCache" if base else OWNER,
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=tuple(links.split()),
        family=HIRADIX,
        **observers,
    )


def _insert(parameters: str, *, base: bool = False) -> Hook:
    return _hook("insert", parameters, "born", base=base, seen=_after_insert)


def _load_back(parameters: str) -> Hook:
    return _hook(
        "init_load_back",
        parameters,
        "read",
        enter=common.enter_init_load_back,
        leave=common.leave_init_load_back,
        seen=common.after_init_load_back,
    )


def _evict(parameters: str) -> Hook:
    return _hook(
        "evict",
        parameters,
        "left_l1",
        enter=common.enter_evict,
        leave=common.leave_evict,
        seen=common.after_evict,
    )


HOOKS: tuple[Hook, ...] = (
    *(_hook("__init__", names, "instance", seen=common.after_init, always=True) for names in _CONSTRUCTORS),
    _hook("reset", "", "epoch", seen=common.after_reset, always=True),
    _hook("match_prefix", "params", "resident_l1 resident_l2 left_l1", seen=common.after_match),
    _hook("match_prefix", "key", "resident_l1 resident_l2 left_l1", seen=common.after_match),
    _insert("params"),
    _insert("key value chunked"),
    # 0.4: the base class's insert calls HiRadixCache's _insert_helper.
    _insert("key value", base=True),
    _hook(
        "cache_unfinished_req",
        "req",
        "born",
        base=True,
        enter=_enter_cache,
        leave=common.leave_inserting,
    ),
    _evict("params"),
    _evict("num_tokens"),
    _hook("_evict_backuped", "node", "left_l1", name="demote", enter=_enter_backuped, seen=_after_backuped),
    _hook("_detach_backuped", "node", "left_l1", name="demote", enter=_enter_detach, seen=_after_detach),
    _hook("_evict_regular", "node", "left_l1", enter=_enter_regular, seen=_after_regular),
    # Absent before 0.5.16, where a write_back without room for it ends in an assertion of SGLang's own.
    _hook("_drop_subtree_no_host", "root", "", enter=_enter_subtree, seen=_after_subtree),
    _hook("evict_host", "num_tokens", "", enter=common.enter_evict_host, seen=common.after_evict_host),
    _hook("write_backup", "node", "backed_up", enter=common.enter_with_node, leave=common.leave_with_node),
    _hook("load_back", "node", "read", enter=common.enter_with_node, leave=common.leave_with_node),
    _load_back("params"),
    _load_back("last_node host_hit_length"),
)
