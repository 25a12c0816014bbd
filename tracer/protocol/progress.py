"""Where a run of the protocol reports what it is doing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called from the thread that runs the protocol."""

    def phase(self, title: str) -> None: ...

    def detail(self, text: str) -> None: ...
