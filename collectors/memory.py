"""How much memory a machine has left, and how much a server's processes hold, at one moment."""

from __future__ import annotations

import msgspec
import psutil

from kvwitness.collectors.environment import server_tree


class Memory(msgspec.Struct, frozen=True):
    """In bytes. None: the server's processes cannot be seen from here."""

    total: int
    available: int
    used: int
    swap_used: int
    server_rss: int | None


def memory_of(url: str) -> Memory:
    """The memory of this machine, and of the server behind ``url`` when it is here."""
    system = psutil.virtual_memory()
    return Memory(system.total, system.available, system.used, psutil.swap_memory().used, _rss(url))


def _rss(url: str) -> int | None:
    tree, _ = server_tree(url)
    total = 0
    for process in tree:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total or None
