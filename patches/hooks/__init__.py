"""The hooks, by the part of SGLang that they observe."""

from __future__ import annotations

from kvwitness.patches.contract import Hook
from kvwitness.patches.hooks import (
    controller,
    copies,
    himamba,
    hiradix,
    hiradix_04,
    host_pool,
    http,
    launch,
    layers,
    scheduler,
    storage,
    storage_threads,
    unified_obj,
    unified_tree,
    weights,
)


def all_hooks() -> list[Hook]:
    """Every hook, in the order in which they are installed."""
    return [
        *scheduler.HOOKS,
        *unified_tree.HOOKS,
        *unified_obj.HOOKS,
        *hiradix_04.HOOKS,
        *hiradix.HOOKS,
        *himamba.HOOKS,
        *controller.HOOKS,
        *copies.HOOKS,
        *layers.HOOKS,
        *host_pool.HOOKS,
        *storage.HOOKS,
        *storage_threads.HOOKS,
        *launch.HOOKS,
        *http.HOOKS,
        *weights.HOOKS,
    ]
