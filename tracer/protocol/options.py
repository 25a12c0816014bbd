"""What a run of the protocol is asked to do."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from kvwitness.tracer.protocol.questions import Questions


class Order(StrEnum):
    """In which order repeats are sent.

    ``rounds``: A, B, eviction, C with one prefix (with as many as there are clients, side by side), then again with
    the next. ``series``: all A, then all B, one eviction, all C; L1 has to hold all prefixes until B is through.
    """

    ROUNDS = "rounds"
    SERIES = "series"


class Api(StrEnum):
    """The server's endpoint: SGLang's own /generate, or one of those that it shares with OpenAI."""

    GENERATE = "generate"
    COMPLETIONS = "openai-completions"
    CHAT = "openai-chat"


ABC: Final = "abc"
SWEEP: Final = "sweep"


class AbcOptions(msgspec.Struct, frozen=True):
    """Options of :func:`~kvwitness.tracer.protocol.abc.run_abc`. Lengths in tokens."""

    prefix_tokens: int = 1500
    """Length of what A, B and C have in common."""
    question_tokens: int = 16
    output_tokens: int = 8
    fills: int | None = None
    """Number of unrelated prompts between B and C; None: as many as it takes to push the prefix out of L1."""
    fill_tokens: int | None = None
    """Length of an unrelated prompt (None: as long as A, longer where L1 is much larger than that)."""
    evict_host: bool = False
    """Keep filling until the prefix has left L2 as well."""
    second_hit: bool = False
    """Send A's prompt once more before the eviction, so that all of it (not only what it shares with B) has
    been hit twice: write_through_selective backs up nothing that was hit once."""
    turns: bool = False
    """B is A's prompt, A's answer and B's question: the next turn of a conversation; C is B again."""
    flush_between_bc: bool = False
    """Fault variant: empty the server's cache right before C."""
    control: bool = False
    """Control run on a server without HiCache: what C cannot have read from L2."""
    warmups: int = 1
    """Unrelated prompts before A, so that A does not pay for what the server does only once."""
    seed: int | None = None
    """Of the prompts (None: drawn, and recorded in the run)."""
    dp_rank: int | None = None
    keep_prompts: bool = False
    """Whether the records of A, B and C keep their token ids."""
    settle_timeout_s: float = 10.0
    """How long to wait for the observer to see a request's events; then the run goes on and says so."""
    poll_interval_s: float = 0.05
    repeats: int = 1
    """Rounds of A, B, eviction and C, each with a prefix of its own, so that every A is cold."""
    clients: int = 1
    """Requests of one series that are under way at the same time."""
    order: Order = Order.ROUNDS
    api: Api = Api.GENERATE
    lengths: tuple[int, ...] = ()
    """Prefix lengths to go through in turn, a round each (``kvwitness run sweep``); empty: ``prefix_tokens`` always."""
    document: str | None = None
    """Name of the file with the prefix's text (None: the prefix is drawn)."""
    document_sha256: str | None = None
    questions: Questions | None = None
    """What A and B ask (None: drawn)."""

    @property
    def rounds(self) -> int:
        """Rounds in all."""
        return self.repeats * max(1, len(self.lengths))

    @property
    def longest_prefix(self) -> int:
        return max(self.lengths, default=self.prefix_tokens)

    @property
    def shortest_prefix(self) -> int:
        return min(self.lengths, default=self.prefix_tokens)

    @property
    def wave(self) -> int:
        """Rounds that share an eviction."""
        return min(self.rounds, self.rounds if self.order is Order.SERIES else self.clients)
