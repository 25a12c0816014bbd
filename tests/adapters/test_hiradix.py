"""Seams of the adapters for trees of node objects: who is watched, what order events have, what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvwitness.patches.contract import HIRADIX as FAMILY
from kvwitness.patches.hooks import common
from kvwitness.patches.schema.events import (
    BackupAcked,
    BackupQueued,
    Direction,
    EvictedL1,
    EvictEnd,
    Eviction,
    HookFailed,
    HostAlloc,
    Inserted,
    LoadBackDecided,
    LoadDone,
    LoadQueued,
    LoadWaited,
    Matched,
    PathNode,
    Refusal,
    Run,
    TransferStarted,
)
from kvwitness.patches.witness import Witness

from . import old_tree as old

Make = Callable[..., old.HiRadix]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Witness]:
    """A witness whose hooks stand on the small tree's classes."""
    w = old.witness_at(tmp_path)
    undo = old.hooked(
        w,
        {
            old.HIRADIX: old.HiRadix,
            old.RADIX: old.Radix,
            old.CONTROLLER: old.Controller,
            old.POOL: old.Pool,
            old.MHA_POOL: old.MhaPool,
            old.COUNTER: old.LayerDoneCounter,
            old.SCHEDULER: old.Scheduler,
            old.RESULTS: old.Scheduler,
        },
    )
    # In 0.4 the class that writes is the same one; here it is a subclass.
    undo += old.hooked(w, {old.CONTROLLER: old.ThreadedController})
    yield w
    for owner, attribute, original in reversed(undo):
        setattr(owner, attribute, original)


def tree(copies_by: str = "streams") -> old.HiRadix:
    allocator = SimpleNamespace(size=100)
    return old.HiRadix(None, allocator, None, old.PAGE, 2.0, 0, "write_through", copies_by, "layer_first", False)


def request(tokens: int, rid: str = "r") -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=list(range(tokens)),
        output_ids=[],
        extra_key=None,
        finished=lambda: True,
        finished_reason=None,
        cached_tokens=0,
    )


def no_failures(directory: Path) -> bool:
    return not old.events(directory, HookFailed)


def test_the_tree_that_is_built_says_the_family(watched: Witness, tmp_path: Path) -> None:
    built = tree()
    assert watched.family == FAMILY and watched.tree is built and watched.controller is built.cache_controller
    assert watched.pools == {id(built.token_to_kv_pool_host): 0}
    assert no_failures(tmp_path)


def test_a_policys_own_radix_cache_is_not_the_servers_tree(watched: Witness, tmp_path: Path) -> None:
    tree()
    with pytest.raises(NotImplementedError):
        old.Radix().cache_unfinished_req(request(8))
    assert not old.events(tmp_path, Inserted)
    assert watched.inserting is None and no_failures(tmp_path)


def test_an_insert_is_told_with_its_path_and_its_backup_before_the_launch(watched: Witness, tmp_path: Path) -> None:
    built = tree()
    built.cache_unfinished_req(request(18))
    built.writing_check()
    found = old.events(tmp_path, HostAlloc, BackupQueued, TransferStarted, Inserted, BackupAcked)
    assert old.names(found) == ["HostAlloc", "BackupQueued", "TransferStarted", "Inserted", "BackupAcked"]
    _, backup, started, inserted, acked = found
    assert (backup.start, backup.end, backup.tokens, backup.slots) == (0, 16, 16, (Run(0, 16),))
    assert (started.tokens, started.bytes, started.nodes) == (16, 16 * 32, (backup.node,))
    assert inserted.path == (PathNode(backup.node, 0, 16, 1),) and inserted.key_tokens == 16
    assert (acked.transfer, acked.node, acked.duration_ns) == (started.transfer, backup.node, -1)
    assert no_failures(tmp_path)


def test_threads_of_04_launch_a_backup_when_it_is_handed_over(watched: Witness, tmp_path: Path) -> None:
    built = tree("threads")
    built.cache_unfinished_req(request(18))
    built.writing_check()
    found = old.events(tmp_path, BackupQueued, TransferStarted, BackupAcked)
    assert old.names(found) == ["BackupQueued", "TransferStarted", "BackupAcked"]
    assert (found[1].tokens, found[1].bytes) == (16, 16 * 32)
    assert found[2].transfer == found[1].transfer
    assert no_failures(tmp_path)


@pytest.mark.parametrize("layers", [2, 1])
def test_threads_of_04_launch_loads_when_a_batch_is_ready(watched: Witness, tmp_path: Path, layers: int) -> None:
    built = tree("threads")
    built.cache_unfinished_req(request(16))
    built.writing_check()
    built.evict(16)
    result = built.match_prefix(list(range(16)))
    built.init_load_back(result.last_host_node, result.host_hit_length)
    assert not [e for e in old.events(tmp_path, TransferStarted) if e.direction == Direction.H2D]
    built.ready_to_load_host_cache()
    # The thread at work.
    for layer in range(layers):
        built.token_to_kv_pool_host.load_to_device_per_layer(None, old.Slots(range(16)), old.Slots(), layer, "direct")
    built.loading_check()
    (started,) = (e for e in old.events(tmp_path, TransferStarted) if e.direction == Direction.H2D)
    (done,) = old.events(tmp_path, LoadDone)
    assert (done.transfer, done.tokens, done.nodes) == (started.transfer, started.tokens, started.nodes)
    assert (started.bytes, done.bytes) == (16 * 32, 16 * 32 * layers // 2)
    assert no_failures(tmp_path)


class Pass:
    """A forward pass of 0.4 beside the loading thread; ``order`` is how the steps of the two fall in time."""

    def __init__(self, built: old.HiRadix, told: int, order: str) -> None:
        self.built, self.told, self.order = built, told, order
        self.counter = built.cache_controller.layer_done_counter
        self.layer = 0
        self.reqs = [request(18)]
        self.reqs[0].prefix_len, self.reqs[0].extend_end = 16, 18
        self.reqs[0].full_untruncated_fill_ids = list(range(18))
        self.forward_mode = SimpleNamespace(is_extend=lambda: True)

    def forward(self) -> None:
        self.counter.set_consumer(self.told)
        for step in self.order:
            match step:
                case "w":  # The thread wakes up and starts with the queued loads.
                    self.counter.update_producer()
                    self.counter.reset()
                case "c":  # It copies the next layer.
                    pool: Any = self.built.token_to_kv_pool_host
                    slots = old.Slots(range(16))
                    pool.load_to_device_per_layer(None, slots, old.Slots(), self.layer, "direct")
                    self.counter.increment()
                    self.layer += 1
                case _:  # The pass goes on to read layer 0 or 1.
                    self.counter.wait_until(int(step))


@pytest.mark.parametrize(
    ("order", "off_by", "layers", "early"),
    [
        ("wc0c1", 0, 2, 0),
        ("wcc00111", 0, 2, 0),
        # The count of the load before stands until the thread wakes up: the pass does not wait.
        ("0wc0c1", 0, 2, 1),
        ("01wcc", 0, 0, 1),
        # The pass reads the last layer only after it looked at another count.
        ("wc0c", 0, 1, 0),
        # It was told another count than the one that the load has.
        ("wcc01", 1, 0, 0),
        ("01wcc", 1, 0, 0),
    ],
)
def test_a_pass_of_04_that_did_not_wait_is_told(
    watched: Witness, tmp_path: Path, order: str, off_by: int, layers: int, early: int
) -> None:
    built = tree("threads")
    built.cache_unfinished_req(request(16))
    built.writing_check()
    built.evict(16)
    result = built.match_prefix(list(range(16)))
    built.init_load_back(result.last_host_node, result.host_hit_length)
    slot = built.ready_to_load_host_cache()
    batch, scheduler = Pass(built, (slot + off_by) % 3, order), old.Scheduler()
    scheduler.run_batch(batch)
    assert not old.events(tmp_path, LoadWaited)
    scheduler.process_batch_result_prefill(batch, None)
    (started,) = (e for e in old.events(tmp_path, TransferStarted) if e.direction == Direction.H2D)
    (waited,) = old.events(tmp_path, LoadWaited)
    assert (waited.transfer, waited.layers, waited.early) == (started.transfer, layers, early)
    assert no_failures(tmp_path)


def test_a_flush_forgets_loads_that_the_thread_never_made(watched: Witness, tmp_path: Path) -> None:
    built = tree("threads")
    for order in ("", "wc0c1"):
        built.cache_unfinished_req(request(16))
        built.writing_check()
        built.evict(16)
        result = built.match_prefix(list(range(16)))
        built.init_load_back(result.last_host_node, result.host_hit_length)
        batch, scheduler = Pass(built, built.ready_to_load_host_cache(), order), old.Scheduler()
        scheduler.run_batch(batch)
        if not order:
            built.reset()
        scheduler.process_batch_result_prefill(batch, None)
    (waited,) = old.events(tmp_path, LoadWaited)
    assert (waited.layers, waited.early) == (2, 0)
    assert no_failures(tmp_path)


def load(built: old.HiRadix, tokens: int) -> None:
    """Insert, evict, match and load back ``tokens`` tokens."""
    built.cache_unfinished_req(request(tokens))
    built.writing_check()
    built.evict(tokens)
    result = built.match_prefix(list(range(tokens)))
    built.init_load_back(result.last_host_node, result.host_hit_length)
    built.cache_controller.start_loading()
    built.loading_check()


def test_a_load_back_is_told_with_positions_layers_and_end(watched: Witness, tmp_path: Path) -> None:
    load(tree(), 16)
    (matched,) = (m for m in old.events(tmp_path, Matched) if m.host)
    assert (matched.device, matched.host, matched.path) == (0, 16, (PathNode(matched.best_node, 0, 16, 0),))
    queued, decided = old.events(tmp_path, LoadQueued, LoadBackDecided)
    assert (queued.start, queued.end, queued.slots) == (0, 16, (Run(0, 16),))
    assert (decided.promised, decided.loaded, decided.reason) == (16, 16, Refusal.NONE)
    started, done = (e for e in old.events(tmp_path, TransferStarted, LoadDone) if getattr(e, "direction", 2) == 2)
    assert (started.tokens, started.bytes, started.nodes) == (done.tokens, done.bytes, done.nodes)
    assert (done.transfer, done.bytes) == (started.transfer, 16 * 32)
    assert no_failures(tmp_path)


def test_a_layer_that_was_not_copied_is_missing_in_the_bytes(
    watched: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tree()
    monkeypatch.setattr(type(built.cache_controller.mem_pool_host), "layer_num", 3)
    original = old.MhaPool.load_to_device_per_layer

    def skips_the_last(self: Any, *args: Any) -> None:
        if args[3] < 2:
            original(self, *args)

    monkeypatch.setattr(old.MhaPool, "load_to_device_per_layer", skips_the_last)
    load(built, 16)
    (done,) = old.events(tmp_path, LoadDone)
    assert done.bytes < 16 * 32


def test_a_short_load_back_is_refused_for_its_length(watched: Witness, tmp_path: Path) -> None:
    load(tree(), 8)
    (decided,) = old.events(tmp_path, LoadBackDecided)
    assert (decided.promised, decided.loaded, decided.reason) == (8, 0, Refusal.TOO_SHORT)
    assert no_failures(tmp_path)


def test_write_back_leaves_l1_when_its_copy_is_complete(watched: Witness, tmp_path: Path) -> None:
    built = tree()
    built.cache_unfinished_req(request(16))
    built.writing_check()
    # As with write_back: the node has no copy when the eviction chooses it.
    next(iter(built.root_node.children.values())).host_value = None
    built.evict(16)
    found = [
        (type(e).__name__, getattr(e, "how", None)) for e in old.events(tmp_path, EvictedL1, BackupAcked, EvictEnd)
    ]
    assert found[1:] == [
        ("EvictedL1", Eviction.STAGED),
        ("BackupAcked", None),
        ("EvictedL1", Eviction.DEMOTED),
        ("EvictEnd", None),
    ]
    end = old.events(tmp_path, EvictEnd)[0]
    assert end.freed == 16 == sum(e.tokens for e in old.events(tmp_path, EvictedL1))
    assert no_failures(tmp_path)


def test_tokens_of_a_finished_request_include_its_output() -> None:
    # SGLang brings full_untruncated_fill_ids up to date only when the next prefill begins.
    req = SimpleNamespace(origin_input_ids=[1, 2], output_ids=[3], full_untruncated_fill_ids=[1, 2])
    assert common.tokens_of(req, 3) == [1, 2, 3]
    assert common.tokens_of(req) == [1, 2]
