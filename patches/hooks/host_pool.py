"""The host pools (L2 memory) of SGLang 0.4.6 to 0.5.23: which slots are taken, given back, emptied.

``HostKVCache`` is the base of the MHA, MLA and most other host pools. Pools that override these methods
(state pools of hybrid models, page envelopes) are not seen here; the instance facts name them.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import Args, Hook, Kwargs, argument
from kvwitness.patches.schema.events import HostAlloc, HostClear, HostFree
from kvwitness.patches.witness import Witness

# 0.5.14 and newer, 0.4.8 and newer, and before.
MODULES = (
    "sglang.srt.mem_cache.pool_host.base",
    "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.mem_cache.memory_pool",
)


def _after_alloc(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    pool = w.pools.get(id(args[0]))
    if pool is not None and result is not None:
        req = w.req_id(w.current_req())
        w.emit(HostAlloc, pool, req, int(args[0].available_size()), tail=w.slot_runs(result))


def _after_free(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    pool = w.pools.get(id(args[0]))
    slots = argument(args, kwargs, 1, "indices")
    if pool is not None and len(slots):
        req = w.req_id(w.current_req())
        w.emit(HostFree, pool, req, int(args[0].available_size()), tail=w.slot_runs(slots))


def _after_clear(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    pool = w.pools.get(id(args[0]))
    if pool is not None:
        w.emit(HostClear, pool, int(args[0].available_size()))


def _hook(module: str, attribute: str, parameters: tuple[str, ...], seen: Any) -> Hook:
    return Hook(
        name=f"host_pool.{attribute}",
        module=module,
        owner="HostKVCache",
        attribute=attribute,
        parameters=("self", *parameters),
        links=("resident_l2",),
        seen=seen,
    )


HOOKS: tuple[Hook, ...] = tuple(
    hook
    for module in MODULES
    for hook in (
        _hook(module, "alloc", ("need_size",), _after_alloc),
        _hook(module, "free", ("indices",), _after_free),
        _hook(module, "clear", (), _after_clear),
    )
)
