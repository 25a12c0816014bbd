"""Which of HiCache's trees a release ships, and which one it builds for a plain model."""

from __future__ import annotations

import ast
from typing import Final

from kvwitness.tracer.contracts.find import has_class
from kvwitness.tracer.contracts.source import Source

TREES: Final = {
    "HiRadixCache": "sglang.srt.mem_cache.hiradix_cache",
    "HiMambaRadixCache": "sglang.srt.mem_cache.hi_mamba_radix_cache",
    "UnifiedRadixCache": "sglang.srt.mem_cache.unified_radix_cache",
}
"""The tree classes that have an L2, and their modules."""

_SWITCH: Final = "enable_hierarchical_cache"
_FACTORY: Final = ("sglang.srt.mem_cache.registry", "default_radix_cache_factory")
_SCHEDULER: Final = ("sglang.srt.managers.scheduler", "Scheduler")
_DEPTH: Final = 3


def shipped_trees(source: Source) -> tuple[str, ...]:
    """The tree classes that exist in this package."""
    return tuple(name for name, module in TREES.items() if has_class(source, module, name))


def default_tree(source: Source) -> tuple[str, str]:
    """The tree that HiCache gets for a plain model, and the place in the source that says so ("", "": not found).

    Follows SGLang's own choice with HiCache switched on and every other condition false: no hybrid model, no
    other cache, no experimental switch, no environment variable. Nothing is known per version here; only the
    name of the switch, and that the choice stands in the registry's factory or in a method of the scheduler.
    """
    module, name = _FACTORY
    registry = source.module(module)
    if registry is not None:
        functions = _functions(registry.body)
        if name in functions:
            tree = _Choice(functions).follow(functions[name].body)
            if tree:
                return tree, f"{module}:{name}"
    module, owner = _SCHEDULER
    scheduler = source.module(module)
    for statement in scheduler.body if scheduler is not None else ():
        if isinstance(statement, ast.ClassDef) and statement.name == owner:
            for method, function in _functions(statement.body).items():
                tree = _Choice({}).follow(function.body)
                if tree:
                    return tree, f"{module}:{owner}.{method}"
    return "", ""


def _functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in body if isinstance(item, ast.FunctionDef)}


class _Choice:
    """Walks the statements that run for a plain model, up to the first tree that they build."""

    def __init__(self, functions: dict[str, ast.FunctionDef], depth: int = 0) -> None:
        self._functions = functions
        self._depth = depth
        self._returned = False

    def follow(self, body: list[ast.stmt]) -> str:
        """Name of the tree class, "" where none is built."""
        for statement in body:
            tree = self._statement(statement)
            if tree or self._returned:
                return tree
        return ""

    def _statement(self, statement: ast.stmt) -> str:
        match statement:
            case ast.If(test=test, body=yes, orelse=no):
                return self.follow(yes if _holds(test) else no)
            case ast.With(body=body) | ast.Try(body=body):
                return self.follow(body)
            case ast.Return(value=value):
                tree = self._built(value) if value is not None else ""
                self._returned = True
                return tree
            case ast.Assign(value=value) | ast.Expr(value=value):
                return self._built(value)
        return ""

    def _built(self, expression: ast.expr) -> str:
        """The tree class that a call within the expression makes."""
        for node in ast.walk(expression):
            if not isinstance(node, ast.Call):
                continue
            for part in ast.walk(node.func):
                if isinstance(part, ast.Name) and part.id in TREES:
                    return part.id
            if isinstance(node.func, ast.Name) and node.func.id in self._functions and self._depth < _DEPTH:
                inner = _Choice(self._functions, self._depth + 1)
                tree = inner.follow(self._functions[node.func.id].body)
                if tree:
                    return tree
        return ""


def _holds(test: ast.expr) -> bool:
    match test:
        case ast.Constant(value=value):
            return bool(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _holds(operand)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_holds(value) for value in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_holds(value) for value in values)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == _SWITCH
    return False
