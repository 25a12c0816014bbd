"""Where events must be missing: what is there contradicts itself, and a journal has no hole of its own there."""

from __future__ import annotations


class Gaps:
    """Stretches of a journal in which something was not recorded, in the order in which that was seen."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, str]] = []
        """First and last event around each, and how it shows."""
        self.before = 0
        """The event before the one that is looked at."""

    def here(self, seq: int, cause: str) -> None:
        """Something between the previous event and ``seq`` was not recorded."""
        self.since(self.before, seq, cause)

    def since(self, first: int, seq: int, cause: str) -> None:
        """Something between ``first`` and ``seq`` was not recorded."""
        self.found.append((first, seq, cause))
