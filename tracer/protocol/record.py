"""What a protocol run records of its own requests: one line of ``requests.jsonl`` each."""

from __future__ import annotations

from typing import Any

import msgspec

from kvwitness.tracer.protocol.quality import Reference


class RequestRecord(msgspec.Struct, frozen=True):
    """One request that the runner sent, and what the client saw of it.

    Prompts are the runner's own (synthetic or given by the user), so they may be kept. Times are the
    client's: ``sent_ns`` on the wall clock, durations in seconds.
    """

    rid: str
    series: str
    """``warmup``, ``A``, ``B``, ``evict``, ``C`` or ``nudge``."""
    order: int
    prompt_tokens: int
    prompt_sha256: str
    """Of the token ids as little-endian int64, or of the text as UTF-8: equal prompts have equal hashes."""
    sent_ns: int
    ttft_s: float | None
    total_s: float
    status: int
    error: str | None
    traceparent: str | None
    """The W3C trace context that was sent along."""
    output_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int | None = None
    cached_tokens_details: dict[str, Any] | None = None
    """As the server answered it (``device``, ``host``, ``storage``...)."""
    prompt_ids: tuple[int, ...] = ()
    """Kept only for series A, B and C, and only when asked."""
    round: int | None = None
    """Of A, B and C: which prefix, counted from 0; of an eviction: the first that it was for."""
    prefix_tokens: int | None = None
    """Of A, B and C: the length asked for; None where it is a text."""
    reference: Reference | None = None
    """What the answer should be, where it is known."""
    correct: bool | None = None
    """Whether the answer is as the reference says; None where it was not compared."""
    wrong: str = ""
    """Why it is not, in one line."""
