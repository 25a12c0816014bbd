"""The room that there was when an eviction began: read without a device tensor, and never at the cost of a hook."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvwitness.patches.hooks import common, nodes
from kvwitness.patches.schema.events import Cause, EvictBegin, EvictEnd, EvictHost, EvictHostBegin, L1Room
from kvwitness.patches.witness import Allocation, Witness

from . import old_tree as old


def raising() -> int:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("allocator", "free"),
    [
        (SimpleNamespace(available_size=lambda: 40), 40),
        (SimpleNamespace(available_size=raising, full_available_size=lambda: 48), 48),
        (SimpleNamespace(available_size=raising), -1),
        (SimpleNamespace(size=100), -1),
        (None, -1),
    ],
)
def test_an_eviction_says_what_was_free_in_l1(tmp_path: Path, allocator: Any, free: int) -> None:
    w = old.witness_at(tmp_path)
    tree = SimpleNamespace(token_to_kv_pool_allocator=allocator, evictable_size_=64)
    token = common.enter_evict(w, (tree, 16), {})
    tree.evictable_size_ = 32
    common.leave_evict(w, token)
    common.after_evict(w, token, None, (tree, 16), {})
    begin, room, end = old.events(tmp_path, EvictBegin, L1Room, EvictEnd)
    assert begin.call == room.call == end.call
    assert (begin.asked, room.free, end.freed) == (16, free, 32)


def watching(directory: Path, available: list[int]) -> Witness:
    w = old.witness_at(directory)
    pool = SimpleNamespace(available_size=lambda: available[0])
    w.controller = SimpleNamespace(mem_pool_host=pool)
    return w


def test_an_l2_eviction_is_told_from_its_beginning(tmp_path: Path) -> None:
    available = [8]
    w = watching(tmp_path, available)
    req = SimpleNamespace(rid="needs-room")
    w.allocations.append(Allocation(Cause.LOAD_BACK, (req,)))
    token = common.enter_evict_host(w, (None, 56), {})
    available[0] = 72
    common.after_evict_host(w, token, None, (None, 56), {})
    begin, end = old.events(tmp_path, EvictHostBegin, EvictHost)
    assert begin.call == end.call
    assert (begin.asked, begin.available) == (56, 8)
    assert (end.asked, end.freed, end.cause, end.req) == (56, 64, Cause.LOAD_BACK, w.req_id(req))


def test_other_pools_evictions_are_not_told(tmp_path: Path) -> None:
    w = watching(tmp_path, [8])
    arguments = (None, 56, nodes.FULL + 1)
    common.after_evict_host(w, common.enter_evict_host(w, arguments, {}), None, arguments, {})
    assert not old.events(tmp_path, EvictHostBegin, EvictHost)
