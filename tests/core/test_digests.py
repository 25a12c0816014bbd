"""Prefix digests: equal prefixes have equal digests, others do not, and without the key they say nothing."""

from __future__ import annotations

import random
import stat
from array import array
from hashlib import blake2b
from pathlib import Path

import pytest

from kvwitness.patches.digests import Chain as Digester
from kvwitness.patches.digests import grid_for, load_key
from kvwitness.tracer.ledger.chains import Chain, cell_tokens, shared_prefix

KEY = b"k" * 32


def recorded(tokens: list[int], grid: int = 16, points: tuple[int, ...] = (), rid: str = "r") -> Chain:
    digester = Digester(KEY, grid)
    _, cells = digester.extend(tokens)
    chain = Chain(rid, grid, list(cells))
    for position in points:
        digest = digester.point(tokens, position)
        if digest is not None:
            chain.points[position] = digest
    return chain


def test_shared_prefix_is_found_to_the_cell() -> None:
    rng = random.Random(1)
    base = [rng.randrange(1000) for _ in range(200)]
    other = base[:100] + [rng.randrange(1000, 2000) for _ in range(100)]
    a, b = recorded(base, rid="a"), recorded(other, rid="b")
    assert shared_prefix(a, b, 96) == 96
    assert shared_prefix(a, b, 112) == -1
    assert shared_prefix(a, b, 100) == 96, "inside the cell where they part only the cell's start is known"


def test_points_off_the_grid_are_exact() -> None:
    tokens = list(range(50))
    a = recorded(tokens, points=(41,), rid="a")
    same = recorded(tokens[:41], points=(41,), rid="b")
    differs = recorded([*tokens[:40], 999], points=(41,), rid="c")
    assert shared_prefix(a, same, 41) == 41
    assert shared_prefix(a, differs, 41) == -1


def test_no_digests_means_not_known() -> None:
    assert shared_prefix(None, recorded([1] * 32), 16) is None
    assert shared_prefix(Chain("x"), recorded([1] * 32), 16) is None


def test_growing_a_sequence_gives_the_same_digests_as_taking_it_whole() -> None:
    tokens = list(range(100))
    grown = Digester(KEY, 16)
    grown.extend(tokens[:37])
    grown.extend(tokens)
    whole = Digester(KEY, 16)
    whole.extend(array("q", tokens))
    assert grown.cells == whole.cells


def test_a_digest_is_a_keyed_hash_of_the_one_before_and_the_tokens_of_the_cell() -> None:
    tokens = array("q", range(40))
    chain = Digester(KEY, 16, ("lora-1",))
    chain.extend(list(tokens))
    expected = [blake2b(repr(("lora-1",)).encode(), key=KEY, digest_size=8).digest()]
    for start in (0, 16):
        cell = tokens[start : start + 16].tobytes()
        expected.append(blake2b(expected[-1] + cell, key=KEY, digest_size=8).digest())
    assert chain.cells == expected[1:]
    point = blake2b(expected[-1] + tokens[32:37].tobytes(), key=KEY, digest_size=8, person=b"point").digest()
    assert chain.point(tokens, 37) == chain.point(list(tokens), 37) == point


def test_another_namespace_or_key_gives_other_digests() -> None:
    tokens = list(range(32))
    plain, lora, other = Digester(KEY, 16), Digester(KEY, 16, ("lora-1",)), Digester(b"x" * 32, 16)
    for chain in (plain, lora, other):
        chain.extend(tokens)
    assert len({plain.cells[1], lora.cells[1], other.cells[1]}) == 3


@pytest.mark.parametrize(("page", "grid"), [(1, 16), (8, 16), (16, 16), (64, 64), (24, 24)])
def test_a_cell_is_whole_pages_and_never_too_small(page: int, grid: int) -> None:
    assert grid_for(page) == grid
    assert cell_tokens(page) == grid  # what reads journals knows it as well


def test_the_key_is_made_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    key = load_key(tmp_path)
    assert load_key(tmp_path) == key and len(key) == 32
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
