"""What a release gives only under a condition, or not at all although every hook fits."""

from __future__ import annotations

from typing import Final

from kvwitness.patches.contract import HIMAMBA, HIRADIX, UNIFIED
from kvwitness.tracer.contracts.cores import SWITCH
from kvwitness.tracer.contracts.facts import ReleaseFacts
from kvwitness.tracer.model import Link

REST_ON_PATHS: Final = frozenset(
    {Link.BORN, Link.BACKED_UP, Link.LEFT_L1, Link.RESIDENT_L1, Link.RESIDENT_L2, Link.READ}
)
"""Links that say something of positions in the tree."""

_TREE: Final = "sglang.srt.mem_cache.hiradix_cache.HiRadixCache"
_PAGES: Final = (
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPoolHost.load_page_per_layer",
    "sglang.srt.mem_cache.memory_pool_host.MHATokenToKVPoolHost.load_page_per_layer",
)


def pathless(family: str, facts: ReleaseFacts) -> str:
    """Why the paths of the tree are not told, with the release's defaults; "" where they are."""
    if family == UNIFIED and facts.default_core in facts.silent_cores:
        return f"the {facts.default_core} tree core, the default, does not tell the path to a node: set {SWITCH}=python"
    return ""


def conditions(family: str, facts: ReleaseFacts) -> tuple[str, ...]:
    """What has to be so for the links to be proven, or what they leave out, in words."""
    found = []
    if family == UNIFIED:
        found += [
            f"not with the {core} tree core ({SWITCH}): it does not tell the path to a node"
            for core in facts.silent_cores
            if core != facts.default_core
        ]
    if family == HIRADIX and any(target in facts.functions for target in _PAGES):
        found.append(
            "L2 reads with a page size above 1 only (the default is 1): with single tokens the load thread "
            "acknowledges a load without waiting for its stream"
        )
    if family == HIRADIX and "include_evicted" in facts.functions.get(f"{_TREE}.match_prefix", ""):
        found.append(
            "with the schedule policy fcfs, the default, or another that does not look at the cache: "
            "lpm and dfs-weight match a request before its turn, unseen"
        )
    if family == HIMAMBA:
        found.append("claims are about full-attention KV: the recurrent state is not judged")
    return tuple(found)
