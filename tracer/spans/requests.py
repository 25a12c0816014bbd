"""The trace of one request."""

from __future__ import annotations

from collections.abc import Iterator

from kvwitness.patches.schema.events import Refusal, ReleaseState
from kvwitness.tracer.ledger.facts import DecisionFact, Load, MatchedNode, Moment, Prefetch, RequestFacts
from kvwitness.tracer.model import RangeVerdict, RequestVerdict
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.facts import duration, expected_ranks, extent, known, model_of, seqs, slots
from kvwitness.tracer.spans.index import InstanceIndex, RequestUse
from kvwitness.tracer.spans.spec import EventSpec, Kind, LinkSpec, Ref, SpanSpec, Value

_STATES = {
    ReleaseState.FINISHED: "finished",
    ReleaseState.ABORTED: "aborted",
    ReleaseState.RETRACTED: "retracted",
}


def request_spans(index: InstanceIndex, use: RequestUse) -> Iterator[SpanSpec]:
    """The request's span, then its parts in the order of the journal."""
    yield _request(index, use)
    parts = [span for attempt in use.attempts for span in _attempt(index, use, attempt)]
    parts += (prefetch_span(index, prefetch) for prefetch in index.prefetches_of(use))
    yield from sorted(parts, key=_journal_order)


def _journal_order(span: SpanSpec) -> int:
    first = span.attributes[sc.FIRST_SEQ]
    assert isinstance(first, int)
    return first


# --- the request ---------------------------------------------------------------------------------------


def _request(index: InstanceIndex, use: RequestUse) -> SpanSpec:
    last = use.attempts[-1]
    finished = last.released if last.state in (ReleaseState.FINISHED, ReleaseState.ABORTED) else None
    end_ns = max(index.end_of(finished, last.epoch), *(moment.t_ns for moment in _seen(use)))
    client = use.client
    attributes: dict[str, Value | None] = {
        sc.GEN_AI_OPERATION: "text_completion",
        sc.GEN_AI_PROVIDER: sc.SERVICE,
        sc.GEN_AI_MODEL: model_of(index.facts),
        sc.GEN_AI_INPUT: last.prompt_tokens,
        sc.GEN_AI_OUTPUT: last.output_tokens,
        sc.RID: use.rid,
        sc.ATTEMPT: last.attempt,
        sc.EPOCH_INDEX: last.epoch,
        sc.STATE: _STATES.get(last.state) if last.state is not None else None,
        sc.CONTINUED: client is not None,
        sc.SAMPLED: client.sampled if client is not None else None,
        sc.SERVER_TOTAL: last.cached_total,
        sc.SERVER_DEVICE: last.cached_device,
        sc.SERVER_HOST: last.cached_host,
        sc.SERVER_STORAGE: last.cached_storage,
        sc.OPEN: True if finished is None else None,
    }
    end = index.wall(end_ns)
    return SpanSpec(
        ref=use.ref,
        name=sc.REQUEST,
        kind=Kind.SERVER if use.first else Kind.INTERNAL,
        parent=use.parent,
        parent_is_remote=use.first and use.parent is not None,
        start_ns=index.wall(use.begin.t_ns),
        end_ns=end,
        resource=index.resource,
        attributes=known(attributes) | seqs(use.begin, finished) | _verdict(use.verdict),
        events=(*_moments(index, use), *_ranges(use.verdict, end)),
        links=_reused(index, use),
        error="aborted" if last.state == ReleaseState.ABORTED else None,
        unit=unit_of(use),
        open=finished is None,
        complete=_settled(index, use, finished),
    )


def unit_of(use: RequestUse) -> str:
    """All of a request's spans on all ranks are sent together."""
    return f"request {use.ref.trace_id} {use.ref.span_id if use.first else use.parent}"


def _settled(index: InstanceIndex, use: RequestUse, finished: Moment | None) -> bool:
    """The verdict rests on everything that it can rest on."""
    if index.facts.closed:
        return True
    return finished is not None and use.ranks >= expected_ranks(index.facts)


def _seen(use: RequestUse) -> Iterator[Moment]:
    for attempt in use.attempts:
        # A result may be processed after the release (the last one in particular).
        yield attempt.queued
        yield from (chunk.done for chunk in attempt.chunks if chunk.done is not None)


def _verdict(verdict: RequestVerdict | None) -> dict[str, Value]:
    if verdict is None:
        return {}
    tokens = verdict.tokens
    return {
        sc.GRADE: verdict.grade.value,
        sc.REASON: verdict.reason.value,
        sc.TIER: verdict.tier.value,
        sc.SENTENCE: verdict.sentence,
        sc.VERDICT_INSTANCE: verdict.instance,
        sc.TOKENS_L1: tokens.l1,
        sc.TOKENS_L2: tokens.l2,
        sc.TOKENS_L3: tokens.l3,
        sc.TOKENS_RECOMPUTED: tokens.recomputed,
        sc.TOKENS_UNKNOWN: tokens.unknown,
        sc.GEN_AI_CACHE_READ: tokens.l1 + tokens.l2 + tokens.l3,
    }


def _moments(index: InstanceIndex, use: RequestUse) -> list[EventSpec]:
    found: list[tuple[str, Moment | None, int]] = []
    for attempt in use.attempts:
        found.append((sc.ADMITTED, attempt.admitted, attempt.attempt))
        if attempt.state == ReleaseState.RETRACTED:
            found.append((sc.RETRACTED, attempt.released, attempt.attempt))
    first = next(((a.first_token, a.attempt) for a in use.attempts if a.first_token is not None), None)
    if first is not None:
        found.append((sc.FIRST_TOKEN, *first))
    return [
        EventSpec(name, index.wall(moment.t_ns), {sc.ATTEMPT: attempt})
        for name, moment, attempt in sorted(found, key=lambda item: item[1].seq if item[1] else 0)
        if moment is not None
    ]


def _ranges(verdict: RequestVerdict | None, time_ns: int) -> list[EventSpec]:
    return [EventSpec(sc.RANGE, time_ns, _range(one)) for one in verdict.ranges] if verdict is not None else []


def _range(one: RangeVerdict) -> dict[str, Value]:
    missing = tuple(link.link.value for link in one.missing)
    return known(
        {
            sc.RANGE_START: one.start,
            sc.RANGE_END: one.end,
            sc.RANGE_TIER: one.tier.value,
            sc.RANGE_GRADE: one.grade.value,
            sc.RANGE_REASON: one.reason.value,
            sc.RANGE_DETAIL: one.detail or None,
            sc.RANGE_MISSING: missing or None,
            sc.RANGE_PAGES: one.pages or None,
            sc.RANGE_COMPARED: one.pages_compared or None,
        }
    )


def _reused(index: InstanceIndex, use: RequestUse) -> tuple[LinkSpec, ...]:
    """Links to the requests whose prefix it reused, and to what had brought that prefix into L1 again."""
    links: list[LinkSpec] = []
    for attempt in use.attempts:
        for node in _reused_nodes(attempt):
            assert attempt.match is not None
            owner = index.use_at(node.owner, attempt.match.moment.seq)
            if owner is not None and owner is not use:
                links.append(LinkSpec(owner.ref, sc.BORN_BY))
            load = index.loads.get(node.load) if node.load is not None and node.resident is not None else None
            if load is not None and index.use_of_load(load) is not use:
                links.append(LinkSpec(index.load_ref(load), sc.LOADED_BY))
    return tuple(dict.fromkeys(links))


def _reused_nodes(attempt: RequestFacts) -> list[MatchedNode]:
    if attempt.match is None or attempt.admitted_prefix is None:
        return []
    return [node for node in attempt.match.nodes if node.start < attempt.admitted_prefix]


# --- its parts -----------------------------------------------------------------------------------------


def _attempt(index: InstanceIndex, use: RequestUse, attempt: RequestFacts) -> Iterator[SpanSpec]:
    number: dict[str, Value] = {sc.ATTEMPT: attempt.attempt}
    left = attempt.admitted or attempt.released
    yield _part(index, use, sc.QUEUE, attempt, attempt.queued, left, number)
    match = attempt.match
    if match is not None:
        answer: dict[str, Value] = {
            sc.MATCH_DEVICE: match.device,
            sc.MATCH_HOST: match.host,
            sc.MATCH_NODES: len(match.path),
            sc.NODE: match.best_node,
            **extent(0, match.device + match.host),
        }
        yield _part(index, use, sc.MATCH, attempt, match.moment, match.moment, number | answer)
    for load in (index.loads[one] for one in attempt.loads if one in index.loads):
        yield load_span(index, load, attempt)
    if attempt.decision is not None and not attempt.loads:
        made = attempt.decision.moment
        yield _part(index, use, sc.LOAD_BACK, attempt, made, made, number | _decision(attempt.decision))
    for chunk in attempt.chunks:
        computed: dict[str, Value] = {
            sc.BATCH: chunk.batch,
            sc.LAST_CHUNK: chunk.last,
            **extent(chunk.start, chunk.end),
        }
        yield _part(index, use, sc.PREFILL, attempt, chunk.moment, chunk.done, number | computed)


def _part(
    index: InstanceIndex,
    use: RequestUse,
    name: str,
    attempt: RequestFacts,
    begin: Moment,
    end: Moment | None,
    attributes: dict[str, Value],
) -> SpanSpec:
    return SpanSpec(
        ref=index.part_ref(use, name, begin.seq),
        name=name,
        parent=use.ref.span_id,
        start_ns=index.wall(begin.t_ns),
        end_ns=index.wall(max(begin.t_ns, index.end_of(end, attempt.epoch))),
        resource=index.resource,
        attributes=attributes | seqs(begin, end) | _open(end),
        unit=unit_of(use),
        open=end is None,
        complete=end is not None or index.over(attempt.epoch),
    )


def _open(end: Moment | None) -> dict[str, Value]:
    return {sc.OPEN: True} if end is None else {}


def _decision(decision: DecisionFact) -> dict[str, Value]:
    # Only a promise can be refused: most decisions are about matches that L2 adds nothing to.
    refused = decision.promised > 0 and decision.loaded == 0
    return known(
        {
            sc.PROMISED: decision.promised,
            sc.WANTED: decision.wanted,
            sc.LOADED: decision.loaded,
            sc.NODE: decision.node,
            sc.DECLINED: refused,
            sc.REFUSAL: Refusal.NAMES.get(decision.reason, str(decision.reason)) if refused else None,
        }
    )


def load_span(index: InstanceIndex, load: Load, attempt: RequestFacts | None) -> SpanSpec:
    """A load-back. Without an ``attempt`` no request is known for it, and it belongs to its epoch."""
    use = index.use_of_load(load)
    decision = attempt.decision if attempt is not None else None
    attributes: dict[str, Value | None] = {
        sc.ATTEMPT: attempt.attempt if attempt is not None else None,
        sc.NODE: load.node,
        sc.TRANSFER: load.transfer,
        sc.TRANSFER_TOKENS: load.transfer_tokens,
        sc.TRANSFER_BYTES: load.transfer_bytes,
        sc.TRANSFER_DURATION: duration(load.duration_ns),
        sc.FREED_MEANWHILE: load.freed_while_loading,
    }
    return SpanSpec(
        ref=index.load_ref(load),
        name=sc.LOAD_BACK,
        parent=use.ref.span_id if use is not None else index.epoch_ref(load.epoch).span_id,
        start_ns=index.wall(load.queued.t_ns),
        end_ns=index.wall(max(load.queued.t_ns, index.end_of(load.done, load.epoch))),
        resource=index.resource,
        attributes=(_decision(decision) if decision is not None else {})
        | known(attributes)
        | extent(load.start, load.end, load.tokens)
        | slots(load.slots)
        | seqs(load.queued, load.done)
        | _open(load.done),
        events=started_event(index, load.started),
        links=_load_links(index, load, attempt),
        unit=unit_of(use) if use is not None else f"load {index.load_ref(load).span_id}",
        open=load.done is None,
        complete=load.done is not None or index.over(load.epoch),
    )


def started_event(index: InstanceIndex, started: Moment | None) -> tuple[EventSpec, ...]:
    """The launch of a copy."""
    return (EventSpec(sc.TRANSFER_STARTED, index.wall(started.t_ns)),) if started is not None else ()


def _load_links(index: InstanceIndex, load: Load, attempt: RequestFacts | None) -> tuple[LinkSpec, ...]:
    links = [LinkSpec(index.residency_ref(one), sc.READ_FROM) for one in index.read_residencies(load)]
    writers = (index.writer(segment.origin, segment.origin_id) for segment in load.segments)
    links += (LinkSpec(writer, sc.WRITTEN_BY) for writer in writers if writer is not None)
    for node in attempt.match.nodes if attempt is not None and attempt.match is not None else ():
        victim: Ref | None = index.victim(node.evicted)
        if victim is not None and load.start < node.end and node.start < load.end:
            links.append(LinkSpec(victim, sc.MADE_NECESSARY_BY))
    return tuple(dict.fromkeys(links))


def prefetch_span(index: InstanceIndex, prefetch: Prefetch) -> SpanSpec:
    """A prefetch from storage, of a request or (when none is known) of its epoch."""
    use = index.use_of_prefetch(prefetch)
    begin = prefetch.asked or prefetch.done
    counts: dict[str, Value] = {
        sc.PREFETCH_COMPLETED: prefetch.completed,
        sc.PREFETCH_EXISTING: prefetch.existing,
        sc.PREFETCH_LOADED: prefetch.loaded,
        sc.PREFETCH_DEADLINE: prefetch.deadline,
    }
    ref = index.prefetch_ref(prefetch)
    return SpanSpec(
        ref=ref,
        name=sc.PREFETCH,
        parent=use.ref.span_id if use is not None else index.epoch_ref(prefetch.epoch).span_id,
        start_ns=index.wall(begin.t_ns),
        end_ns=index.wall(max(begin.t_ns, prefetch.done.t_ns)),
        resource=index.resource,
        attributes=counts
        | extent(prefetch.start, prefetch.start + prefetch.completed)
        | slots(prefetch.slots)
        | seqs(begin, prefetch.done),
        unit=unit_of(use) if use is not None else f"prefetch {ref.span_id}",
    )
