"""Run by the stand's Python: page kernels and rotation against the plainest code that does the same."""

from __future__ import annotations

import random

import torch

from kvwitness.patches.stand.packages import rotary_embedding
from kvwitness.patches.stand.page_kernels import Launcher, alloc_decode, alloc_extend


class Kernel:
    def __init__(self, *names: str) -> None:
        self.arg_names = names


def slots_one_by_one(requests: list[tuple[int, int, int]], free: list[int], page_size: int) -> tuple[list[int], int]:
    """The slot of each new token in turn, and how many pages that took."""
    out: list[int] = []
    taken = 0
    for before, after, last in requests:
        for position in range(before, after):
            if position % page_size == 0:
                last = free[taken] * page_size
                taken += 1
            else:
                last += 1
            out.append(last)
    return out, taken


def check_pages(with_return: bool) -> None:
    names = ["pre_lens_ptr", "seq_lens_ptr", "last_loc_ptr", "free_page_ptr", "out_indices"]
    returned = ["ret_values"] if with_return else []
    extend = Launcher(Kernel(*names, *returned, "bs_upper", "page_size"), alloc_extend)
    decode = Launcher(Kernel(*names[1:], *returned, "bs_upper", "page_size"), alloc_decode)
    chance = random.Random(1)
    for _ in range(300):
        page_size = chance.choice([2, 4, 16])
        count = chance.randint(1, 4)
        free = chance.sample(range(100, 200), 60)
        requests = []
        for index in range(count):
            before = chance.randint(0, 3 * page_size)
            last = index * 1000 + (before - 1) % page_size if before else -1
            requests.append((before, before + chance.randint(1, 4 * page_size), last))
        for kernel, one_more in ((extend, False), (decode, True)):
            wanted_requests = [(b, b + 1 if one_more else a, last) for b, a, last in requests]
            wanted, taken = slots_one_by_one(wanted_requests, free, page_size)
            columns = [torch.tensor(column) for column in zip(*wanted_requests, strict=True)]
            out, value = torch.full((len(wanted),), -7), torch.empty((), dtype=torch.int64)
            inputs = [*(columns[1:] if one_more else columns), torch.tensor(free), out]
            kernel[(count,)](*inputs, *([value] if with_return else []), 4, page_size)
            assert out.tolist() == wanted, (requests, page_size)
            if with_return:
                assert (int(value) if one_more else int(value) >> 32) == taken


def check_too_few_pages() -> None:
    names = ("pre_lens_ptr", "seq_lens_ptr", "last_loc_ptr", "free_page_ptr", "out_indices", "page_size")
    launch = Launcher(Kernel(*names), alloc_extend)[(1,)]
    launch(torch.tensor([0]), torch.tensor([40]), torch.tensor([-1]), torch.tensor([3]), torch.empty(40), 16)


def check_rotation() -> None:
    torch.manual_seed(0)
    tokens, head, turned = 5, 8, 6
    angles = torch.rand(20, turned // 2)
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 3, 19, 7, 7])
    for neox in (True, False):
        query, key = torch.randn(tokens, 3 * head), torch.randn(tokens, head)
        expected = []
        for tensor in (query, key):
            out = tensor.clone().view(tokens, -1, head)
            for token, number in ((t, n) for t in range(tokens) for n in range(out.shape[1])):
                for pair in range(turned // 2):
                    one, two = (pair, pair + turned // 2) if neox else (2 * pair, 2 * pair + 1)
                    angle = angles[positions[token], pair]
                    a, b = out[token, number, one].clone(), out[token, number, two].clone()
                    out[token, number, one] = a * angle.cos() - b * angle.sin()
                    out[token, number, two] = b * angle.cos() + a * angle.sin()
            expected.append(out.view(tokens, -1))
        rotary_embedding(positions, query, key, head, cache, neox)
        assert torch.allclose(query, expected[0], atol=1e-6) and torch.allclose(key, expected[1], atol=1e-6)


check_pages(with_return=False)
check_pages(with_return=True)
check_too_few_pages()
check_rotation()
print("pages and rotation agree")
