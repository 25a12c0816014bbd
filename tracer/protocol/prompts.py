"""The prompts of a run, round by round: token ids that are drawn, or a document with questions.

Every round has a prefix of its own, so that its A is cold. Token ids are drawn; a document gets a line of its own in
front, since a cache tells prefixes apart by how they begin.
"""

from __future__ import annotations

import random
from hashlib import sha256
from typing import Final, Protocol

import msgspec

from kvwitness.tracer.protocol.quality import Reference
from kvwitness.tracer.protocol.questions import Questions
from kvwitness.tracer.protocol.workload import Vocabulary, Workload, build_workload, prompt_sha256

_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_WORD: Final = 5
CALIBRATION_WORDS: Final = 200
"""Words of the prompt from whose token count the length of every drawn text is reckoned."""


class Prompt(msgspec.Struct, frozen=True):
    """Token ids, or a text. ``reference`` is what the answer should be, where it is known."""

    ids: tuple[int, ...] = ()
    text: str = ""
    reference: Reference | None = None

    @property
    def tokens(self) -> int | None:
        """Length in tokens; None for a text, which only the server has counted."""
        return None if self.text else len(self.ids)

    @property
    def sha256(self) -> str:
        return sha256(self.text.encode()).hexdigest() if self.text else prompt_sha256(self.ids)


class Round(msgspec.Struct, frozen=True):
    """One prefix and the two prompts that begin with it."""

    number: int
    prompt_a: Prompt
    prompt_b: Prompt
    prefix_tokens: int | None


class Prompts(Protocol):
    """Where a run takes its prompts from."""

    describes: str
    """What the prompts are made of, in one line."""

    def round(self, number: int) -> Round: ...

    def unrelated(self, number: int, tokens: int) -> Prompt:
        """Prompt ``number`` that shares nothing with any round's, of about ``tokens`` tokens."""


class DrawnIds:
    """Token ids drawn from ``vocabulary``; ``lengths`` are the rounds' prefix lengths, in turn."""

    def __init__(self, seed: int, lengths: tuple[int, ...], question_tokens: int, vocabulary: Vocabulary) -> None:
        self.describes = f"{vocabulary.first}..{vocabulary.last} ({vocabulary.source})"
        self._seed = seed
        self._lengths = lengths
        self._question_tokens = question_tokens
        self._vocabulary = vocabulary
        self._first = build_workload(seed, lengths[0], question_tokens, vocabulary)

    def round(self, number: int) -> Round:
        workload = self._workload(number)
        return Round(number, Prompt(workload.prompt_a), Prompt(workload.prompt_b), len(workload.prefix))

    def unrelated(self, number: int, tokens: int) -> Prompt:
        return Prompt(self._first.unrelated(number, tokens))

    def _workload(self, number: int) -> Workload:
        if number == 0:
            return self._first
        length = self._lengths[number % len(self._lengths)]
        found = build_workload(f"{self._seed}/{number}", length, self._question_tokens, self._vocabulary)
        # The unrelated prompts take their openings from the front, the rounds from the back.
        opening = self._first.openings[-1 - (number - 1) % len(self._first.openings)]
        return msgspec.structs.replace(found, prefix=(opening, *found.prefix[1:]))


class Texts:
    """A document, or words that are drawn, with questions behind it.

    ``words`` is the length of the drawn prefix in words (no document), ``tokens_a_word`` the server's count for one.
    """

    def __init__(
        self, seed: int, document: str | None, questions: Questions | None, words: int, tokens_a_word: float
    ) -> None:
        self._seed = seed
        self._document = document
        self._questions = questions
        self._words = words
        self._tokens_a_word = tokens_a_word
        kind = "drawn words" if document is None else "the document, with a line of its own in each round"
        self.describes = f"{kind}; {'drawn' if questions is None else 'the given'} questions"

    def round(self, number: int) -> Round:
        prefix = f"[{self._seed:x}-{number}] "
        prefix += _words(f"{self._seed}/{number}/prefix", self._words) if self._document is None else self._document
        return Round(number, self._prompt(prefix, number, "a"), self._prompt(prefix, number, "b"), None)

    def unrelated(self, number: int, tokens: int) -> Prompt:
        count = max(1, round(tokens / self._tokens_a_word))
        return Prompt(text=_words(f"{self._seed}/unrelated/{number}", count))

    def _prompt(self, prefix: str, number: int, series: str) -> Prompt:
        if self._questions is None:
            return Prompt(text=f"{prefix}\n\n{_words(f'{self._seed}/{number}/{series}', 12)}")
        question = self._questions.of_a(number) if series == "a" else self._questions.of_b(number)
        return Prompt(text=f"{prefix}\n\n{question.ask}", reference=question.reference)


def calibration(seed: int) -> Prompt:
    """The prompt that shows how many tokens a drawn word has."""
    return Prompt(text=_words(f"{seed}/calibration", CALIBRATION_WORDS))


def _words(seed: str, count: int) -> str:
    stream = random.Random(seed)
    return " ".join("".join(stream.choices(_LETTERS, k=_WORD)) for _ in range(count))
