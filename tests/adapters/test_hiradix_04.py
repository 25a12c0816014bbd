"""HiRadixCache 0.4.6 to 0.4.8: the results that differ, and what is said of a copy that nobody saw complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvwitness.patches.contract import HIRADIX
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
from . import tree_04
from .test_hiradix import request

LAYERS = tree_04.PagePool.layer_num


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Witness]:
    w = old.witness_at(tmp_path)
    undo = old.hooked(
        w,
        {
            old.HIRADIX: tree_04.HiRadix,
            old.RADIX: tree_04.Radix,
            old.CONTROLLER: tree_04.Controller,
            tree_04.HOST_POOL: tree_04.HostPool,
            tree_04.MHA_POOL: tree_04.PagePool,
            old.COUNTER: tree_04.LayerDoneCounter,
            old.SCHEDULER: old.Scheduler,
            old.RESULTS: old.Scheduler,
        },
    )
    yield w
    for owner, attribute, original in reversed(undo):
        setattr(owner, attribute, original)
    assert not old.events(tmp_path, HookFailed)


def tree() -> tree_04.HiRadix:
    return tree_04.HiRadix(None, SimpleNamespace(size=100), None, old.PAGE, 2.0, 0, "write_through")


def inserted(tokens: int) -> tree_04.HiRadix:
    """A tree that got the first ``tokens`` tokens, backed up."""
    built = tree()
    built.cache_unfinished_req(request(tokens))
    built.writing_check()
    return built


def test_the_constructor_without_a_backend_is_known(watched: Witness) -> None:
    built = tree()
    assert (watched.family, watched.tree, watched.controller) == (HIRADIX, built, built.cache_controller)
    assert watched.pools == {id(built.token_to_kv_pool_host): 0}


def test_an_insert_and_its_backup_are_told(watched: Witness, tmp_path: Path) -> None:
    inserted(18)
    found = old.events(tmp_path, HostAlloc, BackupQueued, TransferStarted, Inserted, BackupAcked)
    assert old.names(found) == ["HostAlloc", "BackupQueued", "TransferStarted", "Inserted", "BackupAcked"]
    _, backup, started, insert, acked = found
    assert (backup.start, backup.end, backup.slots) == (0, 16, (Run(0, 16),))
    assert (started.nodes, acked.transfer) == ((backup.node,), started.transfer)
    assert (insert.existing, insert.path) == (0, (PathNode(backup.node, 0, 16, 1),))


def test_a_match_is_told_from_its_tuple(watched: Witness, tmp_path: Path) -> None:
    built = inserted(8)
    built.cache_unfinished_req(request(24))
    built.writing_check()
    built.evict(16)
    built.match_prefix(key=list(range(24)), include_evicted=True)
    built.match_prefix(key=list(range(24)))
    both, device_only = old.events(tmp_path, Matched)[-2:]
    assert (both.device, both.host, both.key_tokens) == (8, 16, 24)
    assert both.path == (PathNode(10, 0, 8, 1), PathNode(18, 8, 24, 0))
    assert (both.device_node, both.best_node) == (10, 18)
    # Without the deepest node nothing is promised of L2.
    assert (device_only.device, device_only.host, device_only.path) == (8, 0, (PathNode(10, 0, 8, 1),))


def test_demotion_is_told(watched: Witness, tmp_path: Path) -> None:
    inserted(16).evict(16)
    (victim,), (end,) = old.events(tmp_path, EvictedL1), old.events(tmp_path, EvictEnd)
    assert (victim.start, victim.end, victim.how, victim.tokens, end.freed) == (0, 16, Eviction.DEMOTED, 16, 16)


def loaded(built: tree_04.HiRadix, tokens: int, *, keywords: bool = False) -> None:
    prefix, _, deepest = built.match_prefix(key=list(range(tokens)), include_evicted=True)
    if keywords:
        built.init_load_back(last_node=deepest, prefix_indices=prefix)
    else:
        built.init_load_back(deepest, prefix)


@pytest.mark.parametrize("keywords", [False, True])
def test_a_load_back_behind_a_prefix_in_l1(watched: Witness, tmp_path: Path, keywords: bool) -> None:
    built = inserted(8)
    built.cache_unfinished_req(request(24))
    built.writing_check()
    built.evict(16)
    loaded(built, 24, keywords=keywords)
    queued, decided = old.events(tmp_path, LoadQueued, LoadBackDecided)
    assert (queued.start, queued.end, queued.tokens, queued.slots) == (8, 24, 16, (Run(8, 16),))
    assert (decided.node, decided.promised, decided.loaded, decided.reason) == (18, 16, 16, Refusal.NONE)
    assert not [e for e in old.events(tmp_path, TransferStarted) if e.direction == Direction.H2D]
    built.ready_to_load_cache()
    built.cache_controller.copy_layers(LAYERS)
    built.loading_check()
    (started,) = (e for e in old.events(tmp_path, TransferStarted) if e.direction == Direction.H2D)
    (done,) = old.events(tmp_path, LoadDone)
    assert (done.transfer, done.tokens, done.bytes) == (started.transfer, 16, 16 * 32)
    assert (started.tokens, started.bytes, started.nodes) == (done.tokens, done.bytes, done.nodes)


@pytest.mark.parametrize(("layers", "seen"), [(LAYERS, 16 * 32), (1, 16 * 32 // LAYERS), (0, None)])
def test_a_load_is_done_with_the_copies_that_were_seen(
    watched: Witness, tmp_path: Path, layers: int, seen: int | None
) -> None:
    """None of them: single tokens, which are copied elsewhere and acknowledged too early."""
    built = inserted(16)
    built.evict(16)
    loaded(built, 16)
    built.ready_to_load_cache()
    built.cache_controller.copy_layers(layers)
    built.loading_check()
    assert [done.bytes for done in old.events(tmp_path, LoadDone)] == ([] if seen is None else [seen])


def test_a_refusal_is_told(watched: Witness, tmp_path: Path) -> None:
    built = inserted(16)
    built.load_back_threshold = 32
    built.evict(16)
    loaded(built, 16)
    (decided,) = old.events(tmp_path, LoadBackDecided)
    assert (decided.promised, decided.loaded, decided.reason) == (16, 0, Refusal.TOO_SHORT)
    assert not old.events(tmp_path, LoadQueued)


def test_a_load_back_of_what_is_in_l1_is_none(watched: Witness, tmp_path: Path) -> None:
    loaded(inserted(16), 16)
    assert not old.events(tmp_path, LoadBackDecided)


class Pass:
    """A forward pass beside the loading thread; ``order`` is how the steps of the two fall in time."""

    def __init__(self, built: tree_04.HiRadix, order: str) -> None:
        self.controller, self.order, self.layer = built.cache_controller, order, 0
        self.reqs = [request(18)]
        self.reqs[0].prefix_len, self.reqs[0].extend_end = 16, 18
        self.reqs[0].full_untruncated_fill_ids = list(range(18))
        self.forward_mode = SimpleNamespace(is_extend=lambda: True)

    def forward(self) -> None:
        for step in self.order:
            match step:
                case "w":  # The thread wakes up.
                    self.controller.layer_done_counter.reset()
                case "c":  # It copies the next layer.
                    self.controller.copy_layer(old.Slots(range(16)), self.layer)
                    self.layer += 1
                case _:  # The pass goes on to read layer 0 or 1.
                    self.controller.layer_done_counter.wait_until(int(step))


@pytest.mark.parametrize(
    ("order", "layers", "early"), [("wc0c1", 2, 0), ("wcc01", 2, 0), ("0wcc1", 1, 1), ("01wcc", 0, 1), ("wc0", 1, 0)]
)
def test_a_pass_that_did_not_wait_is_told(
    watched: Witness, tmp_path: Path, order: str, layers: int, early: int
) -> None:
    """Until the thread wakes up the count of the load before stands, and a pass does not wait."""
    built = inserted(16)
    built.evict(16)
    loaded(built, 16)
    built.ready_to_load_cache()
    batch, scheduler = Pass(built, order), old.Scheduler()
    scheduler.run_batch(batch)
    scheduler.process_batch_result_prefill(batch, None)
    (waited,) = old.events(tmp_path, LoadWaited)
    assert (waited.layers, waited.early) == (layers, early)
