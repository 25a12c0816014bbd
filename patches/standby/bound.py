"""What a scheduler has bound since it was constructed: its dispatcher calls these methods, not those of the class.

SGLang's dispatcher keeps a list of pairs (up to 0.5.5) or a dictionary, and since 0.5.6 what it has looked up besides.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

_DISPATCHER = "_request_dispatcher"
_TABLES = ("_mapping", "_mro_cache")


class Dispatched:
    """The handlers of one scheduler's requests."""

    def __init__(self, scheduler: Any) -> None:
        dispatcher = getattr(scheduler, _DISPATCHER, None)
        tables = (getattr(dispatcher, name, None) for name in _TABLES)
        self._tables = [table for table in tables if isinstance(table, list | dict)]

    def has(self, function: Any) -> bool:
        """Whether the function is bound here."""
        return any(getattr(handler, "__func__", None) is function for _, _, handler in self._handlers())

    def exchange(self, old: Any, new: Any) -> None:
        """Bind ``new`` wherever ``old`` is bound, to the same object."""
        for table, key, handler in self._handlers():
            if getattr(handler, "__func__", None) is old:
                bound = types.MethodType(new, handler.__self__)
                table[key] = (table[key][0], bound) if isinstance(table, list) else bound

    def _handlers(self) -> Iterator[tuple[Any, Any, Any]]:
        for table in self._tables:
            # Copied at once: the scheduler may look something up meanwhile, and remember it.
            if isinstance(table, list):
                yield from ((table, index, entry[1]) for index, entry in enumerate(list(table)))
            else:
                yield from ((table, key, handler) for key, handler in list(table.items()))
