"""Arithmetic on runs of slots and on the nodes of a path."""

from __future__ import annotations

from kvwitness.patches.schema.events import PathNode, Run


def tiles(path: tuple[PathNode, ...], start: int, end: int) -> bool:
    """Whether whole nodes of a path make up ``[start, end)``."""
    inside = [step for step in path if start <= step.start and step.end <= end]
    return sum(step.end - step.start for step in inside) == end - start > 0


def overlap(a: tuple[Run, ...], b: tuple[Run, ...]) -> bool:
    return any(x.start < y.start + y.length and y.start < x.start + x.length for x in a for y in b)


def skip(runs: tuple[Run, ...], count: int) -> tuple[Run, ...]:
    """The runs without their first ``count`` slots."""
    rest: list[Run] = []
    for run in runs:
        cut = min(count, run.length)
        count -= cut
        if cut < run.length:
            rest.append(Run(run.start + cut, run.length - cut))
    return tuple(rest)
