"""UnifiedRadixCache with node objects: SGLang 0.5.12 to 0.5.16.

It is the default tree only for hybrid models there; ``SGLANG_ENABLE_UNIFIED_RADIX_TREE`` makes it the tree
of plain ones. 0.5.11 has the class but no HiCache in it.

Its methods have the names that later releases use for node ids: the hooks are told apart by parameter names
where these differ, and by :attr:`Witness.family` where they do not.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import UNIFIED_OBJ, Args, Hook, Kwargs, argument
from kvwitness.patches.hooks import common
from kvwitness.patches.hooks.nodes import FULL, full_in_l1
from kvwitness.patches.schema.events import EvictedL1, Eviction
from kvwitness.patches.witness import Witness

MODULE = "sglang.srt.mem_cache.unified_radix_cache"
OWNER = "UnifiedRadixCache"

_Victim = tuple[Any, int, int, bool, int]


def _enter_device_leaf(w: Witness, args: Args, kwargs: Kwargs) -> _Victim:
    node = argument(args, kwargs, 1, "node")
    start, end = w.span_of(node)
    return node, start, end, bool(node.backuped), argument(args, kwargs, 2, "tracker").get(FULL, 0)


def _after_device_leaf(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    node, start, end, backed, before = token
    tokens = argument(args, kwargs, 2, "tracker").get(FULL, 0) - before
    gone = Eviction.DEMOTED if node.backuped else Eviction.DROPPED
    # write_back, and L2 had no room: the node stays.
    how = Eviction.KEPT if full_in_l1(node) else gone
    lost = tokens if how == Eviction.DROPPED and not backed else 0
    w.emit(EvictedL1, common.evict_call(w), node.id, start, end, how, tokens, lost)


def _hook(attribute: str, parameters: str, links: str, **observers: Any) -> Hook:
    return Hook(
        name=f"unified_obj.{attribute.lstrip('_')}",
        module=MODULE,
        owner=OWNER,
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=tuple(links.split()),
        family=UNIFIED_OBJ,
        **observers,
    )


HOOKS: tuple[Hook, ...] = (
    _hook("_evict_device_leaf", "node tracker", "left_l1", enter=_enter_device_leaf, seen=_after_device_leaf),
    _hook("write_backup", "node write_back", "backed_up", enter=common.enter_with_node, leave=common.leave_with_node),
    _hook("load_back", "best_match_node", "read", enter=common.enter_with_node, leave=common.leave_with_node),
)
