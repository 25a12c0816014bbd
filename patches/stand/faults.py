"""Faults that a stand can be asked for, so that a tracer can be shown to notice them.

KVWITNESS_STAND_FAULT is a comma-separated list of:

    copy-skip[:h2d|:d2h]      report the copy as done and write nothing
    copy-zero[:h2d|:d2h]      write zeros
    copy-corrupt:h2d          write every byte with its top bit flipped
    copy-delay:MS[:h2d|:d2h]  sleep MS milliseconds before each transfer call
                              (host to device: one call a layer; device to host: one call a backup)
    host-flip[:LAYER]         flip one bit of what the host pool holds, in layer LAYER (0) of the first page
                              that a load-back reads, before it is read
    load-back-too-short       the radix cache refuses every load-back as too short
    load-back-no-memory       the cache controller finds no device slots for a load-back
    load-late:MS              the loading thread wakes up MS milliseconds late (SGLang 0.4 to 0.5.1)

`h2d` is a load from host to device, `d2h` a backup from device to host; without either, both. Importing
this module imports neither torch nor SGLang, so that the tool side can check a list before it starts a
server.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from kvwitness.patches.stand.after_import import after_import

if TYPE_CHECKING:
    from torch import Tensor

FAULT_VARIABLE = "KVWITNESS_STAND_FAULT"
MAX_DELAY_MS = 60_000.0

Direction = Literal["h2d", "d2h"]
_DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h")
COPY_KINDS = ("copy-skip", "copy-zero", "copy-corrupt", "copy-delay")
LOAD_BACK_KINDS = ("load-back-too-short", "load-back-no-memory")
LATE_KIND = "load-late"
FLIP_KIND = "host-flip"
# Longer than any prompt, so that SGLang's own "too short to load" path refuses every load-back.
_NEVER_LONG_ENOUGH = sys.maxsize


class UnknownFaultError(ValueError):
    """A fault that the stand does not know, or one that is written wrongly."""


@dataclass(frozen=True)
class Fault:
    """One fault. `direction` is None for both, `delay_ms` is 0 but for copy-delay and load-late, `layer` is
    for host-flip."""

    kind: str
    direction: Direction | None = None
    delay_ms: float = 0.0
    layer: int = 0

    def acts_on(self, direction: Direction | None) -> bool:
        """Whether a copy in `direction` (None: not known) is faulty. One of unknown direction is hit only
        by faults that ask for both."""
        return self.direction is None or self.direction == direction


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse a list as KVWITNESS_STAND_FAULT has it; an empty text is no fault.

    Raises UnknownFaultError for anything but the forms above, a repeated kind and direction included.
    """
    if not text.strip():
        return ()
    faults: list[Fault] = []
    for item in text.split(","):
        fault = _parse_one(item.strip())
        if any(other.kind == fault.kind and other.direction == fault.direction for other in faults):
            raise UnknownFaultError(f"{FAULT_VARIABLE}: {item.strip()!r} is asked for twice")
        faults.append(fault)
    return tuple(faults)


def _parse_one(item: str) -> Fault:
    kind, *rest = item.split(":")
    if kind in LOAD_BACK_KINDS:
        if rest:
            raise UnknownFaultError(f"{FAULT_VARIABLE}: {kind} takes nothing after it, got {item!r}")
        return Fault(kind)
    if kind == FLIP_KIND:
        if len(rest) > 1 or not all(part.isdecimal() for part in rest):
            raise UnknownFaultError(f"{FAULT_VARIABLE}: {kind} takes the number of a layer, got {item!r}")
        return Fault(kind, layer=int(rest[0]) if rest else 0)
    if kind not in (*COPY_KINDS, LATE_KIND):
        known = ", ".join((*COPY_KINDS, *LOAD_BACK_KINDS, LATE_KIND, FLIP_KIND))
        raise UnknownFaultError(f"{FAULT_VARIABLE}: unknown fault {item!r} (known: {known})")
    delay_ms = 0.0
    if kind in ("copy-delay", LATE_KIND):
        if not rest:
            raise UnknownFaultError(f"{FAULT_VARIABLE}: {kind} needs milliseconds, as {kind}:20")
        delay_ms = _parse_delay(rest.pop(0), item)
    if kind == LATE_KIND and rest:
        raise UnknownFaultError(f"{FAULT_VARIABLE}: {kind} takes milliseconds only, got {item!r}")
    direction = _parse_direction(rest, item)
    if kind == "copy-corrupt" and direction != "h2d":
        raise UnknownFaultError(f"{FAULT_VARIABLE}: only copy-corrupt:h2d exists, got {item!r}")
    return Fault(kind, direction, delay_ms)


def _parse_delay(text: str, item: str) -> float:
    try:
        delay_ms = float(text)
    except ValueError:
        delay_ms = math.nan
    if not 0 < delay_ms <= MAX_DELAY_MS:
        raise UnknownFaultError(
            f"{FAULT_VARIABLE}: the delay in {item!r} is not a number of milliseconds "
            f"above 0 and up to {MAX_DELAY_MS:.0f}"
        )
    return delay_ms


def _parse_direction(rest: list[str], item: str) -> Direction | None:
    if not rest:
        return None
    for direction in _DIRECTIONS:
        if rest == [direction]:
            return direction
    raise UnknownFaultError(f"{FAULT_VARIABLE}: expected h2d or d2h at the end of {item!r}")


def requested() -> tuple[Fault, ...]:
    """The faults that this process's environment asks for. Raises UnknownFaultError."""
    return parse_faults(os.environ.get(FAULT_VARIABLE, ""))


def install_faults() -> None:
    """Put the faults that the environment asks for in place, each when what it changes is imported.

    To be called once, after the stand's shims and before anything else wraps the same methods.
    """
    faults = requested()
    copy_faults = tuple(fault for fault in faults if fault.kind in COPY_KINDS)
    if copy_faults:
        _install_copy_faults(copy_faults)
    kinds = {fault.kind for fault in faults}
    if "load-back-too-short" in kinds:
        after_import("sglang.srt.mem_cache.unified_radix_cache", _refuse_short_load_backs)
        after_import("sglang.srt.mem_cache.hiradix_cache", _refuse_short_load_backs)
    for flip in (fault for fault in faults if fault.kind == FLIP_KIND):
        from kvwitness.patches.stand import shims

        for name in shims.HOST_POOL_MODULES:
            after_import(name, functools.partial(_flip_before_load, flip.layer))
    late_ms = sum(fault.delay_ms for fault in faults if fault.kind == LATE_KIND)
    if late_ms:
        after_import("sglang.srt.managers.cache_controller", functools.partial(_wake_up_late, late_ms))
    if "load-back-no-memory" in kinds:
        after_import("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller", _refuse_device_slots)
        after_import("sglang.srt.managers.cache_controller", _refuse_device_slots)


# --- copies ---------------------------------------------------------------------------------------------


# The methods of a host pool, and in 0.4.9 of a device pool, inside which transfer functions are called.
_DIRECTION_OF: dict[str, Direction] = {
    "load_to_device_per_layer": "h2d",
    "backup_from_device_all_layer": "d2h",
    "load_from_host_per_layer": "h2d",
    "backup_to_host_all_layer": "d2h",
}


class _CurrentCopy(threading.local):
    direction: Direction | None = None


_current = _CurrentCopy()


def _install_copy_faults(faults: tuple[Fault, ...]) -> None:
    from kvwitness.patches.stand import shims

    # The transfer functions need torch, which is not imported for a process that never copies.
    after_import("torch", functools.partial(_hook_copies, faults))
    for name in (*shims.HOST_POOL_MODULES, shims.DEVICE_POOL_MODULE):
        after_import(name, _mark_directions)


def _hook_copies(faults: tuple[Fault, ...], _torch: ModuleType) -> None:
    from kvwitness.patches.stand import copies

    copies.set_hooks(
        copies.CopyHooks(before=functools.partial(_delay, faults), payload=functools.partial(_spoil, faults))
    )


def _mark_directions(module: ModuleType) -> None:
    from kvwitness.patches.stand import shims

    for cls in shims.own_classes(module):
        for method_name, direction in _DIRECTION_OF.items():
            _mark_direction(cls, method_name, direction)


def _mark_direction(cls: type, method_name: str, direction: Direction) -> None:
    """Record, around `cls`'s own method, which way it copies: the transfer functions cannot tell, since
    both sides are CPU tensors and `transfer_kv_direct`, for one, serves both."""
    method = vars(cls).get(method_name)
    if not inspect.isfunction(method) or getattr(method, "__isabstractmethod__", False):
        return

    @functools.wraps(method)
    def marked(*args: Any, **kwargs: Any) -> Any:
        outer = _current.direction
        _current.direction = direction
        try:
            return method(*args, **kwargs)
        finally:
            _current.direction = outer

    setattr(cls, method_name, marked)


def _acting(faults: Iterable[Fault]) -> list[Fault]:
    return [fault for fault in faults if fault.acts_on(_current.direction)]


def _delay(faults: tuple[Fault, ...]) -> None:
    total_ms = sum(fault.delay_ms for fault in _acting(faults))
    if total_ms:
        time.sleep(total_ms / 1e3)


def _spoil(faults: tuple[Fault, ...], payload: Tensor) -> Tensor | None:
    import torch

    for fault in _acting(faults):
        if fault.kind == "copy-skip":
            return None
        if fault.kind == "copy-zero":
            payload = torch.zeros_like(payload)
        elif fault.kind == "copy-corrupt":
            # The top bit of each byte: for floats this flips signs and exponents by little, so that the
            # values are wrong but finite, and the model still runs on them.
            payload = (payload.contiguous().view(torch.uint8) ^ 0x80).view(payload.dtype)
    return payload


# --- load-back ------------------------------------------------------------------------------------------


def _wrap(cls: type, method_name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    method = vars(cls)[method_name]
    setattr(cls, method_name, functools.wraps(method)(make(method)))


def _refuse_short_load_backs(module: ModuleType) -> None:
    """Raise the threshold of each tree, right after the method that sets it."""

    def make(set_up: Callable[..., Any]) -> Callable[..., Any]:
        def with_threshold(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = set_up(self, *args, **kwargs)
            if not hasattr(self, "load_back_threshold"):
                raise RuntimeError("this SGLang has no load_back_threshold: load-back-too-short cannot act")
            self.load_back_threshold = _NEVER_LONG_ENOUGH
            return result

        return with_threshold

    for class_name, method_name in (("UnifiedRadixCache", "init_hicache"), ("HiRadixCache", "__init__")):
        if hasattr(module, class_name):
            _wrap(getattr(module, class_name), method_name, make)


def _refuse_device_slots(module: ModuleType) -> None:
    def make(load: Callable[..., Any]) -> Callable[..., Any]:
        def without_slots(self: Any, host_indices: Any, *args: Any, **kwargs: Any) -> Any:
            # SGLang allocates slots itself only in this case; with slots given, or none needed, it cannot
            # fail for want of them.
            allocates = host_indices.numel() > 0 and kwargs.get("device_indices") is None
            return None if allocates else load(self, host_indices, *args, **kwargs)

        return without_slots

    for class_name in ("HybridCacheController", "HiCacheController"):
        cls = getattr(module, class_name, None)
        if cls is not None and cls.__module__ == module.__name__:
            _wrap(cls, "load", make)


def _flip_before_load(layer: int, module: ModuleType) -> None:
    """Change what lies in the host pool, before the first layer of each load-back is copied."""
    from kvwitness.patches.stand import shims

    def make(load: Callable[..., Any]) -> Callable[..., Any]:
        def flipped(self: Any, device_pool: Any, host_indices: Any, *args: Any, **kwargs: Any) -> Any:
            first_layer = kwargs["layer_id"] if "layer_id" in kwargs else args[1]
            if first_layer == 0 and len(host_indices):
                value = _held(self, int(host_indices.min()), layer)
                value.view(-1).view(_bytes_type())[0] ^= 1
            return load(self, device_pool, host_indices, *args, **kwargs)

        return flipped

    for cls in shims.own_classes(module):
        method = vars(cls).get("load_to_device_per_layer")
        if inspect.isfunction(method) and not getattr(method, "__isabstractmethod__", False):
            _wrap(cls, "load_to_device_per_layer", make)


def _bytes_type() -> Any:
    import torch

    return torch.uint8


def _held(pool: Any, slot: int, layer: int) -> Any:
    """What a host pool holds of one token in one layer (values, where keys and values are apart)."""
    held = pool.kv_buffer if hasattr(pool, "kv_lora_rank") else pool.kv_buffer[1]
    page, rest = divmod(slot, pool.page_size)
    places: dict[str, tuple[int, ...]] = {
        "layer_first": (layer, slot),
        "page_first": (slot, layer),
        "page_first_direct": (page, layer, rest),
        "page_head": (page, 0, rest, layer),
    }
    return held[places[pool.layout]]


def _wake_up_late(late_ms: float, module: ModuleType) -> None:
    """Delay the first thing that the loading thread does when a batch is ready for what it loads."""
    counter = module.LayerDoneCounter
    if not hasattr(counter, "increment"):
        raise RuntimeError(f"this SGLang has no loading thread: {LATE_KIND} cannot act")

    def make(update_producer: Callable[..., Any]) -> Callable[..., Any]:
        def late(self: Any) -> Any:
            time.sleep(late_ms / 1e3)
            return update_producer(self)

        return late

    _wrap(counter, "update_producer", make)
