"""Synthetic prompts by token ids: the same seed gives the same prompts, and unrelated ones share no page.

The text means nothing; a KV cache does not care. Prompts that must not share a prefix differ in their first
token, so they share no page of any size.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import msgspec

SAFE_LAST_ID: Final = 999
"""Every tokenizer in use has this many ids. An id outside the vocabulary is not refused by SGLang: it ends
the scheduler process, and with it the server."""
_LOW_IDS: Final = 256
_HIGH_PERCENT: Final = 90
"""Special, image and padding tokens stand at both ends of a large vocabulary; its middle is plain text."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The token ids that prompts are made of, ``first`` to ``last`` inclusive, and where that comes from."""

    first: int = 1
    last: int = SAFE_LAST_ID
    source: str = "safe range"

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def choose_vocabulary(vocab_size: int | None) -> Vocabulary:
    """The ids to use for a model with ``vocab_size`` tokens (None: not known, then the safe range)."""
    if vocab_size is None:
        return Vocabulary()
    if vocab_size <= 2 * SAFE_LAST_ID:
        return Vocabulary(1, min(SAFE_LAST_ID, vocab_size - 1), "server")
    return Vocabulary(_LOW_IDS, vocab_size * _HIGH_PERCENT // 100, "server")


class Workload(msgspec.Struct, frozen=True):
    """The prompts of one A, B, evict, C run."""

    seed: int | str
    vocabulary: Vocabulary
    prefix: tuple[int, ...]
    """What A, B and C have in common."""
    question_a: tuple[int, ...]
    question_b: tuple[int, ...]
    """Differs from ``question_a`` in its first token: A and B share the prefix and not one token more."""
    openings: tuple[int, ...]
    """First tokens of unrelated prompts, in the order of use; the prefix's own is not among them."""

    @property
    def prompt_a(self) -> tuple[int, ...]:
        """The prompt of A and of C."""
        return self.prefix + self.question_a

    @property
    def prompt_b(self) -> tuple[int, ...]:
        return self.prefix + self.question_b

    def unrelated(self, index: int, tokens: int | None = None) -> tuple[int, ...]:
        """Prompt number ``index`` that shares nothing with A (``tokens`` long, by default as long as A).

        As long as ``index`` stays below the number of openings it shares nothing with the others either.
        """
        length = len(self.prompt_a) if tokens is None else tokens
        stream = random.Random(f"{self.seed}/unrelated/{index}")
        opening = self.openings[index % len(self.openings)]
        return (opening, *_draw(stream, self.vocabulary, max(0, length - 1)))


def build_workload(seed: int | str, prefix_tokens: int, question_tokens: int, vocabulary: Vocabulary) -> Workload:
    """Draw the prompts of a run. Raises ``ValueError`` when a length or the vocabulary is too small."""
    if prefix_tokens < 1 or question_tokens < 1:
        raise ValueError("the prefix and the question need at least one token each")
    if vocabulary.size < 3:
        raise ValueError("the vocabulary has too few tokens to tell prompts apart")
    prefix = _draw(random.Random(f"{seed}/prefix"), vocabulary, prefix_tokens)
    stream = random.Random(f"{seed}/questions")
    first_a, first_b = stream.sample(range(vocabulary.first, vocabulary.last + 1), 2)
    rest = question_tokens - 1
    # The shared prefix is a prompt's most telling part: no unrelated prompt may open with its first token.
    openings = [token for token in range(vocabulary.first, vocabulary.last + 1) if token != prefix[0]]
    random.Random(f"{seed}/openings").shuffle(openings)
    return Workload(
        seed=seed,
        vocabulary=vocabulary,
        prefix=prefix,
        question_a=(first_a, *_draw(stream, vocabulary, rest)),
        question_b=(first_b, *_draw(stream, vocabulary, rest)),
        openings=tuple(openings[:4096]),
    )


def reusable_tokens(prompt_tokens: int, page_size: int) -> int:
    """The most that a repeat of a prompt can reuse: whole pages, and one token is always computed."""
    return (prompt_tokens - 1) // page_size * page_size if prompt_tokens > 0 else 0


def cached_tokens(prompt_tokens: int, output_tokens: int, page_size: int) -> int:
    """Tokens that a finished request leaves in L1: whole pages of prompt and outputs (the last output has no KV)."""
    return (prompt_tokens + max(0, output_tokens - 1)) // page_size * page_size


def prompt_sha256(ids: Sequence[int]) -> str:
    """Identity of a prompt: SHA-256 of its token ids as little-endian int64."""
    return sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()


def _draw(stream: random.Random, vocabulary: Vocabulary, count: int) -> tuple[int, ...]:
    return tuple(stream.randint(vocabulary.first, vocabulary.last) for _ in range(count))
