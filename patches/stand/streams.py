"""Device streams and events for a CPU, where every operation has ended when its call returns.

torch.cpu has classes of these names, but not every method that SGLang up to 0.5.17 calls on them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Self


class Event:
    """An event that has always happened already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class Stream:
    """A stream that is always empty; also its own context manager."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _do_nothing(*_: Any, **__: Any) -> None: ...


def device_module() -> ModuleType:
    """What SGLang uses of torch.cuda in its cache controller."""
    module = ModuleType("kvwitness_stand_device")
    names: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: stream if stream is not None else Stream(),
        "current_stream": lambda *_: Stream(),
        "set_stream": _do_nothing,
        "synchronize": _do_nothing,
    }
    vars(module).update(names)
    return module


class TorchWithCpuStreams:
    """torch, but for `torch.cuda`, for a module that takes its streams from there."""

    def __init__(self) -> None:
        self.cuda = device_module()

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)
