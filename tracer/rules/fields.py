"""Which rule reads which field of which event, and which part of the tracer reads which fact: generated, not written.

A field that no rule reads is *free*: changing it changes no grade, tier, reason, count or sentence. Why it may be is
declared here; nothing else is.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import described as d
from kvwitness.tracer.rules.declare import Rules

FREE: Final[Mapping[type[ev.Event], Mapping[str, str]]] = {
    ev.HookFailed: {"error": "words for people"},
    ev.Closed: {
        "lost_quota": "what was lost is read from the journal's first page",
        "lost_oversize": "what was lost is read from the journal's first page",
    },
    ev.HttpRequest: {
        "req": "the client's trace context, of which no claim is made",
        "traceparent": "the client's trace context, of which no claim is made",
    },
}
"""Fields of events that no rule reads, and why they may be."""

FREE_FACTS: Final[Mapping[type[msgspec.Struct], Mapping[str, str]]] = {
    d.Instance: {"load_back_threshold": "shown only"},
}
"""Facts that are shown and from which nothing is concluded."""

_BASES: Final[Mapping[type[msgspec.Struct], frozenset[str]]] = {
    d.Ranks: frozenset(("ranks", "own")),
    d.Pool: frozenset(("pool", "each", "p", "anchor", "pools")),
    d.Hook: frozenset(("hook", "now", "hooks")),
    d.Arguments: frozenset(("arguments",)),
    d.Process: frozenset(("process",)),
    d.Attach: frozenset(("attach", "attached")),
    d.Instance: frozenset(("instance", "said", "told")),
}
"""What the structs are called where they are read."""
_SHOWING: Final = ("conditions.py", "fields.py")


@dataclasses.dataclass(frozen=True)
class Field:
    """One field, and what reads it. Neither readers nor a reason: a gap."""

    owner: str
    name: str
    guards: tuple[str, ...]
    effects: tuple[str, ...]
    free: str = ""


def event_fields(rules: Rules) -> Iterator[Field]:
    """Every field of every event, in the order of the events' codes."""
    for kind in (ev.REGISTRY[code] for code in sorted(ev.REGISTRY)):
        own = [rule for rule in rules.all if rule.kind is kind]
        for name in (field.name for field in dataclasses.fields(kind)[2:]):
            readers = [rule for rule in own if name in rule.reads]
            guards = tuple(rule.name.split(": ", 1)[1] for rule in readers if rule.guard)
            effects = tuple(rule.name.split(": ", 1)[1] for rule in readers if not rule.guard)
            yield Field(kind.__name__, name, guards, effects, FREE.get(kind, {}).get(name, ""))


def fact_fields() -> Iterator[Field]:
    """Every fact that an instance tells of itself; read by which modules of the tracer."""
    for kind in _BASES:
        for name in kind.__struct_fields__:
            readers = tuple(sorted(module for module, reads in _reads().items() if (kind, name) in reads))
            yield Field(kind.__name__, name, readers, (), FREE_FACTS.get(kind, {}).get(name, ""))


@cache
def _reads() -> dict[str, frozenset[tuple[type[msgspec.Struct], str]]]:
    root = Path(__file__).parents[1]
    found = {}
    for path in sorted(root.rglob("*.py")):
        if path.name not in _SHOWING:
            reads = frozenset(_reads_of(ast.parse(path.read_text("utf-8"))))
            if reads:
                found[".".join(path.relative_to(root).with_suffix("").parts)] = reads
    return found


def _reads_of(tree: ast.AST) -> Iterator[tuple[type[msgspec.Struct], str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base = node.value
            called = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
            for kind, names in _BASES.items():
                if called in names and node.attr in kind.__struct_fields__:
                    yield kind, node.attr
        elif isinstance(node, ast.Tuple):
            # Where several are gone through by their names.
            for element in node.elts:
                if isinstance(element, ast.Constant) and element.value in d.Instance.__struct_fields__:
                    yield d.Instance, str(element.value)
        elif isinstance(node, ast.JoinedStr):
            # ``getattr(ranks, f"{name}_size")``.
            last = node.values[-1]
            if isinstance(last, ast.Constant) and last.value in ("_size", "_rank"):
                yield from ((d.Ranks, name) for name in d.Ranks.__struct_fields__ if name.endswith(str(last.value)))
