"""Nodes by the position at which they begin and by the digest there: no two children of a node share a first page."""

from __future__ import annotations

from collections.abc import Iterable

from kvwitness.tracer.ledger.chains import Chain

_UNKNOWN = b""
"""In place of a digest: the sequence has none there, or has none yet."""


class Beginnings:
    """Where each node begins, and with what. Nodes are known by their numbers."""

    def __init__(self) -> None:
        self._at: dict[int, dict[bytes, set[int]]] = {}
        self._places: dict[int, tuple[int, bytes]] = {}

    def put(self, number: int, start: int, chain: Chain | None) -> None:
        """A node begins at ``start`` of this sequence, wherever it was before."""
        self.drop(number)
        place = self._places[number] = start, _digest(chain, start)
        self._at.setdefault(start, {}).setdefault(place[1], set()).add(number)

    def drop(self, number: int) -> None:
        """The node is not there any more."""
        place = self._places.pop(number, None)
        if place is None:
            return
        by_digest = self._at[place[0]]
        by_digest[place[1]].discard(number)
        if not by_digest[place[1]]:
            del by_digest[place[1]]
        if not by_digest:
            del self._at[place[0]]

    def clear(self) -> None:
        """No node is there any more."""
        self._at.clear()
        self._places.clear()

    def like(self, start: int, end: int, chain: Chain | None) -> Iterable[int]:
        """All that begin at ``start`` and may be shown to hold this sequence up to ``end``, and perhaps others.

        Left out are those that :func:`~kvwitness.tracer.ledger.chains.shared_prefix` finds different there.
        """
        by_digest = self._at.get(start)
        if by_digest is None or chain is None:
            return ()
        if chain.grid and start // chain.grid >= end // chain.grid:
            # Shorter than a cell, whose digest goes beyond the end.
            return [number for numbers in by_digest.values() for number in numbers]
        # Of those without a digest, too: the sequence itself may be one of them.
        digest = _digest(chain, start)
        return [*by_digest.get(digest, ()), *(by_digest.get(_UNKNOWN, ()) if digest != _UNKNOWN else ())]


def _digest(chain: Chain | None, start: int) -> bytes:
    cell = start // chain.grid if chain is not None and chain.grid else 0
    return chain.cells[cell] if chain is not None and cell < len(chain.cells) else _UNKNOWN
