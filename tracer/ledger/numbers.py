"""Numbers that were given away, in little memory however many they are."""

from __future__ import annotations

from typing import Final

_RECENT: Final = 10_000


class Numbers:
    """Which numbers were seen. After :meth:`compact` everything below the last ones counts as seen."""

    def __init__(self) -> None:
        self._floor: int | None = None
        self._seen: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number in self._seen or (self._floor is not None and number < self._floor)

    def __bool__(self) -> bool:
        return bool(self._seen)

    def add(self, number: int) -> None:
        """It was given away."""
        self._seen.add(number)

    def compact(self) -> None:
        """Keep the largest ones: whoever counts upwards gives away no smaller one any more."""
        if len(self._seen) > 2 * _RECENT:
            recent = sorted(self._seen)[-_RECENT:]
            self._floor, self._seen = recent[0], set(recent)
