"""What an A, B, evict, C run is asked to do."""

from __future__ import annotations

import msgspec


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
