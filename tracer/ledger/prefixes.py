"""All digests of an instance: which prefix each stands for, and which request last put it into the cache."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from kvwitness.tracer.ledger.chains import Chain

_Place = tuple[int, bytes]
"""Tokens that a digest covers, and the digest of the cells before its own (empty: none)."""


class Prefixes:
    """A digest covers all tokens before it: it stands for one length, and for one digest before it."""

    def __init__(self) -> None:
        self._places: dict[bytes, _Place] = {}
        self._points: dict[bytes, _Place] = {}
        self._cached: dict[bytes, tuple[str, int]] = {}

    # --- consistency ---------------------------------------------------------------------------------

    def elsewhere(self, grid: int, first: int, before: Sequence[bytes], digests: Iterable[bytes]) -> int | None:
        """The first cell among ``digests`` (from cell ``first`` on) that stands for something else; None: none does."""
        last = before[-1] if before else b""
        for cell, digest in enumerate(digests, start=first + 1):
            if self._places.get(digest, (cell * grid, last)) != (cell * grid, last):
                return cell
            last = digest
        return None

    def learn(self, grid: int, first: int, before: Sequence[bytes], digests: Iterable[bytes]) -> None:
        """These cells follow ``before``."""
        last = before[-1] if before else b""
        places = self._places
        for cell, digest in enumerate(digests, start=first + 1):
            places.setdefault(digest, (cell * grid, last))
            last = digest

    def point_elsewhere(self, position: int, chain: Chain, digest: bytes) -> bool:
        """Whether the digest of a whole prefix stands for another one already."""
        return self._points.get(digest, place := _place(position, chain)) != place

    def learn_point(self, position: int, chain: Chain, digest: bytes) -> None:
        """It is that of the chain's first ``position`` tokens."""
        self._points.setdefault(digest, _place(position, chain))

    # --- who had it ----------------------------------------------------------------------------------

    def cached(self, cells: Iterable[bytes], rid: str, epoch: int) -> None:
        """A request put these into the cache."""
        for digest in cells:
            self._cached[digest] = (rid, epoch)

    def prior(self, chain: Chain | None) -> tuple[str | None, int, int]:
        """The earlier request that shares the longest prefix with a sequence; how many tokens, and in which epoch."""
        if chain is not None:
            for index in range(len(chain.cells) - 1, -1, -1):
                seen = self._cached.get(chain.cells[index])
                if seen is not None:
                    return seen[0], (index + 1) * chain.grid, seen[1]
        return None, 0, 0

    def forget(self, rids: Container[str], chains: Iterable[Chain]) -> None:
        """Drop what these requests cached, and the digests that no chain has."""
        self._cached = {digest: seen for digest, seen in self._cached.items() if seen[0] not in rids}
        kept: set[bytes] = set(self._cached)
        points: set[bytes] = set()
        for chain in chains:
            kept.update(chain.cells)
            points.update(chain.points.values())
        self._places = {digest: place for digest, place in self._places.items() if digest in kept}
        self._points = {digest: place for digest, place in self._points.items() if digest in points}


def _place(position: int, chain: Chain) -> _Place:
    cell = position // chain.grid if chain.grid else 0
    return position, chain.cells[cell - 1] if 0 < cell <= len(chain.cells) else b""
