"""Checks of kvwitness.patches.page_digests on real tensors; run by a Python that has torch, on a CPU or a GPU.

Not collected by pytest: `test_stand_page_digests.py` runs it. Prints a line for each check and fails at the first
that does not hold. With the argument ``cuda`` everything lies in GPU memory, the scheduler's part runs with
every synchronisation being an error, and its time is printed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvwitness.patches import page_sums
from kvwitness.patches.page_digests import Digester
from kvwitness.patches.schema.events import BackupDigested, Direction, LoadDigested

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
LAYERS = 4


class Witness:
    """What the digester uses of one."""

    def __init__(self, page: int) -> None:
        self.page_size, self.digest_key = page, b"k" * 32
        self.events: list[tuple[Any, ...]] = []
        self.failures: list[tuple[str, BaseException]] = []

    def emit(self, *event: Any, tail: bytes) -> None:
        self.events.append((*event, tail))

    def failed(self, name: str, error: BaseException) -> None:
        self.failures.append((name, error))


def pool_of(kind: str, dtype: torch.dtype, tokens: int, width: int = 16) -> Any:
    def filled() -> list[Tensor]:
        shape = (tokens, 2, width)
        size = width * 2 * tokens * dtype.itemsize
        raw = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE) for _ in range(LAYERS)]
        return [r.view(dtype).view(shape) for r in raw]

    lists = {"mha": ("k_buffer", "v_buffer"), "mla": ("kv_buffer",)}[kind]
    return SimpleNamespace(size=tokens, **{name: filled() for name in lists})


def slots_of(pages: list[int], page: int, device: torch.device | None = None) -> Tensor:
    return torch.tensor([p * page + i for p in pages for i in range(page)], device=device)


class Held:
    """A queue that nobody empties until it is told to."""

    def __init__(self, real: Any) -> None:
        self.real, self.jobs = real, []

    def put(self, job: Any) -> None:
        self.jobs.append(job)

    def get(self) -> Any:
        # The thread may look here for the first time only now.
        return self.real.get()

    def qsize(self) -> int:
        return len(self.jobs)


@contextlib.contextmanager
def without_waiting(digester: Digester) -> Iterator[None]:
    """Nothing here may wait for the device; what the thread does comes after it."""
    real = digester._ready
    digester._ready = held = Held(real)  # type: ignore[assignment]
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        digester._ready = real
        for job in held.jobs:
            real.put(job)


def stream() -> Any:
    return torch.cuda.stream(torch.cuda.Stream()) if DEVICE.type == "cuda" else contextlib.nullcontext()


def event() -> Any:
    if DEVICE.type != "cuda":
        return None
    recorded = torch.cuda.Event()
    recorded.record()
    return recorded


def there_and_back(
    pool: Any, page: int, spoil: Callable[[Any, list[int]], None] = lambda *_: None, every: int = 1
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Back five pages up, put them into other device pages, digest both; by host slot."""
    w = Witness(page)
    digester = Digester(w, every)  # type: ignore[arg-type]
    host = slots_of([7, 2, 3, 9, 4], page)
    source, target = [1, 3, 5, 7, 9], [2, 4, 6, 8, 10]
    out, back = slots_of(source, page, DEVICE), slots_of(target, page, DEVICE)
    operation = SimpleNamespace(host_indices=host, device_indices=out)
    ack = SimpleNamespace()
    with without_waiting(digester):
        digester.queued(Direction.D2H, [operation])
        with stream():
            digester.copied(pool)
        digester.launched(ack)
        digester.named(ack, 1)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        for buffer in getattr(pool, name, ()):
            buffer[back] = buffer[out]
    spoil(pool, target)
    loaded = SimpleNamespace(host_indices=host, device_indices=back)
    ack = SimpleNamespace(finish_event=event())
    with without_waiting(digester):
        digester.queued(Direction.H2D, [loaded])
        digester.launched(ack)
        digester.named(ack, 2)
    digester.stop()
    digester.join()
    assert not w.failures, w.failures
    kinds = {(kind, transfer) for kind, transfer, _, _ in w.events}
    assert kinds == {(BackupDigested, 1), (LoadDigested, 2)}, kinds
    taken = [{slot: tail for kind, _, slot, tail in w.events if kind is k} for k in (BackupDigested, LoadDigested)]
    assert taken[0].keys() == taken[1].keys() and all(len(tail) == 8 * LAYERS for tail in taken[0].values())
    return taken[0], taken[1]


def differing(before: dict[int, bytes], after: dict[int, bytes]) -> set[tuple[int, int]]:
    """Host slot and layer."""
    return {
        (slot, layer)
        for slot in before
        for layer in range(LAYERS)
        if before[slot][8 * layer : 8 * layer + 8] != after[slot][8 * layer : 8 * layer + 8]
    }


def flip(buffers: str, layer: int, row: int, byte: int, bit: int) -> Callable[[Any, list[int]], None]:
    def spoil(pool: Any, target: list[int]) -> None:
        page = getattr(pool, buffers)[layer]
        page.view(page.shape[0], -1).view(torch.uint8)[row, byte] ^= bit

    return spoil


def main() -> None:
    for kind in ("mha", "mla"):
        for dtype in (torch.bfloat16, torch.float32, torch.uint8):
            for page in (1, 16, 64):
                before, after = there_and_back(pool_of(kind, dtype, 12 * page), page)
                assert len(before) == 5 and before == after
    print("equal bytes have equal digests")

    for bit in (1, 0x80):
        for byte in (0, 31, 63):
            spoil = flip("v_buffer", 2, 4 * 16 + 3, byte, bit)  # In device page 4, host page 2.
            assert differing(*there_and_back(pool_of("mha", torch.bfloat16, 192), 16, spoil)) == {(32, 2)}
    print("one bit is found, with its page and layer")

    def two_top_bits(pool: Any, target: list[int]) -> None:
        words = pool.k_buffer[1].view(192, -1).view(torch.int32)
        words[2 * 16, 0] ^= -(2**31)
        words[2 * 16, 1] ^= -(2**31)

    assert differing(*there_and_back(pool_of("mha", torch.bfloat16, 192), 16, two_top_bits)) == {(112, 1)}
    print("the top bits of two words do not cancel")

    def swap_tokens(pool: Any, target: list[int]) -> None:
        rows = pool.k_buffer[0]
        rows[[32, 33]] = rows[[33, 32]]

    def swap_keys_and_values(pool: Any, target: list[int]) -> None:
        keys = pool.k_buffer[3][32:48].clone()
        pool.k_buffer[3][32:48] = pool.v_buffer[3][32:48]
        pool.v_buffer[3][32:48] = keys

    def swap_layers(pool: Any, target: list[int]) -> None:
        rows = pool.v_buffer[0][32:48].clone()
        pool.v_buffer[0][32:48] = pool.v_buffer[1][32:48]
        pool.v_buffer[1][32:48] = rows

    def swap_pages(pool: Any, target: list[int]) -> None:
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[torch.cat([slots_of([2, 4], 16)])] = buffer[slots_of([4, 2], 16)].clone()

    for spoil, expected in (
        (swap_tokens, {(112, 0)}),
        (swap_keys_and_values, {(112, 3)}),
        (swap_layers, {(112, 0), (112, 1)}),
        (swap_pages, {(slot, layer) for slot in (112, 32) for layer in range(LAYERS)}),
    ):
        assert differing(*there_and_back(pool_of("mha", torch.bfloat16, 192), 16, spoil)) == expected, spoil
    print("what is in the wrong place is found")

    sampled = [len(there_and_back(pool_of("mha", torch.bfloat16, 192), 16, every=16)[0]) for _ in range(8)]
    assert sampled == [1] * 8
    print("a sample has a page of every backup, and loads digest the same ones")

    pool = pool_of("mha", torch.bfloat16, 192)
    rows = page_sums.Rows(pool, 16)
    pages = slots_of([1, 3, 5, 7], 16, DEVICE).view(-1, 16)
    whole = rows.sums(pages)
    for at_once in (1, 300, 700):
        page_sums._WORDS_AT_ONCE = at_once  # type: ignore[misc]
        assert torch.equal(rows.sums(pages), whole)
    page_sums._WORDS_AT_ONCE = 4 << 20  # type: ignore[misc]
    print("sums do not depend on how many are worked on at a time")

    for wrong in (
        SimpleNamespace(size=64, k_buffer=None, v_buffer=None),
        SimpleNamespace(size=64, kv_buffer=[torch.zeros(4, 16, 2, device=DEVICE)]),
        SimpleNamespace(size=8, kv_buffer=[torch.zeros(8, 3, dtype=torch.uint8, device=DEVICE)]),
        SimpleNamespace(size=8, host_transfer_translate=print, kv_buffer=[torch.zeros(8, 4, device=DEVICE)]),
    ):
        w = Witness(4)
        digester = Digester(w, 1)  # type: ignore[arg-type]
        operation = SimpleNamespace(host_indices=slots_of([0], 4), device_indices=slots_of([0], 4, DEVICE))
        for _ in range(2):
            digester.queued(Direction.D2H, [operation])
            digester.copied(wrong)
        digester.stop()
        digester.join()
        assert len(w.failures) == 1 and not w.events
    print("a pool of another shape is one failure, and the end of it")

    if DEVICE.type == "cuda":
        cost()


def cost() -> None:
    """Time on the scheduler thread for one backup of a 28-layer model, 64 tokens a page, 4 heads of 128."""
    global LAYERS
    LAYERS = 28
    pool = pool_of("mha", torch.bfloat16, 64 * 400, 256)
    w = Witness(64)
    for every, pages in ((16, 188), (1, 188), (16, 16)):
        digester = Digester(w, every)  # type: ignore[arg-type]
        host, out = slots_of(list(range(pages)), 64), slots_of(list(range(pages)), 64, DEVICE)
        took, device = [], []
        for number in range(20):
            operation, ack = SimpleNamespace(host_indices=host, device_indices=out), SimpleNamespace()
            with stream():
                torch.cuda.synchronize()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")
                begin = time.perf_counter_ns()
                digester.queued(Direction.D2H, [operation])
                first.record()
                digester.copied(pool)
                last.record()
                digester.launched(ack)
                digester.named(ack, number)
                took.append((time.perf_counter_ns() - begin) / 1e3)
                torch.cuda.synchronize()
                device.append(first.elapsed_time(last) * 1e3)
        digester.stop()
        digester.join()
        assert not w.failures, w.failures
        print(
            f"1 in {every} of {pages} pages: {sorted(took)[10]:.0f} us on the scheduler thread, "
            f"{sorted(device)[10]:.0f} us in the copy's stream"
        )


main()
