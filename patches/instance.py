"""Facts about this process that verdicts need: pools, sizes, policies, ranks. Read once, while starting."""

from __future__ import annotations

import importlib.metadata
import socket
import sys
from typing import Any

from kvwitness.patches.contract import MARK
from kvwitness.patches.start import host_id, key_id, start_id
from kvwitness.patches.witness import Witness

# Server arguments that decide what HiCache does. Nothing else is recorded: arguments can hold secrets.
_ARGUMENTS = (
    "model_path",
    "served_model_name",
    "page_size",
    "tp_size",
    "pp_size",
    "dp_size",
    "max_total_tokens",
    "chunked_prefill_size",
    "schedule_policy",
    "enable_hierarchical_cache",
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_io_backend",
    "hicache_mem_layout",
    "hicache_storage_backend",
    "hicache_storage_prefetch_policy",
    "hicache_host_memory_mode",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "enable_metrics",
    "enable_cache_report",
    "enable_trace",
    "kv_cache_dtype",
    "attention_backend",
    "device",
    "random_seed",
)


def sglang_version() -> str:
    """Version of the installed SGLang; "unknown" when it carries no metadata."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def describe_process(w: Witness, role: str, server_args: Any, start: str | None = None) -> dict[str, Any]:
    """Role, which start on which host, SGLang version and the arguments that matter.

    ``start``: the id of the start, where whoever attached has given one.
    """
    return {
        "role": role,
        "start": start or start_id(),
        "host": host_id(socket.gethostname(), w.digest_key),
        "key": key_id(w.digest_key),
        "sglang": sglang_version(),
        "arguments": {name: getattr(server_args, name) for name in _ARGUMENTS if hasattr(server_args, name)},
    }


def anchor_pool(tree: Any) -> Any:
    """The host pool whose slots are the identity of full KV, whatever the release calls it."""
    group = _group(tree)
    return group.anchor_entry.host_pool if group is not None else tree.token_to_kv_pool_host


def copies_in_threads(controller: Any) -> bool:
    """Whether acknowledgements come through queues of node ids (a list of ``HiCacheAck`` since 0.5.2)."""
    return controller is not None and not isinstance(controller.ack_write_queue, list)


def _group(tree: Any) -> Any:
    """The group of host pools; None where the tree has a single one (plain models up to SGLang 0.5.18)."""
    group = getattr(tree, "host_pool_group", None)
    if group is None:
        group = getattr(tree, "token_to_kv_pool_host", None)
    return group if hasattr(group, "anchor_entry") else None


def _named_pools(tree: Any) -> list[tuple[str, Any]]:
    group = _group(tree)
    if group is None:
        return [("kv", tree.token_to_kv_pool_host)]
    return [(str(getattr(entry.name, "value", entry.name)), entry.host_pool) for entry in group.entries]


def find_pools(tree: Any) -> dict[int, int]:
    """Number the host pools by identity; 0 is the anchor pool, whose slots are the identity of full KV."""
    pools = {id(anchor_pool(tree)): 0}
    for _, pool in _named_pools(tree):
        pools.setdefault(id(pool), len(pools))
    return pools


def describe_instance(w: Witness) -> dict[str, Any]:
    """What the ledger needs to know about the instance. Missing attributes become None, never an error."""
    tree, controller = w.tree, w.controller
    anchor = anchor_pool(tree)
    return {
        "ranks": _ranks(w),
        "family": w.family,
        "tree_class": type(tree).__name__,
        "tree_core": type(getattr(tree, "tree_core", None)).__name__,
        "components": [str(component) for component in getattr(tree, "tree_components", ())],
        "page_size": w.page_size,
        "device_tokens": getattr(tree.token_to_kv_pool_allocator, "size", None),
        "host_tokens": getattr(anchor, "size", None),
        "bytes_per_token": getattr(anchor, "size_per_token", None),
        "layers": getattr(anchor, "layer_num", None),
        "layout": getattr(anchor, "layout", None),
        "io_backend": getattr(controller, "io_backend", None),
        "copy_threads": copies_in_threads(controller),
        "write_policy": getattr(controller, "write_policy", None),
        "write_through_threshold": getattr(tree, "write_through_threshold", None),
        "load_back_threshold": getattr(tree, "load_back_threshold", None),
        "host_memory_mode": getattr(tree, "host_memory_mode", None),
        "storage": bool(getattr(tree, "enable_storage", False)),
        "storage_policy": getattr(tree, "prefetch_stop_policy", None),
        "digest_every": w.config.digest_every,
        "pools": [
            {
                "pool": w.pools[id(pool)],
                "name": name,
                "class": type(pool).__name__,
                # A pool that overrides alloc or free is not seen by our hooks on the base class.
                "hooked": all(hasattr(getattr(type(pool), method), MARK) for method in ("alloc", "free")),
            }
            for name, pool in _named_pools(tree)
        ],
    }


def scheduler_ranks(names: tuple[str, ...], values: tuple[Any, ...], server_args: Any) -> dict[str, Any]:
    """The ranks that the scheduler was called with (``names``), and the sizes that go with them."""
    ranks = {name: value for name, value in zip(names, values, strict=False) if name.endswith("_rank")}
    for size in ("tp_size", "pp_size", "dp_size"):
        ranks[size] = getattr(server_args, size, None)
    if getattr(server_args, "enable_dp_attention", False) and ranks["tp_size"] and ranks["dp_size"]:
        ranks["attn_tp_size"] = ranks["tp_size"] // ranks["dp_size"]
    return ranks


_PARALLEL = ("tp_rank", "tp_size", "pp_rank", "pp_size", "dp_rank", "dp_size", "attn_tp_rank", "attn_tp_size")


def parallel_ranks() -> dict[str, Any]:
    """What SGLang 0.5.17 and newer keep for the whole process; empty in older releases. Any thread."""
    context = sys.modules.get("sglang.srt.runtime_context")
    get_parallel = getattr(context, "get_parallel", None)
    parallel = get_parallel() if get_parallel is not None else None
    return {name: getattr(parallel, name) for name in _PARALLEL if getattr(parallel, name, None) is not None}


def _ranks(w: Witness) -> dict[str, Any]:
    """This process's place among the ranks."""
    ranks: dict[str, Any] = dict.fromkeys(_PARALLEL) | w.ranks | parallel_ranks()
    ranks.update({name: getattr(w.tree, name) for name in ("pp_rank", "pp_size") if hasattr(w.tree, name)})
    return ranks
