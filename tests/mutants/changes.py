"""All changes that can be made to a file, and the one that was drawn made to its text."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from mutants.operators import OPERATORS, decides


@dataclass(frozen=True)
class Change:
    """One change: the operator's ``occurrence`` in ``file``. ``row`` and ``column`` say where, for people."""

    file: str
    function: str
    row: int
    column: int
    operator: str
    occurrence: int

    @property
    def id(self) -> str:
        """The same for as long as the file stays as it is."""
        return f"{self.file}:{self.row}:{self.column} {self.operator} {self.occurrence}"


@dataclass(frozen=True)
class Made:
    """A change that was made: the file's new text, and the lines that differ."""

    text: str
    line: str
    becomes: str


def changes_of(file: str, text: str) -> Iterator[Change]:
    """All changes that the operators know of."""
    nodes = list(ast_nodes(get_ast(text)))
    for name, operator in OPERATORS.items():
        occurrence = 0
        for node in nodes:
            for (row, column), _ in operator.mutation_positions(node):
                if decides(name, node):
                    yield Change(file, _within(node), row, column, name, occurrence)
                occurrence += 1


def make(change: Change, text: str) -> Made:
    """``text`` with the change in it."""
    changed = mutate_code(text, OPERATORS[change.operator], change.occurrence)
    if changed is None:
        raise ValueError(f"{change.id} is not in this text")
    gone, come = [], []
    for line in difflib.ndiff(text.splitlines(), changed.splitlines()):
        if line.startswith("- "):
            gone.append(line[2:].strip())
        elif line.startswith("+ "):
            come.append(line[2:].strip())
    return Made(changed, " ".join(gone), " ".join(come))


def _within(node: Any) -> str:
    """The functions and classes around a node, outermost first."""
    names: list[str] = []
    while (node := node.parent) is not None:
        if node.type in ("funcdef", "classdef"):
            names.append(node.name.value)
    return ".".join(reversed(names))
