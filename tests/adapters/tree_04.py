"""The small tree of ``old_tree`` in the shape of SGLang 0.4.6 to 0.4.7: tuples, whole prefixes, page copies.

Only shapes and call orders are SGLang's. 0.4.8 has the copies and the constructor of these, and the rest of 0.4.9.
"""

from __future__ import annotations

from queue import Queue
from typing import Any

from . import old_tree as old

HOST_POOL = ("sglang.srt.mem_cache.memory_pool", "HostKVCache")
MHA_POOL = ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPoolHost")


class HostPool(old.Pool):
    """The base of the host pools, in the module of the device pools."""

    alloc = old.Pool.alloc
    free = old.Pool.free
    clear = old.Pool.clear


class PagePool(HostPool):
    """The pool that copies pages; single tokens go through flat data."""

    def load_page_per_layer(
        self, host_indices: old.Slots, device_indices: old.Slots, device_pool: Any, layer_id: int
    ) -> None: ...

    def write_page_all_layers(self, host_indices: old.Slots, device_indices: old.Slots, device_pool: Any) -> None: ...


class LayerDoneCounter:
    """One count of copied layers, for every load and every pass."""

    def __init__(self, layers: int) -> None:
        self.counter = layers

    def increment(self) -> None:
        self.counter += 1

    def wait_until(self, threshold: int) -> None:
        """The real one waits; the tests call it when it would return."""
        assert self.counter > threshold, "it would wait here"

    def reset(self) -> None:
        self.counter = 0


class Controller:
    """Hands over to threads, which are the tests."""

    write_policy = "write_through"

    def __init__(self, pool: PagePool) -> None:
        self.mem_pool_host = pool
        self.ack_write_queue: Queue[int] = Queue()
        self.ack_load_queue: Queue[int] = Queue()
        self.loads: list[old.Slots] = []
        self.layer_done_counter = LayerDoneCounter(pool.layer_num)

    def write(self, device_indices: old.Slots, priority: int | None = None, node_id: int = 0) -> old.Slots | None:
        return self.mem_pool_host.alloc(len(device_indices))

    def load(self, host_indices: old.Slots, priority: int | None = None, node_id: int = 0) -> old.Slots | None:
        self.loads.append(host_indices)
        return host_indices

    def copy_layers(self, layers: int) -> None:
        """The load thread at work."""
        for slots in self.loads:
            for layer in range(layers):
                self.copy_layer(slots, layer)
        self.loads.clear()

    def copy_layer(self, slots: old.Slots, layer: int) -> None:
        self.mem_pool_host.load_page_per_layer(slots, slots, None, layer)
        self.layer_done_counter.increment()


class Radix(old.Radix):
    """The base class inserts, and calls the helper of the class that is built."""

    def cache_unfinished_req(self, req: Any) -> None:
        self.insert(req.origin_input_ids, old.Slots())
        self.match_prefix(req.origin_input_ids)

    def cache_finished_req(self, req: Any) -> None:
        self.insert(req.origin_input_ids, old.Slots())

    def insert(self, key: list[int], value: Any = None) -> int:  # type: ignore[override]
        return self._insert_helper(self.root_node, key, value)

    def match_prefix(self, key: list[int], include_evicted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _insert_helper(self, node: old.Node, key: list[int], value: Any) -> int:
        raise NotImplementedError


class HiRadix(Radix):
    """HiRadixCache of 0.4.6 and 0.4.7."""

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        tp_cache_group: Any,
        page_size: int,
        hicache_ratio: float,
        hicache_size: int,
        hicache_write_policy: str,
    ) -> None:
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.token_to_kv_pool_host = PagePool()
        self.cache_controller = Controller(self.token_to_kv_pool_host)
        self.ongoing_write_through: dict[int, old.Node] = {}
        self.ongoing_load_back: dict[int, tuple[old.Node, old.Node]] = {}
        self.evictable_size_ = 0
        self.load_back_threshold = 4
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.root_node = old.Node(0, [], None, old.Slots())

    def match_prefix(self, key: list[int], include_evicted: bool = False, **kwargs: Any) -> Any:
        node, position, values = self.root_node, 0, old.Slots()
        while (child := node.children.get(tuple(key[position : position + old.PAGE]))) is not None:
            node, position = child, position + len(child.key)
            values = old.Slots([*values, *(child.value or ())])
        deepest = node
        while node.value is None:
            assert node.parent is not None
            node = node.parent
        return (values, node, deepest) if include_evicted else (values, node)

    def _insert_helper(self, node: old.Node, key: list[int], value: Any) -> int:
        key = key[: len(key) // old.PAGE * old.PAGE]
        values, node = self.match_prefix(key)
        if len(values) < len(key):
            rest = key[len(values) :]
            new = old.Node(10 + len(values), rest, node, old.Slots(range(len(rest))))
            self.evictable_size_ += len(rest)
            self.write_backup(new)
        return len(values)

    def write_backup(self, node: old.Node, write_back: bool = False) -> int:
        assert node.value is not None
        node.host_value = self.cache_controller.write(device_indices=node.value, node_id=node.id)
        self.ongoing_write_through[node.id] = node
        return len(node.value)

    def writing_check(self, write_back: bool = False) -> None:
        self.ongoing_write_through.clear()

    def loading_check(self) -> None:
        self.ongoing_load_back.clear()

    def ready_to_load_cache(self) -> None: ...

    def init_load_back(self, last_node: old.Node, prefix_indices: old.Slots, mem_quota: int | None = None) -> Any:
        if last_node.value is None:
            loaded = self.load_back(last_node, mem_quota)
            if loaded is not None:
                prefix_indices = old.Slots([*prefix_indices, *loaded])
            while last_node.value is None:
                assert last_node.parent is not None
                last_node = last_node.parent
        return last_node, prefix_indices

    def load_back(self, node: old.Node, mem_quota: int | None = None) -> old.Slots | None:
        assert node.host_value is not None
        if len(node.host_value) < self.load_back_threshold:
            return None
        node.value = self.cache_controller.load(host_indices=node.host_value, node_id=node.id)
        assert node.parent is not None
        self.ongoing_load_back[node.id] = (node.parent, node)
        return node.value

    def evict(self, num_tokens: int) -> None:
        leaves = [self.root_node]
        while leaves:
            node = leaves.pop()
            held = [child for child in node.children.values() if child.value is not None]
            leaves += held
            if not held and node.value:
                self._evict_backuped(node)
                return

    def _evict_backuped(self, node: old.Node) -> int:
        assert node.value is not None
        freed, node.value = len(node.value), None
        self.evictable_size_ -= freed
        return freed
