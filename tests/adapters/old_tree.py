"""A small tree and controller in the shape of SGLang's older releases, for the seams of the adapters.

Only shapes and call orders are SGLang's: node objects with parents, ``write`` that launches at once (0.5.2)
or hands over to threads (0.4), acknowledgements taken in the tree's checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.config import Config, Faults
from kvwitness.patches.contract import MARK, mismatch, wrap
from kvwitness.patches.hooks import all_hooks
from kvwitness.patches.schema.events import Event
from kvwitness.patches.witness import Witness

PAGE = 4
HIRADIX = ("sglang.srt.mem_cache.hiradix_cache", "HiRadixCache")
RADIX = ("sglang.srt.mem_cache.radix_cache", "RadixCache")
CONTROLLER = ("sglang.srt.managers.cache_controller", "HiCacheController")
POOL = ("sglang.srt.mem_cache.memory_pool_host", "HostKVCache")
COUNTER = ("sglang.srt.managers.cache_controller", "LayerDoneCounter")
SCHEDULER = ("sglang.srt.managers.scheduler", "Scheduler")
RESULTS = ("sglang.srt.managers.scheduler_output_processor_mixin", "SchedulerOutputProcessorMixin")
MHA_POOL = ("sglang.srt.mem_cache.memory_pool_host", "MHATokenToKVPoolHost")


class Slots(list[int]):
    """Host slot indices: what is used of a CPU tensor."""

    device = SimpleNamespace(type="cpu")

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Slots(found) if isinstance(index, slice) else found

    def tolist(self) -> list[int]:
        return list(self)


class Node:
    """A TreeNode."""

    def __init__(self, number: int, key: list[int], parent: Node | None, value: Slots | None) -> None:
        self.id, self.key, self.parent, self.value = number, key, parent, value
        self.host_value: Slots | None = None
        self.children: dict[Any, Node] = {}
        if parent is not None:
            parent.children[tuple(key[:PAGE])] = self


class Pool:
    """The host pool: allocates upwards, copies nothing."""

    size_per_token, layer_num, size, layout = 32, 2, 1000, "layer_first"

    def __init__(self) -> None:
        self.free_slots = list(range(1000))

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, need_size: int) -> Slots | None:
        taken, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return Slots(taken) if len(taken) == need_size else None

    def free(self, indices: Slots) -> int:
        self.free_slots += indices
        return len(indices)

    def clear(self) -> None:
        self.free_slots = list(range(1000))


class MhaPool(Pool):
    """The pool class that copies."""

    def load_to_device_per_layer(
        self, device_pool: Any, host_indices: Slots, device_indices: Slots, layer_id: int, io_backend: str
    ) -> None: ...

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Slots, device_indices: Slots, io_backend: str
    ) -> None: ...


class Controller:
    """0.5.2 and newer: launches from the scheduler thread."""

    write_policy, io_backend = "write_through", "direct"

    def __init__(self, pool: Pool) -> None:
        self.mem_pool_host = pool
        self.write_queue: list[Any] = []
        self.load_queue: list[Any] = []
        self.ack_write_queue: Any = []
        self.ack_load_queue: Any = []

    def write(self, device_indices: Slots, priority: int | None = None, node_id: int = -1) -> Slots | None:
        slots = self.mem_pool_host.alloc(len(device_indices))
        if slots is not None:
            operation = SimpleNamespace(host_indices=slots, device_indices=device_indices, node_ids=[node_id])
            self.write_queue.append(operation)
            self.start_writing()
        return slots

    def start_writing(self) -> None:
        for operation in self.write_queue:
            pool: Any = self.mem_pool_host
            pool.backup_from_device_all_layer(None, operation.host_indices, operation.device_indices, "direct")
            self.ack_write_queue.append(SimpleNamespace(node_ids=operation.node_ids))
        self.write_queue.clear()

    def load(self, host_indices: Slots, priority: int | None = None, node_id: int = -1) -> Slots | None:
        operation = SimpleNamespace(host_indices=host_indices, device_indices=host_indices, node_ids=[node_id])
        self.load_queue.append(operation)
        return host_indices

    def start_loading(self) -> int:
        pool: Any = self.mem_pool_host
        for operation in self.load_queue:
            for layer in range(pool.layer_num):
                pool.load_to_device_per_layer(None, operation.host_indices, operation.device_indices, layer, "direct")
            self.ack_load_queue.append(SimpleNamespace(node_ids=operation.node_ids))
        self.load_queue.clear()
        return 0


class ThreadedController(Controller):
    """0.4: the copies are someone else's; acknowledgements are ids in a queue."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.layer_done_counter = LayerDoneCounter(pool.layer_num)
        self.ack_write_queue = Queue()
        self.ack_load_queue = Queue()

    def write(self, device_indices: Slots, priority: int | None = None, node_id: int = 0) -> Slots | None:
        slots = self.mem_pool_host.alloc(len(device_indices))
        pool: Any = self.mem_pool_host
        pool.backup_from_device_all_layer(None, slots, device_indices, "direct")
        self.ack_write_queue.put(node_id)
        return slots


class LayerDoneCounter:
    """0.4.8 to 0.5.1: three counts of copied layers; a pass waits for the one that it was told."""

    def __init__(self, layers: int) -> None:
        self.counters = [layers] * 3
        self.producer_index = self.consumer_index = 0

    def update_producer(self) -> int:
        self.producer_index = (self.producer_index + 1) % 3
        return self.producer_index

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def increment(self) -> None:
        self.counters[self.producer_index] += 1

    def wait_until(self, threshold: int) -> None:
        """The real one waits; the tests call it when it would return."""
        assert self.counters[self.consumer_index] > threshold, "it would wait here"

    def reset(self) -> None:
        self.counters[self.producer_index] = 0


class Radix:
    """RadixCache: the base class, and what a scheduling policy simulates with."""

    page_size = PAGE

    def __init__(self) -> None:
        self.root_node = Node(0, [], None, Slots())

    def get_child_key_fn(self, key: list[int]) -> tuple[int, ...]:
        return tuple(key[:PAGE])

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        self.insert(req.origin_input_ids, Slots())

    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
        self.insert(req.origin_input_ids, Slots())

    def insert(self, key: list[int], value: Any = None, chunked: bool = False) -> int:
        raise NotImplementedError


class HiRadix(Radix):
    """HiRadixCache of 0.5.2 to 0.5.5, and of 0.5.16 where eviction is concerned."""

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        tp_cache_group: Any,
        page_size: int,
        hicache_ratio: float,
        hicache_size: int,
        hicache_write_policy: str,
        hicache_io_backend: str,
        hicache_mem_layout: str,
        enable_metrics: bool,
    ) -> None:
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.token_to_kv_pool_host = MhaPool()
        controllers = {"threads": ThreadedController, "streams": Controller}
        self.cache_controller: Any = controllers[hicache_io_backend](self.token_to_kv_pool_host)
        self.ongoing_write_through: dict[int, Node] = {}
        self.ongoing_load_back: dict[int, Node] = {}
        self.evictable_size_ = 0
        self.load_back_threshold = 10
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.root_node = Node(0, [], None, Slots())

    def match_prefix(self, key: list[int], **kwargs: Any) -> Any:
        node, device, host = self.root_node, 0, 0
        while (child := node.children.get(tuple(key[device + host : device + host + PAGE]))) is not None:
            node = child
            device, host = (device, host + len(node.key)) if node.value is None else (device + len(node.key), host)
        last_device = node
        while last_device.value is None and last_device.parent is not None:
            last_device = last_device.parent
        return SimpleNamespace(
            device_indices=[0] * device, last_device_node=last_device, last_host_node=node, host_hit_length=host
        )

    def insert(self, key: list[int], value: Any = None, chunked: bool = False) -> int:
        key = key[: len(key) // PAGE * PAGE]
        known = self.match_prefix(key)
        existing = len(known.device_indices)
        if existing < len(key):
            node = Node(10 + existing, key[existing:], known.last_device_node, Slots(range(len(key) - existing)))
            self.evictable_size_ += len(node.key)
            self.write_backup(node)
        return existing

    def write_backup(self, node: Node, write_back: bool = False) -> int:
        assert node.value is not None
        node.host_value = self.cache_controller.write(device_indices=node.value, node_id=node.id)
        self.ongoing_write_through[node.id] = node
        return len(node.value)

    def writing_check(self, write_back: bool = False) -> None:
        self.ongoing_write_through.clear()

    def loading_check(self) -> None:
        self.ongoing_load_back.clear()
        if isinstance(self.cache_controller.ack_load_queue, list):
            self.cache_controller.ack_load_queue.clear()

    def ready_to_load_host_cache(self) -> int:
        counter = getattr(self.cache_controller, "layer_done_counter", None)
        return 0 if counter is None else (counter.producer_index + 1) % 3

    def init_load_back(self, last_node: Node, host_hit_length: int, mem_quota: int | None = None) -> Any:
        return self.load_back(last_node) or [], last_node

    def load_back(self, node: Node, mem_quota: int | None = None) -> Slots | None:
        assert node.host_value is not None
        if len(node.host_value) < self.load_back_threshold:
            return None
        node.value = self.cache_controller.load(host_indices=node.host_value, node_id=node.id)
        self.ongoing_load_back[node.id] = node
        return node.value

    def evict(self, num_tokens: int) -> None:
        for node in list(self.root_node.children.values()):
            if node.host_value is None:
                self.write_backup(node, write_back=True)
            self._detach_backuped(node)
        self.writing_check(write_back=True)

    def _detach_backuped(self, node: Node) -> int:
        assert node.value is not None
        freed, node.value = len(node.value), None
        self.evictable_size_ -= freed
        return freed


class Scheduler:
    """Runs a batch, and processes its result."""

    def run_batch(self, batch: Any) -> Any:
        return batch.forward()

    def process_batch_result_prefill(self, batch: Any, result: Any) -> None: ...


def hooked(witness: Witness, targets: dict[tuple[str, str], type]) -> list[tuple[type, str, Any]]:
    """Install our hooks on these classes as the installer would; returns what to put back."""
    undo: list[tuple[type, str, Any]] = []
    for hook in all_hooks():
        owner = targets.get((hook.module, hook.owner))
        original = vars(owner).get(hook.attribute) if owner is not None else None
        if owner is None or original is None or getattr(original, MARK, None) == hook.name:
            continue
        if mismatch(original, hook.parameters) is None:
            undo.append((owner, hook.attribute, original))
            setattr(owner, hook.attribute, wrap(original, hook, witness))
    return undo


def witness_at(directory: Path) -> Witness:
    w = Witness(Config(directory, 2 << 20, Faults()))
    w.open("scheduler")
    return w


def events(directory: Path, *kinds: type[Event]) -> list[Any]:
    """What was recorded, of these kinds (all without any)."""
    (journal,) = (read_journal(path) for path in find_journals(directory))
    return [event for event in journal.events if not kinds or isinstance(event, kinds)]


def names(found: Iterable[Event]) -> list[str]:
    return [type(event).__name__ for event in found]
