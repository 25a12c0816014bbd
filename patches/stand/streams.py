"""Streams for a cache controller that takes them from torch.cuda whatever the device, as in 0.4.

On a CPU every operation has ended when its call returns, so a stream has nothing to wait for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Stream:
    """A stream that is always empty."""

    def synchronize(self) -> None: ...


def _no_effect(_stream: Stream) -> None: ...


class TorchWithCpuStreams:
    """torch, but for `torch.cuda`, which has what a cache controller of 0.4 calls and nothing else."""

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(Stream=Stream, current_stream=Stream, set_stream=_no_effect)

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)
