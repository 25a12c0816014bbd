"""The paged allocator's two kernels in plain torch.

Up to 0.5.17 SGLang computes the slots of new tokens in triton kernels, which need a GPU driver; 0.5.23 has
a torch path of its own. A request that grows from `before` to `after` tokens first fills its last page,
right after its last slot, and then takes as many free pages as it needs, in order.

The arguments are named as the kernels name them. Before 0.5.6 a kernel also writes into `ret_values` how
many pages it took; later the caller computes that itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Arguments = Mapping[str, Any]


def _pages_of(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _new_slots(before: int, after: int, last_slot: int, free_pages: Tensor, page_size: int) -> Tensor:
    """The slots of tokens `before` to `after`; `free_pages` starts at the first page to take."""
    positions = torch.arange(before, after)
    page = positions // page_size - _pages_of(before, page_size)
    in_old_page = last_slot + 1 + positions - before
    if _pages_of(after, page_size) == _pages_of(before, page_size):
        return in_old_page
    in_new_page = free_pages[page.clamp(min=0)] * page_size + positions % page_size
    return torch.where(page < 0, in_old_page, in_new_page)


def alloc_extend(arguments: Arguments) -> None:
    """Slots for each request's new tokens of a prefill, one request's after the other's."""
    free, out, page_size = arguments["free_page_ptr"], arguments["out_indices"], arguments["page_size"]
    pages, written = 0, 0
    requests = zip(
        arguments["pre_lens_ptr"].tolist(),
        arguments["seq_lens_ptr"].tolist(),
        arguments["last_loc_ptr"].tolist(),
        strict=True,
    )
    for before, after, last_slot in requests:
        needed = _pages_of(after, page_size) - _pages_of(before, page_size)
        # With too few free pages SGLang throws the result away, so it may stay unwritten.
        if pages + needed <= len(free):
            slots = _new_slots(before, after, last_slot, free[pages:], page_size)
            out[written : written + after - before] = slots.to(out.dtype)
        pages += needed
        written += after - before
    _return(arguments, (pages << 32) | written)


def alloc_decode(arguments: Arguments) -> None:
    """One slot for each request's next token."""
    free, out, page_size = arguments["free_page_ptr"], arguments["out_indices"], arguments["page_size"]
    pages = 0
    requests = zip(arguments["seq_lens_ptr"].tolist(), arguments["last_loc_ptr"].tolist(), strict=True)
    for index, (after, last_slot) in enumerate(requests):
        if (after - 1) % page_size:
            out[index] = last_slot + 1
            continue
        if pages < len(free):
            out[index] = free[pages] * page_size
        pages += 1
    _return(arguments, pages)


def _return(arguments: Arguments, value: int) -> None:
    if "ret_values" in arguments:
        arguments["ret_values"].fill_(value)


class Launcher:
    """Stands where a triton kernel does: `kernel[grid](...)` calls `function` with the arguments by name."""

    def __init__(self, kernel: Any, function: Callable[[Arguments], None]) -> None:
        self._names = tuple(kernel.arg_names)
        self._function = function

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self._function(dict(zip(self._names, args, strict=False)) | kwargs)

        return launch
