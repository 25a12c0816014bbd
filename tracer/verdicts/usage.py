"""Link "used": what the request's own prefill computed, and therefore what it did not have to."""

from __future__ import annotations

import msgspec

from kvwitness.patches.schema.events import ReleaseState
from kvwitness.tracer.ledger.facts import Moment, RequestFacts
from kvwitness.tracer.model import Link
from kvwitness.tracer.verdicts.links import Evidence


class Usage(msgspec.Struct, frozen=True):
    """How the prompt was prefilled."""

    reused: int | None
    """Tokens before the first one that was computed; None when no prefill was seen."""
    total: int
    """Tokens that had to be in place: the prompt, or prompt and output so far after a retraction."""
    proven: bool
    """Every token from ``reused`` on was computed in contiguous passes whose results were processed."""
    detail: str
    moments: tuple[Moment, ...]

    def link(self, evidence: Evidence) -> None:
        """Add the link to a claim."""
        if self.proven:
            evidence.hold(Link.USED, self.detail, *self.moments)
        else:
            evidence.miss(Link.USED, self.detail, *self.moments)


def usage_of(request: RequestFacts) -> Usage:
    """Read the prefill passes of one attempt."""
    total = request.prompt_tokens
    if not request.chunks:
        return Usage(None, total, False, "no prefill of this request was recorded", ())
    first, last = request.chunks[0], request.chunks[-1]
    if request.attempt > 1:
        total = max(total, last.end)
    moments = tuple(m for chunk in request.chunks for m in (chunk.moment, chunk.done) if m is not None)
    position = last.end
    if position != total or not last.last:
        return Usage(first.start, total, False, f"the prefill was seen up to token {position} of {total}", moments)
    if any(chunk.done is None for chunk in request.chunks):
        return Usage(first.start, total, False, "the result of the prefill was never processed", moments)
    if request.state == ReleaseState.ABORTED:
        return Usage(first.start, total, False, "the request was aborted", (*moments, *_some(request.released)))
    if request.admitted is None:
        return Usage(first.start, total, False, "the request's admission was not recorded", moments)
    if request.wrong:
        detail = f"what was recorded of it contradicts itself: {request.wrong}"
        return Usage(first.start, total, False, detail, moments)
    if request.shared_id:
        return Usage(first.start, total, False, "what was recorded under this id may be another request's", moments)
    if not last.output_tokens:
        return Usage(first.start, total, False, "the prefill ended without an output token", moments)
    detail = f"prefill computed tokens {first.start} to {total} only"
    if len(request.chunks) > 1:
        detail += f", in {len(request.chunks)} chunks"
    return Usage(first.start, total, True, detail, (request.admitted, *moments))


def _some(moment: Moment | None) -> tuple[Moment, ...]:
    return () if moment is None else (moment,)
