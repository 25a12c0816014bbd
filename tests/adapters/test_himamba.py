"""HiMambaRadixCache: what leaves L1 with a state or with a leaf, and a host hit taken apart.

The real runs are in ``test_hybrid``; these are the ways that they did not take. The small tree has SGLang's
shapes and call orders only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvwitness.patches.contract import HIMAMBA
from kvwitness.patches.schema.events import (
    BackupAcked,
    BackupQueued,
    Cause,
    EvictBegin,
    EvictedL1,
    EvictEnd,
    Eviction,
    HookFailed,
    Inserted,
    LoadBackDecided,
    LoadDone,
    LoadQueued,
    Matched,
    Refusal,
    TransferStarted,
)
from kvwitness.patches.witness import Allocation, Witness

from . import old_tree as old
from .test_hiradix import request

HIMAMBA_TREE = ("sglang.srt.mem_cache.hi_mamba_radix_cache", "HiMambaRadixCache")
MAMBA_TREE = ("sglang.srt.mem_cache.mamba_radix_cache", "MambaRadixCache")
HYBRID = ("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller", "HybridCacheController")


class Node(old.Node):
    """A TreeNode with a state, in L1 and in L2."""

    mamba_value: Any = None
    mamba_host_value: Any = None


class Controller(old.Controller):
    """Moves states along with the KV, or alone."""

    load = old.Controller.load

    def write(self, device_indices: old.Slots, priority: int | None = None, node_id: int = -1) -> Any:
        slots = self.mem_pool_host.alloc(len(device_indices))
        self.write_queue.append(SimpleNamespace(host_indices=slots, device_indices=device_indices, node_ids=[node_id]))
        return slots

    def start_writing(self) -> None:
        merge(self.write_queue, self.ack_write_queue)

    def start_loading(self) -> int:
        merge(self.load_queue, self.ack_load_queue)
        return 0


def merge(queue: list[Any], acks: list[Any]) -> None:
    """What waits is one copy with one acknowledgement; the bytes are those of all pools."""
    if queue:
        nodes = [node for operation in queue for node in operation.node_ids]
        tokens = sum(len(operation.device_indices) for operation in queue)
        acks.append(SimpleNamespace(node_ids=nodes, num_tokens=tokens, num_bytes=tokens * 32 + 8 * len(nodes)))
        queue.clear()


class Mamba(old.Radix):
    """MambaRadixCache."""

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        self.insert(SimpleNamespace(key=req.origin_input_ids))

    def insert(self, params: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class HiMamba(Mamba):
    """HiMambaRadixCache."""

    def __init__(self, params: Any, server_args: Any) -> None:
        kv, states = old.MhaPool(), old.Pool()
        entries = [SimpleNamespace(name="kv", host_pool=kv), SimpleNamespace(name="mamba", host_pool=states)]
        self.host_pool_group = SimpleNamespace(entries=entries, anchor_entry=entries[0])
        self.full_kv_pool_host, self.mamba_pool_host = kv, states
        self.token_to_kv_pool_allocator = SimpleNamespace(size=100)
        self.cache_controller = Controller(kv)
        self.ongoing_load_back: dict[int, Node] = {}
        self.ongoing_write_through: dict[int, Node] = {}
        self.load_back_threshold = 10
        self.full_evictable_size_ = 0
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.root_node = Node(0, [], None, old.Slots())

    def add(self, number: int, parent: old.Node, tokens: int, *, host: bool = False) -> Node:
        """A node behind ``parent``, which holds tokens counted on from it."""
        start = sum(len(step) for step in self.keys_to(parent))
        node = Node(number, list(range(start, start + tokens)), parent, old.Slots(range(tokens)))
        node.host_value = old.Slots(range(tokens)) if host else None
        self.full_evictable_size_ += tokens
        return node

    def keys_to(self, node: old.Node) -> list[list[int]]:
        return [] if node.parent is None else [*self.keys_to(node.parent), node.key]

    def match_prefix(self, params: Any) -> Any:
        return params.result

    def insert(self, params: Any) -> Any:  # type: ignore[override]
        raise AssertionError("the base class inserts")

    def evict(self, params: Any) -> Any:
        for node in params.victims:
            self._evict_to_host(node)
        if params.mamba_num:
            self.evict_mamba(params.mamba_num)
        # As SGLang says it: without what went with the states.
        return SimpleNamespace(num_tokens_evicted=sum(len(node.key) for node in params.victims))

    def evict_mamba(self, mamba_num: int) -> int:
        for node in list(self.root_node.children.values()):
            if node.value is not None:
                self._evict_to_host(node)
        return mamba_num

    def _evict_to_host(self, node: Any) -> tuple[int, int]:
        tokens, node.value = len(node.value), None
        self.full_evictable_size_ -= tokens
        return tokens, 1

    def _evict_regular(self, node: Any) -> tuple[int, int]:
        tokens, node.value = len(node.value), None
        self.full_evictable_size_ -= tokens
        return tokens + self.drop_ancestors(node), 1

    def drop_ancestors(self, node: Any) -> int:
        tokens = 0
        while node.parent is not self.root_node:
            node = node.parent
            if node.value is not None:
                tokens += len(node.value)
                self.full_evictable_size_ -= len(node.value)
            self._delete_tombstone_leaf(node)
        return tokens

    def _delete_tombstone_leaf(self, node: Any) -> None: ...

    def evict_host(self, num_tokens: int) -> None:
        self.drop_ancestors(self.leaf)

    leaf: Any = None

    def init_load_back(self, params: Any) -> Any:
        loaded = self.load_back(params.best_match_node, None, params.req)
        return (loaded if loaded is not None else old.Slots()), params.best_match_node

    def load_back(self, node: Any, mem_quota: int | None = None, req: Any = None) -> Any:
        slots = node.host_value if node.value is None else old.Slots()
        loaded = self.cache_controller.load(host_indices=slots, node_id=node.id)
        if slots:
            node.value = loaded
        node.mamba_value = node.mamba_host_value
        self.ongoing_load_back[node.id] = node
        return loaded

    def write_backup(self, node: Node, write_back: bool = False) -> int:
        """Without its KV, where that is in L2 already."""
        slots = node.value if node.host_value is None else old.Slots()
        node.host_value = self.cache_controller.write(device_indices=slots, node_id=node.id)
        self.ongoing_write_through[node.id] = node
        return len(slots or ())

    def writing_check(self, write_back: bool = False) -> None:
        self.cache_controller.ack_write_queue.clear()
        self.ongoing_write_through.clear()

    def loading_check(self) -> None:
        self.cache_controller.ack_load_queue.clear()
        self.ongoing_load_back.clear()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Witness]:
    w = old.witness_at(tmp_path)
    targets: dict[tuple[str, str], type] = {
        HIMAMBA_TREE: HiMamba,
        MAMBA_TREE: Mamba,
        HYBRID: Controller,
        old.MHA_POOL: old.MhaPool,
    }
    undo = old.hooked(w, targets)
    yield w
    for owner, attribute, original in reversed(undo):
        setattr(owner, attribute, original)
    assert not old.events(tmp_path, HookFailed)


def evicted(directory: Path) -> list[tuple[int, int, int, int, int]]:
    """Call, node, span and tokens of everything that left L1."""
    return [(e.call, e.node, e.start, e.end, e.tokens) for e in old.events(directory, EvictedL1)]


def test_the_tree_that_is_built_says_the_family_and_its_pools(watched: Witness) -> None:
    built = HiMamba(None, None)
    assert (watched.family, watched.tree) == (HIMAMBA, built)
    assert watched.pools == {id(built.full_kv_pool_host): 0, id(built.mamba_pool_host): 1}


def test_another_trees_inserts_are_not_looked_at(watched: Witness, tmp_path: Path) -> None:
    HiMamba(None, None)
    with pytest.raises(NotImplementedError):
        Mamba().cache_unfinished_req(request(8))
    assert not old.events(tmp_path, Inserted) and watched.inserting is None


def matched(built: HiMamba, node: Node, device_node: old.Node, host: int) -> None:
    device = sum(len(key) for key in built.keys_to(device_node))
    result = SimpleNamespace(
        device_indices=[0] * device, last_device_node=device_node, last_host_node=node, host_hit_length=host
    )
    built.match_prefix(SimpleNamespace(key=list(range(64)), result=result))


def test_a_state_in_l2_is_no_token_of_l2(watched: Witness, tmp_path: Path) -> None:
    built = HiMamba(None, None)
    node = built.add(1, built.root_node, 16, host=True)
    node.mamba_host_value = old.Slots([0])
    matched(built, node, node, host=1)
    (match,) = old.events(tmp_path, Matched)
    assert (match.device, match.host, match.mamba_host, match.best_node) == (16, 0, 1, 1)


@pytest.mark.parametrize("state", [False, True])
def test_the_kv_of_a_host_hit_is_taken_from_the_nodes(watched: Witness, tmp_path: Path, state: bool) -> None:
    built = HiMamba(None, None)
    first = built.add(1, built.root_node, 16)
    node = built.add(2, first, 8, host=True)
    node.value = None
    node.mamba_host_value = old.Slots([0]) if state else None
    matched(built, node, first, host=8)
    (match,) = old.events(tmp_path, Matched)
    assert (match.device, match.host, match.mamba_host, match.best_node) == (16, 8, int(state), 2)


def test_states_are_evicted_in_an_eviction_of_their_own(watched: Witness, tmp_path: Path) -> None:
    built = HiMamba(None, None)
    built.add(1, built.root_node, 16, host=True)
    watched.allocations.append(Allocation(Cause.PREFILL, ()))
    built.evict_mamba(2)
    (begin,), (end,) = old.events(tmp_path, EvictBegin), old.events(tmp_path, EvictEnd)
    assert (begin.cause, begin.asked, begin.asked_mamba) == (Cause.PREFILL, 0, 2)
    assert evicted(tmp_path) == [(begin.call, 1, 0, 16, 16)] and (end.call, end.freed) == (begin.call, 16)
    assert watched.evict_calls == []


def test_what_goes_with_the_states_counts_in_the_eviction_around_it(watched: Witness, tmp_path: Path) -> None:
    built = HiMamba(None, None)
    first = built.add(1, built.root_node, 16, host=True)
    second = built.add(2, first, 8, host=True)
    built.evict(SimpleNamespace(num_tokens=8, mamba_num=1, victims=[second]))
    (begin,), (end,) = old.events(tmp_path, EvictBegin), old.events(tmp_path, EvictEnd)
    assert (begin.asked, begin.asked_mamba, end.freed) == (8, 1, 24)
    assert evicted(tmp_path) == [(begin.call, 2, 16, 24, 8), (begin.call, 1, 0, 16, 16)]
    assert {e.how for e in old.events(tmp_path, EvictedL1)} == {Eviction.DEMOTED}


def test_a_dropped_leaf_takes_its_stateless_ancestors_along(watched: Witness, tmp_path: Path) -> None:
    built = HiMamba(None, None)
    first = built.add(1, built.root_node, 4)
    second = built.add(2, first, 8)
    leaf = built.add(3, second, 16)
    first.value = None
    watched.evict_calls.append(7)
    built._evict_regular(leaf)
    assert evicted(tmp_path) == [(7, 2, 4, 12, 8), (7, 3, 12, 28, 16)]
    assert {(e.how, e.unbacked) for e in old.events(tmp_path, EvictedL1)} == {
        (Eviction.DROPPED, 8),
        (Eviction.DROPPED, 16),
    }


def test_an_ancestor_dropped_on_the_hosts_account_is_an_eviction(watched: Witness, tmp_path: Path) -> None:
    built = HiMamba(None, None)
    first = built.add(1, built.root_node, 8)
    built.leaf = built.add(2, first, 16, host=True)
    built.evict_host(16)
    (begin,), (end,) = old.events(tmp_path, EvictBegin), old.events(tmp_path, EvictEnd)
    assert evicted(tmp_path) == [(begin.call, 1, 0, 8, 8)] and (end.call, end.freed) == (begin.call, 8)
    assert watched.evict_calls == []


def load(built: HiMamba, node: Node) -> None:
    built.init_load_back(SimpleNamespace(best_match_node=node, host_hit_length=1, req=None))
    built.cache_controller.start_loading()
    built.loading_check()


def test_a_load_of_kv_and_state_is_one_of_kv(watched: Witness, tmp_path: Path) -> None:
    built = HiMamba(None, None)
    node = built.add(1, built.root_node, 16, host=True)
    node.value, node.mamba_host_value = None, old.Slots([0])
    load(built, node)
    queued, decided = old.events(tmp_path, LoadQueued, LoadBackDecided)
    assert (queued.start, queued.end) == (0, 16)
    assert (decided.promised, decided.loaded, decided.reason) == (16, 16, Refusal.NONE)
    started, done = old.events(tmp_path, TransferStarted, LoadDone)
    assert (started.transfer, started.tokens) == (done.transfer, done.tokens) and done.bytes == 16 * 32 + 8


def test_a_load_of_a_state_alone_is_no_transfer(watched: Witness, tmp_path: Path) -> None:
    built = HiMamba(None, None)
    node = built.add(1, built.root_node, 16, host=True)
    node.mamba_host_value = old.Slots([0])
    load(built, node)
    assert not old.events(tmp_path, LoadQueued, LoadBackDecided, TransferStarted, LoadDone)
    assert watched.transfer_of_load == {}


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 1), (2,)], ids=str)
def test_a_node_whose_state_alone_is_loaded_is_no_part_of_the_copy(
    watched: Witness, tmp_path: Path, order: tuple[int, ...]
) -> None:
    built = HiMamba(None, None)
    nodes = {number: built.add(number, built.root_node, 4 * number, host=True) for number in order}
    for number, node in nodes.items():
        node.value, node.mamba_host_value = node.value if number == 2 else None, old.Slots([0])
        built.init_load_back(SimpleNamespace(best_match_node=node, host_hit_length=1, req=None))
    built.cache_controller.start_loading()
    built.loading_check()
    with_kv = tuple(number for number in order if number != 2)
    copies = old.events(tmp_path, TransferStarted, LoadDone)
    assert [(c.nodes, c.tokens, c.bytes) for c in copies] == (
        2 * [(with_kv, 4 * sum(with_kv), 4 * sum(with_kv) * 32 + 8 * len(order))] if with_kv else []
    )
    assert watched.transfer_of_load == {}


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 1), (2,)], ids=str)
def test_a_node_whose_state_alone_is_backed_up_is_no_part_of_the_copy(
    watched: Witness, tmp_path: Path, order: tuple[int, ...]
) -> None:
    """SGLang 0.5.23 does it with window KV that had left L2 or never was there: 0 tokens are queued."""
    built = HiMamba(None, None)
    for number in order:
        built.write_backup(built.add(number, built.root_node, 4 * number, host=number == 2))
    built.cache_controller.start_writing()
    built.writing_check()
    with_kv = tuple(number for number in order if number != 2)
    started = old.events(tmp_path, TransferStarted)
    assert [(s.nodes, s.tokens) for s in started] == ([(with_kv, 4 * sum(with_kv))] if with_kv else [])
    assert tuple(e.node for e in old.events(tmp_path, BackupQueued)) == with_kv
    assert [(e.node, e.transfer) for e in old.events(tmp_path, BackupAcked)] == [
        (number, started[0].transfer) for number in with_kv
    ]
    assert watched.transfer_of_write == {}
