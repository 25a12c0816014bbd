"""The kinds of change: cosmic-ray's own where it has them, and those it lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import parso
from cosmic_ray.operators import (
    binary_operator_replacement,
    boolean_replacer,
    comparison_operator_replacement,
    number_replacer,
    unary_operator_replacement,
)
from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Keyword, Name

COMPARISONS = (
    *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
    *("Eq_NotEq", "Eq_LtE", "Eq_GtE", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
)
"""The bound moved by one and the opposite; an equality, too, as either half of it."""
LEAVES = ("return_stmt", "raise_stmt")
UNORDERED = re.compile(r"""['"]|(^|\.)[A-Z][A-Z0-9_]+$""")
"""A string or a constant's name: `==` on it made `<=` raises wherever it runs, which says nothing of the tests."""

Position = tuple[tuple[int, int], tuple[int, int]]


class Replacement(Operator):
    """Replaces one child of a node. ``replacements``: index of the child and what takes its place."""

    def replacements(self, node: Any) -> Iterator[tuple[int, str]]:
        raise NotImplementedError

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        for index, _ in self.replacements(node):
            yield node.children[index].start_pos, node.children[index].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        child, text = list(self.replacements(node))[index]
        node.children[child] = parso.parse(f" {text}")
        return node

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return ()


class Membership(Replacement):
    """``in`` and ``not in``."""

    def replacements(self, node: Any) -> Iterator[tuple[int, str]]:
        if node.type == "comparison":
            for index, word in enumerate(node.children):
                text = word.get_code().split()
                if text in (["in"], ["not", "in"]):
                    yield index, "not in" if text == ["in"] else "in"


class Negation(Replacement):
    """A condition of ``if``, ``elif``, ``while`` or a comprehension becomes its opposite."""

    def replacements(self, node: Any) -> Iterator[tuple[int, str]]:
        for index in _conditions(node):
            condition = node.children[index]
            # Those have an opposite of their own among the other operators.
            if condition.type not in ("comparison", "not_test"):
                yield index, f"not ({condition.get_code().strip()})"


class GuardRemoval(Replacement):
    """``if ...: return`` (``continue``, ``break``, ``raise``) is never taken."""

    def replacements(self, node: Any) -> Iterator[tuple[int, str]]:
        if node.type == "if_stmt" and len(node.children) == 4 and _leaves(node.children[3]):
            yield 1, "False"


class Extreme(Operator):
    """``min`` and ``max``."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if isinstance(node, Name) and node.value in ("min", "max") and node.get_previous_leaf() != ".":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = "max" if node.value == "min" else "min"
        return node

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return ()


class AugmentedStep(Operator):
    """``+=`` and ``-=``."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if node.type == "operator" and node.value in ("+=", "-="):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = "-=" if node.value == "+=" else "+="
        return node

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return ()


def _conditions(node: Any) -> Iterator[int]:
    children = getattr(node, "children", ())
    for index, child in enumerate(children[:-1]):
        if isinstance(child, Keyword) and child.value in ("if", "elif", "while"):
            yield index + 1


def _leaves(suite: Any) -> bool:
    """Whether the last statement of this suite goes away from here."""
    statements = [child for child in suite.children if child.type != "newline"]
    last = statements[-1]
    if last.type == "simple_stmt":
        last = last.children[0]
    return last.type in LEAVES or last.get_code().strip() in ("return", "continue", "break", "raise")


OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "Membership": Membership(),
        "Negation": Negation(),
        "GuardRemoval": GuardRemoval(),
        "Extreme": Extreme(),
        "AugmentedStep": AugmentedStep(),
        "Number": number_replacer.NumberReplacer(),
        "AndOr": boolean_replacer.ReplaceAndWithOr(),
        "OrAnd": boolean_replacer.ReplaceOrWithAnd(),
        "TrueFalse": boolean_replacer.ReplaceTrueWithFalse(),
        "FalseTrue": boolean_replacer.ReplaceFalseWithTrue(),
        "NotGone": unary_operator_replacement.ReplaceUnaryOperator_Delete_Not(),
        "AddSub": binary_operator_replacement.ReplaceBinaryOperator_Add_Sub(),
        "SubAdd": binary_operator_replacement.ReplaceBinaryOperator_Sub_Add(),
    }
    | {name: getattr(comparison_operator_replacement, f"ReplaceComparisonOperator_{name}")() for name in COMPARISONS}
)


def decides(name: str, node: Any) -> bool:
    """Whether this change is one of a decision, not of a declaration, a word or a check of the code on itself."""
    if name in ("Eq_LtE", "Eq_GtE") and any(UNORDERED.search(each.get_code().strip()) for each in node.children[::2]):
        return False
    if name == "Number" and not node.value.isdigit():
        return False
    while node.parent is not None:
        parent = node.parent
        if parent.type in ("decorator", "fstring", "fstring_expr", "annassign") and not (
            parent.type == "annassign" and node is parent.children[-1]
        ):
            return False
        if parent.type == "classdef" and node is not parent.children[-1]:
            return False
        if parent.type == "argument" and parent.children[0].get_code().strip() == "strict":
            return False
        node = parent
    return True
