"""The copy functions of SGLang 0.4.9 to 0.5.17, whose acknowledgements do not say how much was copied.

Counted in tokens times layers: a load-back is complete only when every layer of it was copied. Loads copy
layer by layer, backups all layers in one call. Only lengths are read. 0.5.18 and newer say tokens and bytes
themselves; the count is then kept and not used.

0.5.2 and newer call these functions from the scheduler thread, 0.4 from a thread of the controller for each
direction. Each direction's counter has one thread that adds to it.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import Args, Hook, Kwargs, argument
from kvwitness.patches.instance import anchor_pool
from kvwitness.patches.schema.events import Direction
from kvwitness.patches.witness import Witness

ANCHOR = 0
"""Number of the host pool that the claims are about."""

# The host pool copies: 0.4.10 to 0.5.15, and 0.5.16 and newer.
_HOST_POOLS = (
    ("sglang.srt.mem_cache.memory_pool_host", "MHATokenToKVPoolHost"),
    ("sglang.srt.mem_cache.memory_pool_host", "MLATokenToKVPoolHost"),
    ("sglang.srt.mem_cache.pool_host.mha", "MHATokenToKVPoolHost"),
    ("sglang.srt.mem_cache.pool_host.mla", "MLATokenToKVPoolHost"),
)
# The device pool copies, and is given the host pool: 0.4.9.
_DEVICE_POOLS = (
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool"),
    ("sglang.srt.mem_cache.memory_pool", "MLATokenToKVPool"),
)


def bytes_called(w: Witness, direction: int, tokens: int | None = None) -> int:
    """Bytes of the copies that were called for ``direction`` since the last time; at most those of ``tokens``."""
    pool = anchor_pool(w.tree)
    layers = max(int(getattr(pool, "layer_num", 0) or 0), 1)
    before = w.accounted.get(direction, 0)
    called = w.copied.get(direction, 0) - before
    taken = called if tokens is None else min(called, tokens * layers)
    w.accounted[direction] = before + taken
    return taken * int(getattr(pool, "size_per_token", 0) or 0) // layers


def forget(w: Witness, direction: int) -> None:
    """What was called before belongs to no transfer that is to come."""
    w.accounted[direction] = w.copied.get(direction, 0)


def _add(w: Witness, direction: int, tokens: int) -> None:
    w.copied[direction] = w.copied.get(direction, 0) + tokens


def _after_load_layer(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if w.pools.get(id(args[0])) == ANCHOR:
        w.layer_tokens = len(argument(args, kwargs, 2, "host_indices"))
        _add(w, Direction.H2D, w.layer_tokens)


def _after_backup(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if w.pools.get(id(args[0])) == ANCHOR:
        tokens = len(argument(args, kwargs, 2, "host_indices"))
        _add(w, Direction.D2H, tokens * int(args[0].layer_num))
        if w.digester is not None:
            w.digester.copied(argument(args, kwargs, 1, "device_pool"))


def _after_load_layer_by_device(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    pool = argument(args, kwargs, 1, "host_pool")
    if w.pools.get(id(pool)) == ANCHOR:
        w.layer_tokens = len(argument(args, kwargs, 2, "host_indices"))
        _add(w, Direction.H2D, w.layer_tokens)


def _after_backup_by_device(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    pool = argument(args, kwargs, 1, "host_pool")
    if w.pools.get(id(pool)) == ANCHOR:
        tokens = len(argument(args, kwargs, 2, "host_indices"))
        _add(w, Direction.D2H, tokens * int(pool.layer_num))


def _hooks(module: str, owner: str, first: str, names: tuple[str, str], seen: tuple[Any, Any]) -> tuple[Hook, ...]:
    common = ("self", first, "host_indices", "device_indices")
    return tuple(
        # No link of a read rests on them: without them there are no bytes, and the claim misses those.
        Hook(
            name=f"copies.{what}",
            module=module,
            owner=owner,
            attribute=name,
            parameters=(*common, *rest),
            links=links,
            seen=observer,
        )
        for what, name, rest, links, observer in (
            ("load_layer", names[0], ("layer_id", "io_backend"), (), seen[0]),
            ("backup", names[1], ("io_backend",), ("content",), seen[1]),
        )
    )


HOOKS: tuple[Hook, ...] = (
    *(
        hook
        for module, owner in _HOST_POOLS
        for hook in _hooks(
            module,
            owner,
            "device_pool",
            ("load_to_device_per_layer", "backup_from_device_all_layer"),
            (_after_load_layer, _after_backup),
        )
    ),
    *(
        hook
        for module, owner in _DEVICE_POOLS
        for hook in _hooks(
            module,
            owner,
            "host_pool",
            ("load_from_host_per_layer", "backup_to_host_all_layer"),
            (_after_load_layer_by_device, _after_backup_by_device),
        )
    ),
)
