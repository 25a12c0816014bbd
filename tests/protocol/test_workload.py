"""Prompts: reproducible, related and unrelated exactly where they have to be."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwitness.tracer.protocol.workload import (
    Vocabulary,
    build_workload,
    cached_tokens,
    choose_vocabulary,
    prompt_sha256,
    reusable_tokens,
)


@settings(deadline=None)
@given(seed=st.integers(0, 2**48), prefix=st.integers(1, 200), question=st.integers(1, 20), last=st.integers(3, 4000))
def test_a_and_b_part_exactly_after_the_prefix(seed: int, prefix: int, question: int, last: int) -> None:
    work = build_workload(seed, prefix, question, Vocabulary(1, last))
    assert work.prompt_a[:prefix] == work.prompt_b[:prefix]
    assert work.prompt_a[prefix] != work.prompt_b[prefix]
    assert len(work.prompt_a) == len(work.prompt_b) == prefix + question
    assert {1 <= token <= last for token in (*work.prompt_a, *work.prompt_b, *work.unrelated(3))} == {True}


@settings(deadline=None)
@given(seed=st.integers(0, 2**48))
def test_unrelated_prompts_share_not_even_their_first_token(seed: int) -> None:
    work = build_workload(seed, 32, 4, Vocabulary())
    first = [work.unrelated(index)[0] for index in range(200)]
    assert len({*first, work.prompt_a[0]}) == 201


def test_the_seed_alone_decides_the_prompts() -> None:
    one, again, other = (build_workload(seed, 64, 4, Vocabulary()) for seed in (1, 1, 2))
    assert one == again
    assert one.unrelated(5) == again.unrelated(5)
    assert one.prefix != other.prefix


@pytest.mark.parametrize("size", [2, 200, 999, 1024, 32000, 151936, 262144])
def test_no_id_is_outside_a_known_vocabulary(size: int) -> None:
    assert 1 <= choose_vocabulary(size).first <= choose_vocabulary(size).last < size


def test_an_unknown_vocabulary_means_ids_that_every_model_has() -> None:
    assert (choose_vocabulary(None).first, choose_vocabulary(None).last) == (1, 999)


@pytest.mark.parametrize(
    ("prompt", "page", "expected"), [(1503, 16, 1488), (1504, 16, 1488), (1505, 16, 1504), (1503, 1, 1502), (0, 16, 0)]
)
def test_a_repeat_reuses_whole_pages_and_computes_at_least_one_token(prompt: int, page: int, expected: int) -> None:
    assert reusable_tokens(prompt, page) == expected


def test_a_finished_request_leaves_whole_pages_of_prompt_and_outputs() -> None:
    assert cached_tokens(1503, 8, 16) == 1504


def test_the_prompt_hash_is_of_little_endian_int64() -> None:
    assert prompt_sha256([1, 258]) == hashlib.sha256(struct.pack("<qq", 1, 258)).hexdigest()


@pytest.mark.parametrize(("prefix", "question", "last"), [(0, 1, 999), (1, 0, 999), (10, 1, 2)])
def test_lengths_that_cannot_work_are_refused(prefix: int, question: int, last: int) -> None:
    with pytest.raises(ValueError):
        build_workload(1, prefix, question, Vocabulary(1, last))
