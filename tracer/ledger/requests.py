"""Gather a request's events into facts while the journal is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvwitness.tracer.ledger.facts import ChunkFact, DecisionFact, MatchFact, Moment, RequestFacts
from kvwitness.tracer.ledger.tree import Computed


@dataclass(slots=True)
class OpenChunk:
    """A launched prefill whose result was not processed yet."""

    moment: Moment
    batch: int
    start: int
    end: int
    last: bool
    done: Moment | None = None
    output_tokens: int | None = None

    def freeze(self) -> ChunkFact:
        return ChunkFact(self.moment, self.batch, self.start, self.end, self.last, self.done, self.output_tokens)


@dataclass(slots=True)
class OpenRequest:
    """One attempt of a request, as far as it is known."""

    rid: str
    attempt: int
    epoch: int
    prompt_tokens: int
    queued: Moment
    last: Moment
    match: MatchFact | None = None
    decision: DecisionFact | None = None
    admitted: Moment | None = None
    admitted_prefix: int | None = None
    chunks: list[OpenChunk] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    released: Moment | None = None
    state: int | None = None
    output_tokens: int | None = None
    cached: tuple[int, int | None, int | None, int | None] | None = None
    prior: tuple[str | None, int, int] = (None, 0, 0)
    shared_id: bool = False
    """What is recorded under its id may be another request's."""

    def computed(self) -> Computed | None:
        """What its prefill passes computed so far, up to the first hole between them."""
        if not self.chunks:
            return None
        first = self.chunks[0]
        position, whole = first.start, False
        for chunk in self.chunks:
            if chunk.start != position:
                break
            position = chunk.end
            whole = chunk.last and chunk.end >= self.prompt_tokens and chunk.done is not None
        return Computed(first.start, None if whole else position, first.moment)

    def computed_by(self) -> float:
        """The event with which its prefill had ended; infinite as long as that is not known."""
        if self.released is not None:
            return self.last.seq
        if self.chunks and all(chunk.done is not None for chunk in self.chunks) and self.chunks[-1].last:
            return max(chunk.done.seq for chunk in self.chunks if chunk.done is not None)
        return math.inf

    def freeze(self, traceparent: str | None) -> RequestFacts:
        """The facts, immutable."""
        total, device, host, storage = self.cached or (None, None, None, None)
        return RequestFacts(
            rid=self.rid,
            attempt=self.attempt,
            epoch=self.epoch,
            prompt_tokens=self.prompt_tokens,
            queued=self.queued,
            match=self.match,
            decision=self.decision,
            admitted=self.admitted,
            admitted_prefix=self.admitted_prefix,
            chunks=tuple(chunk.freeze() for chunk in self.chunks),
            loads=tuple(self.loads),
            released=self.released,
            state=self.state,
            output_tokens=self.output_tokens,
            cached_total=total,
            cached_device=device,
            cached_host=host,
            cached_storage=storage,
            max_seq=self.last.seq,
            prior_rid=self.prior[0],
            prior_tokens=self.prior[1],
            prior_epoch=self.prior[2],
            traceparent=traceparent,
            shared_id=self.shared_id,
        )
