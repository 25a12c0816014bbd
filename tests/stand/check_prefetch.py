"""What the hooks see of HiRadixCache's own prefetch functions; run by a stand's Python of 0.5.17.

Not collected by pytest: `test_stand_storage_threads.py` runs it. The tree is SGLang's class without its ``__init__``,
with a root and SGLang's nodes; the storage threads are played by the test.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvwitness.patches.config import Config
from kvwitness.patches.contract import HIRADIX
from kvwitness.patches.hooks import all_hooks, nodes
from kvwitness.patches.install import Installer
from kvwitness.patches.stand import entry
from kvwitness.patches.witness import Witness

entry.plugin()
os.environ["KVWITNESS_DIR"] = sys.argv[1]
witness = Witness(Config.from_environment())
Installer(witness, all_hooks()).install()

from sglang.srt.mem_cache.hiradix_cache import HiRadixCache  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode  # noqa: E402

PAGE = 16


def tree_of(policy: str) -> Any:
    tree = object.__new__(HiRadixCache)
    root = TreeNode()
    root.key, root.value, root.host_value, root.lock_ref = RadixKey([], None), [], [], 1
    freed: list[int] = []
    controller = SimpleNamespace(
        prefetch_rate_limited=lambda: False,
        prefetch=lambda *_, **__: operation_of(),
        prefetch_tokens_occupied=0,
        terminate_prefetch=lambda operation: (operation.completed_tokens, operation.hash_value),
        mem_pool_host=SimpleNamespace(free=lambda slots: freed.extend(slots.tolist())),
        append_host_mem_release=lambda slots: None,
    )
    vars(tree).update(
        root_node=root,
        page_size=PAGE,
        enable_storage=True,
        enable_storage_metrics=False,
        is_eagle=False,
        prefetch_threshold=16,
        prefetch_stop_policy=policy,
        cache_controller=controller,
        ongoing_prefetch={},
        prefetch_loaded_tokens_by_reqid={},
        evictable_host_leaves=set(),
        evictable_leaves=set(),
        freed=freed,
        _get_extra_pools=dict,
        _all_reduce_attn_groups=lambda *_: None,
        _record_store_event=lambda *_, **__: None,
        _update_leaf_status=lambda _: None,
    )
    witness.tree, witness.controller, witness.family = tree, controller, HIRADIX
    witness.find_path = nodes.by_object(witness, nodes.in_l1)
    witness.page_size = PAGE
    return tree


def operation_of() -> Any:
    return SimpleNamespace(
        hash_value=[], completed_tokens=0, host_indices=None, is_terminated=lambda: False, mark_terminate=lambda: None
    )


def found(tree: Any, rid: str, first_slot: int, pages: int, completed: int) -> None:
    """The storage threads found and read so many pages."""
    operation = tree.ongoing_prefetch[rid][2]
    operation.hash_value = [f"{rid}-{i}" for i in range(pages)]
    operation.host_indices = torch.arange(first_slot, first_slot + pages * PAGE)
    operation.completed_tokens = completed * PAGE


def main() -> None:
    witness.open("scheduler")
    tokens = list(range(64))
    tree = tree_of("wait_complete")
    tree.prefetch_from_storage("whole", tree.root_node, tokens)
    assert tree.check_prefetch_progress("whole") is False  # Not complete: nothing is said yet.
    found(tree, "whole", 128, 4, 4)
    assert tree.check_prefetch_progress("whole") is True
    (node,) = tree.root_node.children.values()
    # 32 tokens longer, from the node on; and once more from the root, where L2 has the first 64 by now.
    tree.prefetch_from_storage("behind", node, list(range(100, 132)))
    found(tree, "behind", 256, 2, 2)
    tree.check_prefetch_progress("behind")
    tree.prefetch_from_storage("again", tree.root_node, [*tokens, *range(200, 232)])
    found(tree, "again", 512, 6, 6)
    tree.check_prefetch_progress("again")
    assert tree.freed == list(range(512, 576))
    tree.prefetch_from_storage("short", tree.root_node, list(range(8)))  # Below the threshold.
    tree.prefetch_from_storage("missed", tree.root_node, list(range(300, 364)))
    tree._revoke_pending_prefetch("missed")
    tree.prefetch_stop_policy = "best_effort"
    tree.prefetch_from_storage("hasty", tree.root_node, list(range(400, 464)))
    tree.check_prefetch_progress("hasty")
    tree.prefetch_from_storage("part", tree.root_node, list(range(500, 564)))
    found(tree, "part", 768, 4, 1)
    tree.check_prefetch_progress("part")
    tree.prefetch_stop_policy = "timeout"
    tree.is_prefetch_timeout = lambda _: True
    tree.prefetch_from_storage("late", tree.root_node, list(range(600, 664)))
    found(tree, "late", 896, 4, 2)
    tree.check_prefetch_progress("late")
    # A page was not there any more: the storage thread ended it, not the policy.
    tree.prefetch_from_storage("torn", tree.root_node, list(range(700, 764)))
    found(tree, "torn", 1024, 4, 1)
    tree.ongoing_prefetch["torn"][2]._terminated_flag = True
    tree.check_prefetch_progress("torn")
    witness.close()
    print(next(Path(sys.argv[1]).glob("*.kvwj")))


main()
