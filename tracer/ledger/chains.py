"""Equality of token prefixes by their keyed digests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_CELL_AT_LEAST: Final = 16
"""Tokens of the smallest cell that prefixes are digested in."""


@dataclass(slots=True)
class Chain:
    """The digests of one request's token sequence, as recorded."""

    rid: str
    grid: int = 0
    cells: list[bytes] = field(default_factory=list)
    points: dict[int, bytes] = field(default_factory=dict)
    since: int = 0
    """The event that queued the request: an id can be used again, for another prompt."""

    def tells(self, tokens: int, grid: int) -> bool:
        """Whether the digests, in cells of ``grid``, reach exactly to the end of so many tokens."""
        return len(self.cells) >= tokens // grid and (tokens in self.points or tokens % grid == 0)

    def add_cells(self, grid: int, first: int, digests: tuple[bytes, ...]) -> bool:
        """Append recorded cells; False when they do not continue what is known (events missing)."""
        if not self.cells:
            self.grid = grid
        if grid != self.grid or first != len(self.cells):
            return False
        self.cells.extend(digests)
        return True


def cell_tokens(page: int) -> int:
    """Tokens of a cell where pages have ``page``: a cell is whole pages."""
    return page * -(-_CELL_AT_LEAST // page)


def shared_prefix(a: Chain | None, b: Chain | None, position: int) -> int | None:
    """How far, up to ``position``, the digests show that two sequences are equal.

    Returns ``position`` for full equality, the last cell boundary before it when the remainder has no
    digest on both sides, -1 when the digests show a difference, None when there are no digests to compare.
    """
    if a is None or b is None:
        return None
    if a is b:
        return position
    if not a.grid or a.grid != b.grid:
        return None
    cell, rest = divmod(position, a.grid)
    both = max(min(cell, len(a.cells), len(b.cells)), 0)
    # The last one decides, as each covers all before it. A difference before it is no honest record of equal prefixes.
    if both and (a.cells[both - 1] != b.cells[both - 1] or a.cells[:both] != b.cells[:both]):
        return -1
    if any(at <= position and b.points.get(at, digest) != digest for at, digest in a.points.items()):
        return -1
    if both < cell:
        return None
    if not rest:
        return position
    at_a, at_b = a.points.get(position), b.points.get(position)
    if at_a is not None and at_b is not None:
        return position if at_a == at_b else -1
    if cell < len(a.cells) and cell < len(b.cells) and a.cells[cell] == b.cells[cell]:
        return position
    return cell * a.grid


def same_prefix(shared: int | None, position: int, grid: int) -> bool | None:
    """Whether :func:`shared_prefix`'s answer counts as equality: all but less than one cell."""
    if shared is None:
        return None
    return shared >= 0 and position - shared < max(grid, 1)


def first_difference(a: Chain | None, b: Chain | None, end: int) -> tuple[int, int] | None:
    """The tokens ``[low, high)`` among which is the first one that differs, as far as the digests of ``[0, end)`` show.

    None where they show no difference: equal, one sequence ends first, or nothing to compare.
    """
    if a is None or b is None or a is b or not a.grid or a.grid != b.grid:
        return None
    low = 0
    for mine, theirs in zip(a.cells, b.cells, strict=False):
        high = low + a.grid
        if high > end:
            break
        if mine != theirs:
            return low, high
        low = high
    points = [at for at, digest in a.points.items() if low < at <= end and b.points.get(at, digest) != digest]
    return (low, min(points)) if points else None
