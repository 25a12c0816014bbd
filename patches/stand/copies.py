"""HiCache's transfer functions in plain torch: the same arguments as sgl_kernel's, on CPU memory.

SGLang imports these names from its CUDA kernel package where there is a GPU; on a CPU the names are just
missing from its host pool modules, and the stand puts these there.

Naming, from SGLang: `lf` layer first, `pf` page first, `ph` page head; `pf_lf` copies from a page-first
pool to a layer-first pool. Indices are token slots. The device pool is always layer first: one tensor
(tokens, ...) a layer. Host pools, with T tokens, P pages of S tokens, L layers, H heads of D values:

    layer_first         (T, ...) a layer        page_first   (T, L, ...)
    page_first_direct   (P, L, S, ...)          page_head    (P, H, S, L, D)

Every write goes through `_put`, which is where the faults of `kvwitness.patches.stand.faults` act.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def _unchanged(payload: Tensor) -> Tensor | None:
    return payload


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class CopyHooks:
    """What a fault may do to copies.

    `before` is called once for each transfer call; `payload` once for each tensor written, with the rows
    to write: it returns what to write in their place, or None to write nothing.
    """

    before: Callable[[], None] = _nothing
    payload: Callable[[Tensor], Tensor | None] = _unchanged


_hooks = CopyHooks()


def set_hooks(hooks: CopyHooks) -> None:
    """Make `hooks` act on every copy of this process from now on."""
    global _hooks
    _hooks = hooks


def _put(destination: Tensor, where: Any, payload: Tensor) -> None:
    written = _hooks.payload(payload)
    if written is not None:
        destination[where] = written


def _slots(indices: Tensor) -> Tensor:
    return indices.to("cpu", torch.int64)


def _pages(indices: Tensor, page_size: int) -> Tensor:
    return _slots(indices)[::page_size] // page_size


def _bytes(tensor: Tensor, *shape: int) -> Tensor:
    """A byte view of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).view(*shape)


def _table_rows(address: int, slots: Tensor, row_bytes: int) -> Tensor:
    """The byte rows behind one entry of a pointer table, as many as `slots` reaches.

    SGLang passes one raw address a layer where its kernels take many layers at once. On the stand these
    are addresses in this process, of pools that live as long as the process.
    """
    size = (int(slots.max()) + 1) * row_bytes
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(-1, row_bytes)


# --- one tensor a layer on both sides -------------------------------------------------------------------


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """direct, layer_first, both directions."""
    source, target = _slots(src_indices), _slots(dst_indices)
    for src, dst in zip(src_layers, dst_layers, strict=True):
        _put(dst, target, src[source])


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, *_: Any, **__: Any
) -> None:
    """kernel, layer_first, one latent tensor; also for state pools."""
    # By leading dimension, not by item_size: it is in bytes in 0.5 and in elements in 0.4.9.
    rows = src[_slots(src_indices)].reshape(-1, *dst.shape[1:])
    _put(dst, _slots(dst_indices), rows)


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    *_: Any,
    **__: Any,
) -> None:
    """kernel, layer_first, host to device."""
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size)


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    *_: Any,
    **__: Any,
) -> None:
    """kernel, layer_first, device to host, one latent tensor a layer; both sides are pointer tables."""
    source, target = _slots(src_indices), _slots(dst_indices)
    if source.numel() == 0:
        return
    for src, dst in zip(src_layers.tolist()[:num_layers], dst_layers.tolist()[:num_layers], strict=True):
        _put(_table_rows(dst, target, item_size), target, _table_rows(src, source, item_size)[source])


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    *_: Any,
    **__: Any,
) -> None:
    """kernel, layer_first, device to host."""
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


# --- host page_first: (T, L, ...) -----------------------------------------------------------------------


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    *_: Any,
    **__: Any,
) -> None:
    """kernel, page_first, host to device, one latent tensor. Sizes are in bytes."""
    layer = slice(layer_id * item_size, (layer_id + 1) * item_size)
    rows = _bytes(src, -1, src_layout_dim)[:, layer][_slots(src_indices)]
    _put(_bytes(dst, -1, item_size), _slots(dst_indices), rows)


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    *_: Any,
    **__: Any,
) -> None:
    """kernel, page_first, host to device."""
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    *_: Any,
    **__: Any,
) -> None:
    """kernel, page_first, device to host, one latent tensor a layer; the source is a pointer table."""
    source, target = _slots(src_indices), _slots(dst_indices)
    if source.numel() == 0:
        return
    rows = _bytes(dst, -1, dst_layout_dim)
    for layer, address in enumerate(src_layers.tolist()[:num_layers]):
        columns = rows[:, layer * item_size : (layer + 1) * item_size]
        _put(columns, target, _table_rows(address, source, item_size)[source])


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    *_: Any,
    **__: Any,
) -> None:
    """kernel, page_first, device to host."""
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)


# --- host page_first_direct: (P, L, S, ...) -------------------------------------------------------------


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """direct, page_first_direct, host to device."""
    pages, target = _pages(src_indices, page_size), _slots(dst_indices)
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        _put(dst, target, src[pages, layer_id].flatten(0, 1))


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """direct, page_first_direct, device to host: `src_ptrs` has all layers of each `dst_ptrs` in turn."""
    source, pages = _slots(src_indices), _pages(dst_indices, page_size)
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for pool, dst in enumerate(dst_ptrs):
        for layer in range(num_layers):
            rows = src_ptrs[pool * num_layers + layer][source]
            # Not -1: a model without a recurrent state has a state pool whose rows hold nothing.
            _put(dst, (pages, layer), rows.view(len(pages), page_size, *rows.shape[1:]))


# --- host page_head: (P, H, S, L, D) --------------------------------------------------------------------


def _by_head(pool: Tensor, head_num: int, page_size: int, num_layers: int, item_size: int) -> Tensor:
    return _bytes(pool, -1, head_num, page_size, num_layers, item_size // head_num)


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    *_: Any,
    **__: Any,
) -> None:
    """kernel, page_head, host to device. Sizes are in bytes."""
    source, target = _slots(src_indices), _slots(dst_indices)
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        pool = _by_head(src, head_num, page_size, src_layout_dim // item_size, item_size)
        rows = pool[source // page_size, :, source % page_size, layer_id]
        _put(_bytes(dst, -1, item_size), target, rows.reshape(-1, item_size))


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    *_: Any,
    **__: Any,
) -> None:
    """kernel, page_head, device to host; the sources are pointer tables."""
    source, target = _slots(src_indices), _slots(dst_indices)
    if source.numel() == 0:
        return
    heads = slice(None)
    for table, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        pool = _by_head(dst, head_num, page_size, num_layers, item_size)
        for layer, address in enumerate(table.tolist()[:num_layers]):
            rows = _table_rows(address, source, item_size)[source].view(-1, head_num, item_size // head_num)
            _put(pool, (target // page_size, heads, target % page_size, layer), rows)


# --- state pools (one slot a request), kernel backend ---------------------------------------------------


def transfer_kv_mamba_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """kernel, page_first, host to device, for state pools."""
    transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_mamba_lf_pf(
    src_ptrs: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """kernel, page_first, device to host, for state pools."""
    transfer_kv_all_layer_mla_lf_pf(src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)


def _with_hooks(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def transfer(*args: Any, **kwargs: Any) -> None:
        _hooks.before()
        function(*args, **kwargs)

    return transfer


def transfer_functions() -> dict[str, Callable[..., None]]:
    """Every transfer function by the name under which SGLang's host pools call it."""
    return {name: _with_hooks(value) for name, value in globals().items() if name.startswith("transfer_kv_")}
