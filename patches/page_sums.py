"""Sums over the KV pages of a device pool, in plain torch: enqueued, never waited for.

Per page and layer the sum of its 32-bit words, each times a secret random 64-bit number, modulo 2**64. Two different
contents have equal sums with a probability of at most 2**-32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

_WORDS_AT_ONCE: Final = 4 << 20
"""32-bit words that are multiplied at a time: 16 MiB of pages and 32 MiB of products."""


class Unsupported(Exception):
    """The device pool is not one whose pages can be digested."""


class Rows:
    """The device pool's KV as rows of 32-bit words: one list of layers for keys and one for values (MLA: one)."""

    def __init__(self, device_pool: Any, page: int) -> None:
        import torch

        if getattr(device_pool, "host_transfer_translate", None) is not None:
            raise Unsupported("its pages move")
        names = ("k_buffer", "v_buffer") if hasattr(device_pool, "k_buffer") else ("kv_buffer",)
        lists: list[Any] = [getattr(device_pool, name, None) for name in names]
        if not all(isinstance(buffers, list | tuple) and buffers for buffers in lists):
            raise Unsupported("it does not keep its KV by layer")
        size = int(getattr(device_pool, "size", 0))
        if any(buffer.shape[0] < size for buffers in lists for buffer in buffers):
            raise Unsupported("its rows are not tokens")
        self.page = page
        self.device = lists[0][0].device
        if self.device.type not in ("cpu", "cuda"):
            raise Unsupported(f"digests are not taken on {self.device.type} devices")
        # Views: no memory, no copy; they raise where a buffer is not rows of whole words.
        self.lists = [[b.view(b.shape[0], -1).view(torch.int32) for b in buffers] for buffers in lists]
        self.layers = len(self.lists[0])
        self.weights = [_secret(torch, page * rows[0].shape[1], self.device) for rows in self.lists]

    def sums(self, slots: Any) -> Any:
        """The sums of pages, enqueued in the current stream: ``(layers, pages)`` of int64 on the device.

        ``slots`` are the device slots of whole pages, ``(pages, page size)``.
        """
        import torch

        parts = []
        for first in range(0, len(slots), self._pages_at_once):
            index = slots[first : first + self._pages_at_once].reshape(-1)
            parts.append(sum(self._of_lists(torch, index)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @property
    def _pages_at_once(self) -> int:
        return int(max(1, _WORDS_AT_ONCE // max(len(weights) for weights in self.weights)))

    def _of_lists(self, torch: Any, index: Any) -> Iterator[Any]:
        for rows, weights in zip(self.lists, self.weights, strict=True):
            pages = len(index) // self.page
            layers = max(1, _WORDS_AT_ONCE // (pages * len(weights)))
            found = []
            for first in range(0, len(rows), layers):
                read = torch.stack([layer.index_select(0, index) for layer in rows[first : first + layers]])
                found.append((read.view(len(read), pages, -1) * weights).sum(-1))
            yield found[0] if len(found) == 1 else torch.cat(found)


def _secret(torch: Any, count: int, device: Any) -> Any:
    """``count`` random 64-bit numbers, made on the device."""
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
    low, high = (torch.empty(count, dtype=torch.int64, device=device).random_(generator=generator) for _ in "lh")
    return low ^ (high << 1)
