"""How each kind of tree shows the nodes that it holds: which there are, what their tokens are, where they are.

Read-only, on the scheduler's thread. Device values are only looked at for being there; host values are CPU
tensors of slot numbers.

- Node objects (HiRadixCache; UnifiedRadixCache up to SGLang 0.5.16, and the Python core behind node ids).
- The Rust core of SGLang 0.5.22 and newer has no list of its nodes. Their numbers are dense and never given out
  twice: they are tried, from the highest one that is known downwards, then upwards. Tokens are known only of
  nodes with a host copy. The Rust core before shows no paths: nothing is taken from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from kvwitness.patches.contract import HIRADIX, UNIFIED
from kvwitness.patches.hooks.nodes import FULL
from kvwitness.patches.instance import anchor_pool
from kvwitness.patches.schema.events import PathNode
from kvwitness.patches.witness import Witness

_HIGHEST_HOLE = 1 << 20
"""Numbers in a row without a node behind which no further one is looked for."""


class Key(NamedTuple):
    """The tokens of a node alone, and the namespace that its prefix belongs to."""

    tokens: Any
    namespace: tuple[object, ...]


class Look(NamedTuple):
    """A node as the tree shows it at this moment."""

    path: list[PathNode]
    """From the root to it; not empty."""
    handles: list[Any]
    """What the tree calls the nodes of the path: ids or objects."""
    host: Any
    """Its host slots (a CPU tensor); None without a host copy."""


class Reader(Protocol):
    """One tree, in one epoch."""

    def nodes(self) -> Iterator[Any]:
        """Handles of nodes that may be in the tree; None now and then, where nothing was found for a while."""
        ...

    def look(self, handle: Any) -> Look | None:
        """None: it is not in the tree (any more)."""
        ...

    def key(self, handle: Any) -> Key | None:
        """None: its tokens are not to be had."""
        ...

    def is_current(self) -> bool:
        """Whether the epoch is still the one in which the reader was made."""
        ...

    def held(self) -> tuple[int, int]:
        """Tokens that the tree holds in L1 and L2; asked only where :meth:`nodes` gives None."""
        ...


def reader_for(w: Witness) -> Reader | None:
    """The reader of the watched tree; None where it does not show its nodes."""
    if w.family != UNIFIED:
        return _Objects(w)
    core = w.tree.tree_core
    try:
        core.root_node  # noqa: B018 - the Rust core raises
    except (NotImplementedError, AttributeError):
        return _RustIds(w) if hasattr(core, "collect_path_info") else None
    return _PythonIds(w)


def _key_of(node: Any) -> Key | None:
    key = node.key
    if getattr(key, "is_bigram", False):
        return None  # Its positions are not those of the tokens.
    raw = key.raw_token_ids() if hasattr(key, "raw_token_ids") else getattr(key, "token_ids", key)
    if len(raw) != len(key):
        return None
    return Key(raw, (getattr(key, "extra_key", None), getattr(key, "cache_salt", None)))


def _below(root: Any) -> Iterator[Any]:
    """All node objects below ``root`` as they are when their parent is come to."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())


class _Objects:
    """Trees whose functions take node objects."""

    def __init__(self, w: Witness) -> None:
        self._w = w
        self._tree = w.tree
        self._root = self._tree.root_node
        self._page = max(w.page_size, 1)

    def nodes(self) -> Iterator[Any]:
        return _below(self._root)

    def is_current(self) -> bool:
        return self._tree.root_node is self._root

    def held(self) -> tuple[int, int]:
        return 0, 0

    def look(self, handle: Any) -> Look | None:
        handles: list[Any] = []
        node = handle
        while node is not self._tree.root_node:
            parent = node.parent
            # A node that was deleted, or whose epoch has ended, still knows its parent: the parent decides.
            if parent is None or parent.children.get(self._name(node)) is not node:
                return None
            handles.append(node)
            node = parent
        if not handles:
            return None
        return Look(self._w.find_path(handle), handles[::-1], self._host(handle))

    def _name(self, node: Any) -> Any:
        """What the parent calls a node: the first page of its key."""
        part = node.key[: self._page]
        return part.child_key(self._page) if hasattr(part, "child_key") else self._tree.get_child_key_fn(part)

    def _host(self, node: Any) -> Any:
        return node.host_value if self._w.family == HIRADIX else node.component_data[FULL].host_value

    def key(self, handle: Any) -> Key | None:
        return _key_of(handle)


class _PythonIds:
    """The Python core behind node ids (SGLang 0.5.17 and newer)."""

    def __init__(self, w: Witness) -> None:
        self._w = w
        self._core = w.tree.tree_core
        self._root = self._core.root_node

    def nodes(self) -> Iterator[Any]:
        return (node.id for node in _below(self._root))

    def is_current(self) -> bool:
        return self._core.root_node is self._root

    def held(self) -> tuple[int, int]:
        return 0, 0

    def look(self, handle: Any) -> Look | None:
        if not self.is_current():
            return None
        path = self._w.path_of(handle)
        if not path:
            return None
        return Look(path, [step.node for step in path], self._core.node_by_id(handle).component_data[FULL].host_value)

    def key(self, handle: Any) -> Key | None:
        return _key_of(self._core.node_by_id(handle))


class _RustIds:
    """The Rust core (SGLang 0.5.22 and newer)."""

    def __init__(self, w: Witness) -> None:
        self._w = w
        self._core = w.tree.tree_core
        self._root = self._core.root_node_handle()
        # The hooks for other components could do more than read.
        self._plain = tuple(int(component) for component in w.tree.tree_components) == (FULL,)

    def nodes(self) -> Iterator[Any]:
        highest = max((self._root, *self._w.tree.ongoing_write_through, *self._w.tree.ongoing_load_back))
        for number in range(highest, self._root, -1):
            yield number if self._is_there(number) else None
        number, hole = highest + 1, 0
        while hole < _HIGHEST_HOLE:
            there = self._is_there(number)
            hole = 0 if there else hole + 1
            yield number if there else None
            number += 1

    def _is_there(self, number: int) -> bool:
        try:
            self._core.is_backuped(number)
        except KeyError:
            return False
        return True

    def is_current(self) -> bool:
        return bool(self._core.root_node_handle() == self._root)

    def held(self) -> tuple[int, int]:
        pool = anchor_pool(self._w.tree)
        l1 = int(self._core.full_evictable_size()) + int(self._core.full_protected_size())
        return l1, int(pool.size) - int(pool.available_size())

    def look(self, handle: Any) -> Look | None:
        if not self.is_current():
            return None
        path = self._w.path_of(handle)
        if not path:
            return None
        spec = self._spec(handle)
        return Look(path, [step.node for step in path], None if spec is None else spec.host_value)

    def _spec(self, handle: Any) -> Any:
        """What the tree would hand to a storage backend: the host slots and the tokens of a node."""
        if not self._plain or not self._core.is_backuped(handle):
            return None
        return self._core.build_storage_backup_spec(handle, False)

    def key(self, handle: Any) -> Key | None:
        if self._core.collect_path_info([handle])[0][0].parent_id != self._root:
            return None  # Of a namespace with a root of its own, whose name the core does not tell.
        spec = self._spec(handle)
        return None if spec is None else Key(spec.token_ids, (None, None))
