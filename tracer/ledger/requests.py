"""Requests while the journal is read: each stay in the queue, what was matched, computed, inserted, given back."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from kvwitness.patches.schema.events import ReleaseState
from kvwitness.tracer.ledger.chains import Chain
from kvwitness.tracer.ledger.facts import ChunkFact, DecisionFact, MatchFact, Moment, RequestFacts


@dataclass(frozen=True, slots=True)
class Computed:
    """What a request's own prefill computed so far, in passes without a hole."""

    start: int
    end: int | None
    """None: up to the end of the prompt, and what was generated behind it since."""
    passes: tuple[tuple[int, Moment], ...]
    """Where each pass ended, and its launch."""

    def launched(self, end: int) -> Moment:
        """The launch of the pass with which everything up to ``end`` was computed."""
        return next((moment for to, moment in self.passes if to >= end), self.passes[-1][1])


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
    chain: Chain
    match: MatchFact | None = None
    decision: DecisionFact | None = None
    admitted: Moment | None = None
    admitted_prefix: int | None = None
    admitted_end: int | None = None
    chunks: list[OpenChunk] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    loaded: int = 0
    """Tokens of the load-backs that were queued since its last match."""
    released: Moment | None = None
    state: int | None = None
    output_tokens: int | None = None
    cached: tuple[int, int | None, int | None, int | None] | None = None
    prior: tuple[str | None, int, int] = (None, 0, 0)
    shared_id: bool = False
    """What is recorded under its id may be another request's."""
    wrong: str = ""
    """What contradicts itself in what is recorded of it; empty: nothing does."""
    probed: tuple[int, int] | None = None
    """The deepest node that the cache was last asked for, and where it ends."""
    found_waiting: bool = False
    """It was in the queue already when kvwitness was attached."""
    uses: tuple[int, ...] = ()
    """The nodes that its match found, until its passes were processed."""
    inserted: int = 0
    """How much of it was ever put into the cache."""

    @property
    def position(self) -> int | None:
        """Where its next pass begins; None before it was admitted."""
        return self.chunks[-1].end if self.chunks else self.admitted_prefix

    @property
    def waits(self) -> bool:
        """It is in the queue: not admitted, not given back."""
        return self.admitted is None and self.released is None

    @property
    def between_chunks(self) -> bool:
        """A pass of it was launched, and not its last one."""
        return self.released is None and bool(self.chunks) and not self.chunks[-1].last

    def touched(self, moment: Moment) -> None:
        """Something happens to it. After its end that is about another request, and nobody knows what else is."""
        self.shared_id = self.shared_id or self.released is not None
        self.last = moment

    def computed(self) -> Computed | None:
        """What its prefill passes computed so far, up to the first hole between them."""
        if not self.chunks:
            return None
        first = self.chunks[0]
        position, whole = first.start, False
        passes: list[tuple[int, Moment]] = []
        for chunk in self.chunks:
            if chunk.start != position:
                break
            position = chunk.end
            passes.append((position, chunk.moment))
            whole = chunk.last and chunk.end >= self.prompt_tokens and chunk.done is not None
        return Computed(first.start, None if whole else position, tuple(passes))

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
            chain=self.chain,
            wrong=self.wrong,
        )


class Requests:
    """All requests of one instance. An id is that of the last request that was queued with it."""

    def __init__(self) -> None:
        self.all: list[OpenRequest] = []
        self.context: set[int] = set()
        """The events that queued those that are only there as what others were built on."""
        self._open: dict[str, OpenRequest] = {}
        self._chains: dict[str, Chain] = {}
        self._attempts: dict[str, int] = defaultdict(int)
        self._running: dict[int, OpenRequest] = {}
        """The event that queued it -> what was admitted and has not ended."""
        self._used: dict[int, int] = defaultdict(int)
        """Node -> requests whose passes read it and were not all processed."""

    def get(self, rid: str | None) -> OpenRequest | None:
        """The last request with an id."""
        return self._open.get(rid or "")

    def chain(self, rid: str | None) -> Chain | None:
        """The digests of its tokens."""
        return self._chains.get(rid or "")

    def chain_of(self, rid: str) -> Chain:
        """The same; a new one for an id that was not queued."""
        return self._chains.setdefault(rid, Chain(rid))

    def queue(self, rid: str, retracted: bool, epoch: int, prompt_tokens: int, moment: Moment) -> OpenRequest | None:
        """A stay in the queue begins; the request that had the id until now."""
        before = self._open.get(rid)
        if retracted:
            self._attempts[rid] += 1
        else:
            self._attempts[rid] = 1
            self._chains[rid] = Chain(rid, since=moment.seq)
        chain = self.chain_of(rid)
        request = OpenRequest(rid, self._attempts[rid], epoch, prompt_tokens, moment, moment, chain)
        if before is not None and before.released is None and not retracted:
            # Two requests with one id at a time: nobody can tell whose events follow.
            before.shared_id = request.shared_id = True
        self._open[rid] = request
        self.all.append(request)
        return before

    # --- what runs -----------------------------------------------------------------------------------

    def admit(self, request: OpenRequest, prefix: int, end: int, moment: Moment) -> None:
        """It is in the next batch, and what its match found has to stay where it is."""
        request.admitted, request.admitted_prefix, request.admitted_end = moment, prefix, end
        self._running[request.queued.seq] = request
        request.uses = tuple(step.node for step in request.match.path) if request.match is not None else ()
        for node in request.uses:
            self._used[node] += 1

    def computed(self, request: OpenRequest) -> None:
        """A result was processed; after that of the last pass nothing is read for it any more."""
        if request.chunks and request.chunks[-1].last and all(chunk.done is not None for chunk in request.chunks):
            self._let_go(request)

    def end(self, request: OpenRequest, state: int, moment: Moment) -> None:
        """It gave its row back, or was aborted before it had one."""
        if request.released is None:
            # What was aborted between two chunks stays so, whatever its release says.
            request.released, request.state = moment, request.state or state
        self._running.pop(request.queued.seq, None)
        self._let_go(request)

    def _let_go(self, request: OpenRequest) -> None:
        for node in request.uses:
            self._used[node] -= 1
            if self._used[node] <= 0:
                del self._used[node]
        request.uses = ()

    def uses(self, node: int, was: Iterable[int]) -> bool:
        """Whether a pass reads a node, or the one that it was split off from."""
        return node in self._used or any(other in self._used for other in was)

    @property
    def running(self) -> OpenRequest | None:
        """One that was admitted and has not ended."""
        return next(iter(self._running.values()), None)

    def reset(self) -> None:
        """The cache was emptied: node ids mean nothing any more."""
        self._used.clear()
        for request in self._running.values():
            request.uses = ()

    # --- all of them ---------------------------------------------------------------------------------

    def chains(self) -> dict[str, Chain]:
        """By id, of the last request with it."""
        return dict(self._chains)

    def rids(self) -> frozenset[str]:
        """The ids of those that are remembered."""
        return frozenset(request.rid for request in self.all)

    def settled(self, before: int) -> frozenset[str]:
        """Ids whose requests ended before an event; one that was retracted comes back."""
        running = {r.rid for r in self.all if r.released is None or r.last.seq >= before}
        running.update(r.rid for r in self._open.values() if r.state == ReleaseState.RETRACTED)
        return self.rids() - running

    def forget(self, rids: Container[str], live: Container[str]) -> frozenset[str]:
        """Drop those with these ids but for the live ones, which stay as what others were built on. The ids that went.

        ``live``: whose prefixes a tier holds.
        """
        self.context.update(r.queued.seq for r in self.all if r.rid in rids)
        kept = {r.rid for r in self.all if r.rid in live or r.queued.seq not in self.context}
        gone = self.rids() - kept
        self.all = [r for r in self.all if r.rid not in gone]
        self.context &= {r.queued.seq for r in self.all}
        for rid in gone:
            for by_rid in (self._chains, self._attempts, self._open):
                by_rid.pop(rid, None)
        return gone

    def judged(self) -> list[OpenRequest]:
        """Those of which something may be claimed."""
        return [r for r in self.all if r.queued.seq not in self.context]
