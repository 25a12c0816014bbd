"""The path from the root to a tree node, for each way in which SGLang releases show their nodes.

- SGLang 0.5.22 and newer: node ids, and the tree core's own read-only ``collect_path_info``.
- 0.5.17 to 0.5.21: node ids; the Python core resolves them (``node_by_id``), the Rust core does not. Its
  paths are not known, and what rests on them is not claimed.
- Before: node objects, followed by their ``parent``.

All read-only and O(depth). Device values are only looked at for being there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvwitness.patches.schema.events import PathNode
from kvwitness.patches.witness import Witness

FULL = 0
"""ComponentType.FULL: the full-attention KV that the claims are about."""

Holds = Callable[[Any], bool]


def in_l1(node: Any) -> bool:
    """HiRadixCache's TreeNode: whether its KV is in L1."""
    return node.value is not None


def full_in_l1(node: Any) -> bool:
    """UnifiedTreeNode: whether its full-attention KV is in L1."""
    return node.component_data[FULL].value is not None


def only_in_l2(node: Any) -> int:
    """Tokens on the path to a TreeNode that L1 does not have: the end of the path, up to the first node that it has."""
    tokens = 0
    while node.value is None and node.parent is not None:
        tokens += len(node.host_value)
        node = node.parent
    return tokens


def walk(node: Any, holds: Holds) -> list[PathNode]:
    """The path to a node object."""
    chain = []
    while node.parent is not None:
        chain.append(node)
        node = node.parent
    path, position = [], 0
    for step in reversed(chain):
        end = position + len(step.key)
        path.append(PathNode(step.id, position, end, int(holds(step))))
        position = end
    return path


def by_path_info(tree: Any) -> Callable[[Any], list[PathNode]]:
    """Paths as the tree core tells them."""
    core = tree.tree_core

    def find(node: Any) -> list[PathNode]:
        return [
            PathNode(step.node_id, step.path_start, step.path_end, int(step.full_value_len is not None))
            for step in core.collect_path_info([node])[0]
        ]

    return find


def by_node_id(tree: Any) -> Callable[[Any], list[PathNode]]:
    """Paths through the node objects behind the ids."""
    core = tree.tree_core

    def find(node: Any) -> list[PathNode]:
        return walk(core.node_by_id(node), full_in_l1)

    return find


def by_object(w: Witness, holds: Holds) -> Callable[[Any], list[PathNode]]:
    """Paths through node objects; ids are resolved among the nodes at hand."""

    def find(node: Any) -> list[PathNode]:
        if isinstance(node, int):
            node = w.nodes_at_hand[node]
        return [] if node is None else walk(node, holds)

    return find


def node_number(node: Any) -> int:
    """The id of a node that the tree gave as an id or as an object; -1 for neither."""
    if isinstance(node, int):
        return node
    number = getattr(node, "id", None)
    return number if isinstance(number, int) else -1


def descend(tree: Any, key: Any, tokens: int) -> Any:
    """The node that ends at ``key[:tokens]``, which was just inserted; None when it is not found.

    One dictionary look-up per node on the way, no token is compared: after an insert the nodes on the way
    hold exactly this key.
    """
    page = max(int(tree.page_size), 1)
    node, position = tree.root_node, 0
    while position < tokens:
        part = key[position : position + page]
        name = part.child_key(page) if hasattr(part, "child_key") else tree.get_child_key_fn(part)
        node = node.children.get(name)
        if node is None:
            return None
        position += len(node.key)
    return node if position == tokens and tokens else None
