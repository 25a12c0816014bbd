"""Interned texts: which number stands for which."""

from __future__ import annotations

from collections.abc import Container

from kvwitness.tracer.ledger.numbers import Numbers


class Names:
    """Numbers are given away upwards, each for one text for ever."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._forgotten = Numbers()

    def is_renamed(self, number: int, text: str) -> bool:
        """Whether a number stands for something else already: from here on nobody knows whom an event names."""
        known = self._texts.get(number)
        return known != text and (known is not None or number in self._forgotten)

    def learn(self, number: int, text: str) -> None:
        """A number stands for a text from here on."""
        self._texts[number] = text

    def get(self, number: int) -> str | None:
        """The text; None for 0 (nothing is named) and for a number that was not told."""
        return self._texts.get(number) if number else None

    def forget(self, texts: Container[str]) -> None:
        """Drop the numbers of these texts, which stay taken."""
        for number in [number for number, text in self._texts.items() if text in texts]:
            del self._texts[number]
            self._forgotten.add(number)
        self._forgotten.compact()
