"""The report's words in each language. Every text that kvwitness itself writes on the page comes from here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

LANGUAGES: Final = ("en", "ru")


class Words:
    """One language's texts by dotted key."""

    def __init__(self, language: str, texts: Mapping[str, str]) -> None:
        self.language = language
        self._texts = texts

    def __call__(self, key: str, **values: object) -> str:
        """The text of ``key`` with ``values`` filled in. Raises ``KeyError`` for a key that does not exist."""
        return self._texts[key].format(**values)

    def known(self, key: str, otherwise: str) -> str:
        """The text of ``key``, or ``otherwise`` where the catalogue has none."""
        return self._texts.get(key, otherwise)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._texts)

    def raw(self, key: str) -> str:
        """The text of ``key`` with its placeholders."""
        return self._texts[key]


@cache
def words_for(language: str) -> Words:
    """The catalogue of ``language``, one of :data:`LANGUAGES`."""
    text = (resources.files("kvwitness.tracer.report") / f"{language}.toml").read_text("utf-8")
    return Words(language, dict(_flat(tomllib.loads(text), "")))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
