"""HiRadixCache of SGLang 0.4.6 to 0.4.8, where it differs from 0.4.9 (:mod:`kvwitness.patches.hooks.hiradix`).

- 0.4.6 and 0.4.7: a match is a tuple, with the deepest node only where ``include_evicted`` asks for it;
  ``init_load_back`` takes and returns the indices of the whole prefix; loads are released by
  ``ready_to_load_cache``. With a cache-aware schedule policy (lpm, dfs-weight) the prefix is matched in the
  policy, before the request's turn: no match is recorded for it then, and nothing is claimed.
- 0.4.6 to 0.4.8: the host pool copies page by page. With page size 1, which is their default, the load thread
  copies through a flat buffer and acknowledges without waiting for its stream: that such a load was complete
  is not known. Those copies are not counted, so that no claim rests on them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from kvwitness.patches.contract import HIRADIX, Args, Hook, Kwargs, argument
from kvwitness.patches.hooks import common, threads
from kvwitness.patches.hooks.copies import ANCHOR
from kvwitness.patches.hooks.nodes import only_in_l2
from kvwitness.patches.schema.events import Direction
from kvwitness.patches.witness import LoadAttempt, Witness

MODULE = "sglang.srt.mem_cache.hiradix_cache"
OWNER = "HiRadixCache"

# --- match -------------------------------------------------------------------------------------------


class _Match(NamedTuple):
    """The tuple of 0.4.6 and 0.4.7 with the names that later releases have."""

    device_indices: Any
    last_device_node: Any
    last_host_node: Any
    host_hit_length: int


def _after_match(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    indices, node, *rest = result
    deepest = rest[0] if rest else node
    match = _Match(indices, node, deepest, only_in_l2(deepest))
    common.after_match(w, None, match, args, kwargs)


# --- load-back ---------------------------------------------------------------------------------------


def _enter_load_back(w: Witness, args: Args, kwargs: Kwargs) -> tuple[Any, LoadAttempt, int]:
    # Before: what is loaded is in L1 afterwards.
    promised = only_in_l2(argument(args, kwargs, 1, "last_node"))
    return (*common.enter_init_load_back(w, args, kwargs), promised)


def _after_load_back(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    _, attempt, promised = token
    loaded = len(result[1]) - len(argument(args, kwargs, 2, "prefix_indices"))
    common.load_back_decided(w, attempt, argument(args, kwargs, 1, "last_node"), promised, loaded)


# --- copies ------------------------------------------------------------------------------------------


def _after_page_load(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if w.pools.get(id(args[0])) == ANCHOR:
        w.layer_tokens = len(argument(args, kwargs, 1, "host_indices"))
        w.copied[Direction.H2D] = w.copied.get(Direction.H2D, 0) + w.layer_tokens


def _after_page_backup(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if w.pools.get(id(args[0])) == ANCHOR:
        tokens = len(argument(args, kwargs, 1, "host_indices")) * int(args[0].layer_num)
        w.copied[Direction.D2H] = w.copied.get(Direction.D2H, 0) + tokens


# --- declarations ------------------------------------------------------------------------------------


def _hook(attribute: str, parameters: str, links: str, **observers: Any) -> Hook:
    return Hook(
        name=f"hiradix.{attribute}",
        module=MODULE,
        owner=OWNER,
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=tuple(links.split()),
        family=HIRADIX,
        **observers,
    )


def _copies(module: str, owner: str) -> tuple[Hook, ...]:
    common_names = ("self", "host_indices", "device_indices", "device_pool")
    return tuple(
        Hook(
            name=f"copies.{what}",
            module=module,
            owner=owner,
            attribute=attribute,
            parameters=(*common_names, *rest),
            links=links,
            seen=seen,
        )
        for what, attribute, rest, links, seen in (
            ("load_layer", "load_page_per_layer", ("layer_id",), (), _after_page_load),
            ("backup", "write_page_all_layers", (), ("content",), _after_page_backup),
        )
    )


HOOKS: tuple[Hook, ...] = (
    # Before the hook of later releases, which fits this signature too and expects another result.
    _hook("match_prefix", "key include_evicted", "resident_l1 resident_l2 left_l1", seen=_after_match),
    _hook(
        "init_load_back",
        "last_node prefix_indices",
        "read",
        enter=_enter_load_back,
        leave=common.leave_init_load_back,
        seen=_after_load_back,
    ),
    # The same moment under an earlier name.
    *(
        dataclasses.replace(hook, attribute="ready_to_load_cache")
        for hook in threads.HOOKS
        if hook.attribute == "ready_to_load_host_cache"
    ),
    # 0.4.6 and 0.4.7, and 0.4.8.
    *(
        hook
        for module in ("sglang.srt.mem_cache.memory_pool", "sglang.srt.mem_cache.memory_pool_host")
        for owner in ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
        for hook in _copies(module, owner)
    ),
)
