"""Checks of kvwitness.patches.stand.copies against plain loops; run by the stand's Python, which has torch.

Not collected by pytest: `test_stand_copies.py` runs it. Prints a line for each check and fails at the
first that does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvwitness.patches.stand import copies, faults

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 2, 5, 4, 6
TOKENS = PAGE * PAGES
DTYPES = (torch.float32, torch.bfloat16)
# Whole pages, since that is what HiCache copies, not in order and not the same on the two sides.
HOST = torch.tensor([t for page in (4, 0, 3) for t in range(page * PAGE, (page + 1) * PAGE)])
DEVICE = torch.tensor([t for page in (1, 5, 2) for t in range(page * PAGE, (page + 1) * PAGE)])

# Where a host pool keeps (token, layer): what the layout's name means, spelled out.
Locate = Callable[[Tensor, int, int], Tensor]
HOST_SHAPES: dict[str, tuple[tuple[int, ...], Locate]] = {
    "layer_first": ((LAYERS, TOKENS, HEADS, DIM), lambda pool, t, layer: pool[layer, t]),
    "page_first": ((TOKENS, LAYERS, HEADS, DIM), lambda pool, t, layer: pool[t, layer]),
    "page_first_direct": (
        (PAGES, LAYERS, PAGE, HEADS, DIM),
        lambda pool, t, layer: pool[t // PAGE, layer, t % PAGE],
    ),
    "page_head": (
        (PAGES, HEADS, PAGE, LAYERS, DIM),
        lambda pool, t, layer: pool[t // PAGE, :, t % PAGE, layer],
    ),
}


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Pools:
    """Device and host pools for K and V in one layout, with random contents everywhere."""

    def __init__(self, layout: str, dtype: torch.dtype) -> None:
        shape, self.locate = HOST_SHAPES[layout]
        device_shape = (LAYERS, TOKENS, HEADS, DIM)
        self.device = [filled(device_shape, dtype, seed) for seed in (1, 2)]
        self.host = [filled(shape, dtype, seed) for seed in (3, 4)]
        self.item = HEADS * DIM * self.device[0].element_size()

    def expect(self, *, to_host: bool, one_layer: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """The pools after the copy, by loops over tokens and layers."""
        device = [pool.clone() for pool in self.device]
        host = [pool.clone() for pool in self.host]
        layers = range(LAYERS) if one_layer is None else [one_layer]
        for kv in range(2):
            for layer in layers:
                for h, d in zip(HOST.tolist(), DEVICE.tolist(), strict=True):
                    slot = self.locate(host[kv], h, layer)
                    if to_host:
                        slot.copy_(device[kv][layer, d])
                    else:
                        device[kv][layer, d] = slot
        return device, host

    def check(self, name: str, expected: tuple[list[Tensor], list[Tensor]]) -> None:
        for got, want in zip([*self.device, *self.host], [*expected[0], *expected[1]], strict=True):
            assert torch.equal(got, want), name
        print(name, self.device[0].dtype)


def table(layers: Tensor) -> Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)


def both_ways(layout: str, name: str, load: Callable[..., Any], backup: Callable[..., Any], dtype: torch.dtype) -> None:
    pools = Pools(layout, dtype)
    expected = pools.expect(to_host=False, one_layer=1)
    load(pools, 1)
    pools.check(f"{name} {layout} load", expected)
    pools = Pools(layout, dtype)
    expected = pools.expect(to_host=True)
    backup(pools)
    pools.check(f"{name} {layout} backup", expected)


OPS = copies.transfer_functions()
LOAD = {"src_indices": HOST, "dst_indices": DEVICE}
BACKUP = {"src_indices": DEVICE, "dst_indices": HOST}


def host_to_device(p: Pools, layer: int) -> dict[str, Any]:
    (dk, dv), (hk, hv) = p.device, p.host
    return {"src_k": hk, "src_v": hv, "dst_k": dk[layer], "dst_v": dv[layer], **LOAD}


def direct_layer_first(dtype: torch.dtype) -> None:
    def load(p: Pools, layer: int) -> None:
        src, dst = [h[layer] for h in p.host], [d[layer] for d in p.device]
        OPS["transfer_kv_direct"](src_layers=src, dst_layers=dst, page_size=PAGE, **LOAD)

    def backup(p: Pools) -> None:
        src, dst = [x for d in p.device for x in d], [x for h in p.host for x in h]
        OPS["transfer_kv_direct"](src_layers=src, dst_layers=dst, page_size=PAGE, **BACKUP)

    both_ways("layer_first", "direct", load, backup, dtype)


def direct_page_first(dtype: torch.dtype) -> None:
    def load(p: Pools, layer: int) -> None:
        OPS["transfer_kv_per_layer_direct_pf_lf"](
            src_ptrs=p.host, dst_ptrs=[d[layer] for d in p.device], layer_id=layer, page_size=PAGE, **LOAD
        )

    def backup(p: Pools) -> None:
        layers = [x for d in p.device for x in d]
        OPS["transfer_kv_all_layer_direct_lf_pf"](src_ptrs=layers, dst_ptrs=p.host, page_size=PAGE, **BACKUP)

    both_ways("page_first_direct", "direct", load, backup, dtype)


def kernel_layer_first(dtype: torch.dtype) -> None:
    def load(p: Pools, layer: int) -> None:
        sides = host_to_device(p, layer) | {"src_k": p.host[0][layer], "src_v": p.host[1][layer]}
        OPS["transfer_kv_per_layer"](**sides, item_size=p.item)

    def load_mla(p: Pools, layer: int) -> None:
        for h, d in zip(p.host, p.device, strict=True):
            OPS["transfer_kv_per_layer_mla"](src=h[layer], dst=d[layer], item_size=p.item, **LOAD)

    def backup(p: Pools) -> None:
        (dk, dv), (hk, hv) = p.device, p.host
        OPS["transfer_kv_all_layer"](
            table(dk), table(hk), table(dv), table(hv), item_size=p.item, num_layers=LAYERS, **BACKUP
        )

    def backup_mla(p: Pools) -> None:
        for h, d in zip(p.host, p.device, strict=True):
            OPS["transfer_kv_all_layer_mla"](table(d), table(h), item_size=p.item, num_layers=LAYERS, **BACKUP)

    both_ways("layer_first", "kernel", load, backup, dtype)
    both_ways("layer_first", "kernel mla", load_mla, backup_mla, dtype)


def kernel_page_first(dtype: torch.dtype) -> None:
    def load(p: Pools, layer: int) -> None:
        OPS["transfer_kv_per_layer_pf_lf"](
            **host_to_device(p, layer), layer_id=layer, item_size=p.item, src_layout_dim=p.item * LAYERS
        )

    def backup(p: Pools) -> None:
        (dk, dv), (hk, hv) = p.device, p.host
        OPS["transfer_kv_all_layer_lf_pf"](
            src_k_layers=table(dk),
            src_v_layers=table(dv),
            dst_k=hk,
            dst_v=hv,
            item_size=p.item,
            dst_layout_dim=p.item * LAYERS,
            num_layers=LAYERS,
            **BACKUP,
        )

    def single(load_name: str, backup_name: str, sources: str) -> tuple[Callable[..., None], ...]:
        def load_one(p: Pools, layer: int) -> None:
            for h, d in zip(p.host, p.device, strict=True):
                OPS[load_name](
                    src=h,
                    dst=d[layer],
                    layer_id=layer,
                    item_size=p.item,
                    src_layout_dim=p.item * LAYERS,
                    **LOAD,
                )

        def backup_one(p: Pools) -> None:
            sizes = {"item_size": p.item, "dst_layout_dim": p.item * LAYERS, "num_layers": LAYERS}
            for h, d in zip(p.host, p.device, strict=True):
                OPS[backup_name](**{sources: table(d)}, dst=h, **sizes, **BACKUP)

        return load_one, backup_one

    both_ways("page_first", "kernel", load, backup, dtype)
    mla = single("transfer_kv_per_layer_mla_pf_lf", "transfer_kv_all_layer_mla_lf_pf", "src_layers")
    both_ways("page_first", "kernel mla", *mla, dtype)
    state = single("transfer_kv_mamba_pf_lf", "transfer_kv_mamba_lf_pf", "src_ptrs")
    both_ways("page_first", "kernel state", *state, dtype)


def kernel_page_head(dtype: torch.dtype) -> None:
    shape = {"page_size": PAGE, "head_num": HEADS}

    def load(p: Pools, layer: int) -> None:
        sizes = {"item_size": p.item, "src_layout_dim": p.item * LAYERS}
        OPS["transfer_kv_per_layer_ph_lf"](**host_to_device(p, layer), layer_id=layer, **sizes, **shape)

    def backup(p: Pools) -> None:
        (dk, dv), (hk, hv) = p.device, p.host
        sizes = {"item_size": p.item, "dst_layout_dim": p.item * LAYERS, "num_layers": LAYERS}
        OPS["transfer_kv_all_layer_lf_ph"](table(dk), hk, table(dv), hv, DEVICE, HOST, **sizes, **shape)

    both_ways("page_head", "kernel", load, backup, dtype)


def nothing_to_copy() -> None:
    p = Pools("page_first", torch.float32)
    before = [pool.clone() for pool in (*p.device, *p.host)]
    none = torch.empty(0, dtype=torch.int64)
    OPS["transfer_kv_all_layer_mla_lf_pf"](table(p.device[0]), p.host[0], none, none, p.item, p.item * LAYERS, LAYERS)
    assert all(torch.equal(x, y) for x, y in zip(before, (*p.device, *p.host), strict=True))
    print("empty index")


def rows_of_nothing() -> None:
    """The recurrent state of a model that has only a convolution's."""
    device, host = torch.empty(TOKENS, 2, 0), torch.empty(TOKENS, 1, 1, 2, 0)
    OPS["transfer_kv_all_layer_direct_lf_pf"]([device], [host], DEVICE, HOST, 1)
    print("rows of nothing")


def payload_faults() -> None:
    """What a fault writes, and that it writes nowhere else."""
    for dtype in DTYPES:
        source, clean = filled((TOKENS, 8), dtype, 5), filled((TOKENS, 8), dtype, 6)
        for text in ("copy-skip", "copy-zero", "copy-corrupt:h2d", "copy-zero:d2h"):
            asked = faults.parse_faults(text)
            copies.set_hooks(copies.CopyHooks(payload=lambda rows, asked=asked: faults._spoil(asked, rows)))
            faults._current.direction = "h2d"
            target = clean.clone()
            OPS["transfer_kv_direct"]([source], [target], HOST, DEVICE, PAGE)
            others = [t for t in range(TOKENS) if t not in DEVICE.tolist()]
            assert torch.equal(target[others], clean[others]), text
            got, right = target[DEVICE], source[HOST]
            if text == "copy-skip":
                assert torch.equal(got, clean[DEVICE]), text
            elif text == "copy-zero":
                assert not got.any(), text
            elif text == "copy-corrupt:h2d":
                assert not (got == right).any() and got.isfinite().all(), text
            else:
                assert torch.equal(got, right), text
            print("fault", text, dtype)
    copies.set_hooks(copies.CopyHooks())


if __name__ == "__main__":
    for each_dtype in DTYPES:
        direct_layer_first(each_dtype)
        direct_page_first(each_dtype)
        kernel_layer_first(each_dtype)
        kernel_page_first(each_dtype)
        kernel_page_head(each_dtype)
    nothing_to_copy()
    rows_of_nothing()
    payload_faults()
