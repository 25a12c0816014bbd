"""Room that is kept free for a bundle's small files, so that a disk that fills up during a run does not cost them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

SPARE_BYTES: Final = 8 << 20


class Spare:
    """A file next to ``destination`` that holds :data:`SPARE_BYTES`; a context manager that takes it away again.

    A disk that is full already, or cannot reserve, leaves it empty: that is no reason not to run.
    """

    def __init__(self, destination: Path) -> None:
        self._path = destination.with_name(f".{destination.name}.spare-{os.getpid()}")

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, SPARE_BYTES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the room back to the disk."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
