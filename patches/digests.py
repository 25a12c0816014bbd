"""Keyed digests of token prefixes: they tell equal prefixes from different ones and nothing else.

One digest per *cell* of ``grid`` tokens, chained from the start of the prompt, so that equality of digest
``i`` means equality of all tokens before the end of cell ``i``. The key is made per ``KVWITNESS_DIR``, is
kept beside the journals with owner-only rights, and never goes into a journal or a bundle: without it a
digest cannot be guessed from a dictionary of prompts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from kvwitness.patches.schema.events import DIGEST_BYTES

KEY_BYTES = 32
KEY_FILE = "digest.key"
MIN_GRID = 16
"""Cells are never shorter than this: with page size 1 a digest per token would cost milliseconds per prompt."""


def load_key(directory: Path) -> bytes:
    """The digest key of ``directory``, made by whichever process comes first.

    Raises OSError when the folder cannot be written.
    """
    path = directory / KEY_FILE
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == KEY_BYTES:
            return key
    # Written beside and linked into place, so that a second process never reads a half-written key.
    draft = directory / f".{KEY_FILE}.{os.getpid()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
    return path.read_bytes()


def grid_for(page_size: int) -> int:
    """Tokens per cell: the page size, or its smallest multiple of at least :data:`MIN_GRID`."""
    return page_size * -(-MIN_GRID // page_size)


def _raw(tokens: Any) -> memoryview:
    """Token ids as bytes, without a copy where the container allows it."""
    if not isinstance(tokens, array) or tokens.itemsize != 8:
        tokens = array("q", tokens)
    return memoryview(tokens).cast("B")


class Tip(NamedTuple):
    """The end of a digested prefix, from which several longer ones can go on."""

    last: bytes
    """Digest of the last complete cell (the seed, where there is none)."""
    cells: int
    rest: array[int]
    """The tokens behind that cell: less than a cell."""


def seed_of(key: bytes, namespace: Sequence[object] = ()) -> bytes:
    """Where the digests of a namespace begin.

    Requests of another LoRA or cache namespace never share KV: their digests must differ too.
    """
    return blake2b(repr(tuple(namespace)).encode(), key=key, digest_size=DIGEST_BYTES).digest()


def go_on(key: bytes, grid: int, tip: Tip, tokens: Sequence[int]) -> tuple[Tip, list[bytes]]:
    """Append ``tokens``: the new end, and the digests of the cells that they complete."""
    data = array("q", tip.rest)
    data.extend(tokens)
    count, width = len(data) // grid, grid * 8
    raw, last = _raw(data), tip.last
    new: list[bytes] = []
    for start in range(0, count * width, width):
        last = blake2b(last + raw[start : start + width], key=key, digest_size=DIGEST_BYTES).digest()
        new.append(last)
    return Tip(last, tip.cells + count, data[count * grid :]), new


class Chain:
    """The digests of one request's token sequence; grows as the sequence does."""

    __slots__ = ("_key", "_keyed", "_seed", "cells", "grid")

    def __init__(self, key: bytes, grid: int, namespace: Sequence[object] = ()) -> None:
        self._key = key
        self._keyed = blake2b(key=key, digest_size=DIGEST_BYTES)
        """Copied for every cell: a quarter cheaper than to begin with the key again."""
        self.grid = grid
        self._seed = seed_of(key, namespace)
        self.cells: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> tuple[int, list[bytes]]:
        """Digest the complete cells of ``tokens`` (the whole sequence) that are not known yet.

        Returns the index of the first new cell and the new digests.
        """
        first, count = len(self.cells), len(tokens) // self.grid
        if count <= first:
            return first, []
        # Only what is new is turned into bytes: a prompt is looked at many times, and may be long.
        raw, width = _raw(tokens[first * self.grid : count * self.grid]), self.grid * 8
        keyed, last = self._keyed.copy, self.cells[-1] if self.cells else self._seed
        new: list[bytes] = []
        for start in range(0, len(raw), width):
            cell = keyed()
            cell.update(last + raw[start : start + width])
            last = cell.digest()
            new.append(last)
        self.cells.extend(new)
        return first, new

    def point(self, tokens: Sequence[int], position: int) -> bytes | None:
        """The digest of ``tokens[:position]`` where ``position`` is off the grid; None on it or past the end."""
        cell, rest = divmod(position, self.grid)
        if not rest or position > len(tokens) or cell > len(self.cells):
            return None
        before = self.cells[cell - 1] if cell else self._seed
        tail = _raw(tokens[cell * self.grid : position])
        return blake2b(before + tail, key=self._key, digest_size=DIGEST_BYTES, person=b"point").digest()
