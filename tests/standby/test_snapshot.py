"""How the nodes of each kind of tree are found, and of which the snapshot keeps silent."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvwitness.patches.config import Config, Faults
from kvwitness.patches.contract import HIRADIX, UNIFIED
from kvwitness.patches.hooks import nodes
from kvwitness.patches.schema import events as ev
from kvwitness.patches.standby.snapshot import UnderWay, Walk
from kvwitness.patches.standby.trees import Reader, reader_for
from kvwitness.patches.witness import Witness
from standby.fakes import PAGE, HiRadixCache, HostPool, Node, Slots


class Step(NamedTuple):
    """One node of a path, as the Rust core tells it."""

    node_id: int
    parent_id: int
    path_start: int
    path_end: int
    full_value_len: int | None
    num_children: int = 0


class RustCore:
    """Node ids alone: no list of nodes, no node objects."""

    def __init__(self, held: dict[int, tuple[list[Step], list[int] | None]]) -> None:
        self._held = held
        self.asked = 0
        self.root = 0

    @property
    def root_node(self) -> Any:
        raise NotImplementedError

    def root_node_handle(self) -> int:
        return self.root

    def is_backuped(self, number: int) -> bool:
        self.asked += 1
        return self._held[number][1] is not None

    def collect_path_info(self, numbers: list[int]) -> tuple[tuple[Step, ...], ...]:
        return tuple(tuple(self._held[number][0]) for number in numbers)

    def build_storage_backup_spec(self, number: int, _: bool) -> Any:
        steps, host = self._held[number]
        tokens = array("q", range(steps[-1].path_start, steps[-1].path_end))
        return None if host is None else SimpleNamespace(host_value=Slots(host), token_ids=tokens)

    def full_evictable_size(self) -> int:
        return sum(s[-1].full_value_len or 0 for s, _ in self._held.values())

    def full_protected_size(self) -> int:
        return 0


def rust(tmp_path: Any, held: dict[int, tuple[list[Step], list[int] | None]]) -> tuple[Witness, RustCore, list[Any]]:
    w = Witness(Config(tmp_path, 4 << 20, Faults()))
    core = RustCore(held)
    slots = sum(len(host) for _, host in held.values() if host is not None)

    class Pool(HostPool):
        def available_size(self) -> int:
            return self.size - slots

    w.tree = SimpleNamespace(
        tree_core=core,
        tree_components=(0,),
        ongoing_write_through={},
        ongoing_load_back={},
        token_to_kv_pool_host=Pool(),
    )
    w.family, w.page_size, w.find_path = UNIFIED, PAGE, nodes.by_path_info(w.tree)
    seen: list[Any] = []
    w.emit = lambda kind, *values, tail=b"": seen.append((kind, values))
    return w, core, seen


def walked(w: Witness, reader: Reader | None) -> Walk:
    walk = Walk(w, reader)
    for _ in walk.run():
        pass
    return walk


FIRST = Step(70, 0, 0, 32, 32)
SECOND = Step(90, 70, 32, 64, None)


def test_numbers_are_tried_until_all_that_is_held_was_found(tmp_path: Any) -> None:
    held = {70: ([FIRST], list(range(32))), 90: ([FIRST, SECOND], list(range(64, 96)))}
    w, core, seen = rust(tmp_path, held)
    walk = walked(w, reader_for(w))
    assert walk.complete and walk.nodes == 2 and core.asked < 400
    found = [values[:6] for kind, values in seen if kind is ev.ResidentNode]
    assert found == [(70, -1, 0, 32, 1, 1), (90, 70, 32, 64, 0, 1)]
    assert [values[0] for kind, values in seen if kind is ev.ResidentDigests] == [70, 90]


def test_a_node_whose_tokens_are_not_told_has_no_digests_and_neither_have_those_below(tmp_path: Any) -> None:
    held = {70: ([FIRST], None), 90: ([FIRST, SECOND], list(range(64, 96)))}
    w, _, seen = rust(tmp_path, held)
    walked(w, reader_for(w))
    assert not [values for kind, values in seen if kind is ev.ResidentDigests]
    assert len([values for kind, values in seen if kind is ev.ResidentNode]) == 2


def test_a_prefix_under_a_root_of_its_own_has_no_digests(tmp_path: Any) -> None:
    w, _, seen = rust(tmp_path, {70: ([FIRST._replace(parent_id=33)], list(range(32)))})
    walked(w, reader_for(w))
    assert not [values for kind, values in seen if kind is ev.ResidentDigests]


def test_a_reset_ends_the_walk(tmp_path: Any) -> None:
    w, core, seen = rust(tmp_path, {70: ([FIRST], list(range(32)))})
    walk = Walk(w, reader_for(w))
    course = walk.run()
    next(course)
    core.root = 71
    for _ in course:
        pass
    assert not walk.complete and seen[-1] == (ev.SnapshotEnd, (0, 0, 0, 0))


def test_a_tree_that_shows_nothing_has_an_empty_snapshot(tmp_path: Any) -> None:
    w, _, seen = rust(tmp_path, {})
    walk = walked(w, None)
    assert not walk.complete and seen == [(ev.SnapshotEnd, (0, 0, 0, 0))]


# --- copies under way --------------------------------------------------------------------------------


def objects(tmp_path: Any) -> tuple[Witness, Node, Node, Node]:
    w = Witness(Config(tmp_path, 4 << 20, Faults()))
    w.tree = HiRadixCache()
    w.family, w.page_size, w.find_path = HIRADIX, PAGE, nodes.by_object(w, nodes.in_l1)
    top = Node([1] * PAGE, w.tree.root_node, list(range(PAGE)))
    return w, top, Node([2] * PAGE, top, None), Node([3] * PAGE, top, None)


def test_a_backup_with_a_list_covers_what_was_split_off(tmp_path: Any) -> None:
    w, _, low, other = objects(tmp_path)
    w.tree.ongoing_write_through[low.id] = (low, 16, [low, other])
    assert UnderWay(w).backups == {low.id, other.id}


def test_a_backup_without_a_list_covers_its_ancestors(tmp_path: Any) -> None:
    w, top, low, other = objects(tmp_path)
    w.tree.ongoing_write_through[low.id] = low
    assert UnderWay(w).backups >= {low.id, top.id} and other.id not in UnderWay(w).backups


def test_a_load_covers_the_path_to_its_anchor(tmp_path: Any) -> None:
    w, top, low, other = objects(tmp_path)
    w.tree.ongoing_load_back[low.id] = low
    under_way = UnderWay(w)
    assert under_way.loads >= {low.id, top.id} and other.id not in under_way.loads and not under_way.any_load


def test_a_load_whose_path_is_not_known_makes_everything_doubtful(tmp_path: Any) -> None:
    w, *_ = objects(tmp_path)
    w.tree.ongoing_load_back[999] = object()
    assert UnderWay(w).any_load
