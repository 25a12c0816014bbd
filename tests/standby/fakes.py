"""A scheduler that is one for kvwitness's purposes: a loop, a tree of node objects, a controller, host slots."""

from __future__ import annotations

import sys
import types
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PAGE = 16


class Slots:
    """Host slot numbers as the hooks see them: a CPU tensor's few methods."""

    device = types.SimpleNamespace(type="cpu")

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, which: slice) -> Slots:
        return Slots(self._numbers[which])

    def tolist(self) -> list[int]:
        return list(self._numbers)


class Node:
    """A node of HiRadixCache."""

    count = 0

    def __init__(self, tokens: list[int], parent: Node | None, host: list[int] | None, device: bool = True) -> None:
        self.id = Node.count
        Node.count += 1
        self.key = array("q", tokens)
        self.parent = parent
        self.children: dict[Any, Node] = {}
        self.value = object() if device else None
        self.host_value = None if host is None else Slots(host)
        if parent is not None:
            parent.children[tuple(tokens[:PAGE])] = self


class HostPool:
    """The host pool."""

    size = 256

    def available_size(self) -> int:
        return 64

    def alloc(self, need_size: int) -> Any:
        return None

    def free(self, indices: Any) -> int:
        return 0


class HiRadixCache:
    """The tree."""

    page_size = PAGE

    def __init__(self) -> None:
        self.root_node = Node([], None, None)
        self.ongoing_write_through: dict[int, Any] = {}
        self.ongoing_load_back: dict[int, Any] = {}
        self.token_to_kv_pool_host = HostPool()
        self.token_to_kv_pool_allocator = types.SimpleNamespace(size=512)
        self.cache_controller: Any = types.SimpleNamespace(
            write_queue=[], load_queue=[], ack_write_queue=[], ack_load_queue=[], write_policy="write_through"
        )

    def get_child_key_fn(self, key: Any) -> Any:
        return tuple(key[:PAGE])

    def match_prefix(self, params: Any) -> Any:
        return params


class Scheduler:
    """The loop, one step at a time."""

    def __init__(self) -> None:
        self.tree_cache: Any = HiRadixCache()
        self.server_args = types.SimpleNamespace(tp_size=1, pp_size=1, dp_size=1)
        self.waiting_queue: list[Any] = []
        self.steps = 0

    def get_next_batch_to_run(self) -> int:
        self.steps += 1
        return self.steps


@contextmanager
def sglang() -> Iterator[types.ModuleType]:
    """These classes under the names that the hooks look for."""
    scheduler = types.ModuleType("sglang.srt.managers.scheduler")
    scheduler.Scheduler = Scheduler  # type: ignore[attr-defined]
    tree = types.ModuleType("sglang.srt.mem_cache.hiradix_cache")
    tree.HiRadixCache = HiRadixCache  # type: ignore[attr-defined]
    names = {module.__name__: module for module in (scheduler, tree)}
    init, loop, match = Scheduler.__init__, Scheduler.get_next_batch_to_run, HiRadixCache.match_prefix
    sys.modules.update(names)
    try:
        yield scheduler
    finally:
        for name in names:
            del sys.modules[name]
        Scheduler.__init__ = init  # type: ignore[method-assign]
        Scheduler.get_next_batch_to_run = loop  # type: ignore[method-assign]
        HiRadixCache.match_prefix = match  # type: ignore[method-assign]
