"""The traces of one process: what its cache did in each epoch."""

from __future__ import annotations

from collections.abc import Iterator

from kvwitness.patches.schema.events import Cause, Eviction
from kvwitness.tracer.ledger.facts import Backup, EvictionCall, HostEviction, Moment, Rejection, Residency, Victim
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.facts import duration, extent, known, pool_attributes, seqs, slots
from kvwitness.tracer.spans.index import InstanceIndex, RequestUse
from kvwitness.tracer.spans.requests import load_span, prefetch_span, started_event
from kvwitness.tracer.spans.spec import EventSpec, LinkSpec, Ref, SpanSpec, Value


def cache_spans(index: InstanceIndex) -> Iterator[SpanSpec]:
    """For each epoch its span, then what happened in it, in the order of the journal."""
    spans = [span for call in index.facts.evictions for span in _eviction(index, call)]
    spans += (_backup(index, backup) for backup in index.facts.backups)
    spans += (_residency(index, residency) for residency in index.facts.residencies)
    spans += (_rejection(index, rejection) for rejection in index.facts.rejections)
    spans += (_host_eviction(index, eviction) for eviction in index.facts.host_evictions)
    spans += (load_span(index, load, None) for load in index.facts.loads if index.use_of_load(load) is None)
    spans += (prefetch_span(index, p) for p in index.facts.prefetches if index.use_of_prefetch(p) is None)
    by_trace: dict[str, list[SpanSpec]] = {}
    for span in spans:
        by_trace.setdefault(span.ref.trace_id, []).append(span)
    for epoch in _epochs(index):
        root = _epoch(index, epoch)
        yield root
        yield from sorted(by_trace.get(root.ref.trace_id, ()), key=_order)


def _order(span: SpanSpec) -> tuple[int, str, int]:
    # Several residencies begin with one event: those of the nodes on one path.
    first, start = span.attributes[sc.FIRST_SEQ], span.attributes.get(sc.START, -1)
    assert isinstance(first, int) and isinstance(start, int)
    return first, span.name, start


def _epochs(index: InstanceIndex) -> list[int]:
    """All epochs; the one before the first recorded reset only when something happened in it."""
    facts = index.facts
    used = set(index.epoch_begins)
    used.update(request.epoch for request in facts.requests)
    used.update(call.epoch for call in facts.evictions)
    used.update(eviction.epoch for eviction in facts.host_evictions)
    used.update(rejection.epoch for rejection in facts.rejections)
    used.update(backup.epoch for backup in facts.backups)
    used.update(load.epoch for load in facts.loads)
    used.update(prefetch.epoch for prefetch in facts.prefetches)
    used.update(residency.epoch for residency in facts.residencies)
    return sorted(used)


def _epoch(index: InstanceIndex, epoch: int) -> SpanSpec:
    facts = index.facts
    begin, end = index.epoch_begins.get(epoch), index.epoch_end(epoch)
    begin_ns = begin.t_ns if begin is not None else facts.monotonic_ns
    end_ns = index.wall(max(begin_ns, index.end_of(end, epoch)))
    # The process's own end ends the epoch as well.
    is_open = end is None and not facts.closed
    attributes: dict[str, Value | None] = {
        sc.EPOCH_INDEX: epoch,
        sc.FIRST_SEQ: begin.seq if begin is not None else facts.first_seq,
        sc.LAST_SEQ: end.seq if end is not None else None,
        sc.GAPS: len(facts.gaps),
        sc.ANOMALIES: len(facts.anomalies),
        sc.OPEN: True if is_open else None,
    }
    return SpanSpec(
        ref=index.epoch_ref(epoch),
        name=sc.EPOCH,
        start_ns=index.wall(begin_ns),
        end_ns=end_ns,
        resource=index.resource,
        attributes=known(attributes) | pool_attributes(facts),
        events=(*_storage_changes(index, begin, end), *((EventSpec(sc.FLUSH, end_ns),) if end is not None else ())),
        unit=f"epoch {index.epoch_ref(epoch).span_id}",
        open=is_open,
        complete=index.over(epoch),
    )


def _storage_changes(index: InstanceIndex, begin: Moment | None, end: Moment | None) -> Iterator[EventSpec]:
    """What became of the storage backend within an epoch."""
    for change in index.facts.storage.changes:
        seq = change.moment.seq
        if (begin is None or begin.seq < seq) and (end is None or seq < end.seq):
            attributes: dict[str, Value] = {
                sc.STORAGE_ATTACH: change.attach,
                sc.STORAGE_DONE: change.ok,
                sc.STORAGE_MESSAGE: change.message,
            }
            yield EventSpec(sc.STORAGE_CHANGED, index.wall(change.moment.t_ns), attributes)


def _eviction(index: InstanceIndex, call: EvictionCall) -> Iterator[SpanSpec]:
    ref = index.eviction_ref(call)
    attributes: dict[str, Value | None] = {
        sc.EVICTION_CALL: call.call,
        sc.EVICTION_CAUSE: Cause.NAMES.get(call.cause, str(call.cause)),
        sc.EVICTION_ASKED: call.asked,
        sc.EVICTION_FREED: call.freed,
        sc.EVICTION_FREE: call.free,
        sc.EVICTION_RIDS: call.rids or None,
        sc.EVICTION_VICTIMS: len(call.victims),
    }
    yield _span(
        index,
        ref,
        sc.EVICTION,
        call.epoch,
        call.begin,
        call.end,
        known(attributes),
        links=tuple(_caused_by(index, rid, call.begin) for rid in call.rids),
        unit=ref.span_id,
    )
    for victim in call.victims:
        yield _victim(index, call, victim, ref)


def _victim(index: InstanceIndex, call: EvictionCall, victim: Victim, eviction: Ref) -> SpanSpec:
    attributes: dict[str, Value | None] = {
        sc.NODE: victim.node,
        sc.OWNER: victim.owner,
        sc.EVICTION_OUTCOME: Eviction.NAMES.get(victim.how, str(victim.how)),
        **extent(victim.start, victim.end, victim.tokens),
    }
    moment = victim.moment
    return _span(
        index,
        index.victim_ref(call, victim),
        sc.VICTIM,
        call.epoch,
        moment,
        moment,
        known(attributes),
        parent=eviction,
        unit=eviction.span_id,
    )


def _host_eviction(index: InstanceIndex, eviction: HostEviction) -> SpanSpec:
    attributes: dict[str, Value | None] = {
        sc.EVICTION_CALL: eviction.call,
        sc.EVICTION_CAUSE: Cause.NAMES.get(eviction.cause, str(eviction.cause)),
        sc.EVICTION_ASKED: eviction.asked,
        sc.EVICTION_FREED: eviction.freed,
        sc.EVICTION_FREE: eviction.available,
        sc.EVICTION_RIDS: (eviction.rid,) if eviction.rid is not None else None,
        sc.EVICTION_VICTIMS: len(eviction.victims),
        **slots(eviction.slots),
    }
    ref, end = index.host_eviction_ref(eviction.epoch, eviction.end), eviction.end
    links = (
        _caused_by(index, eviction.rid, end),
        *(LinkSpec(index.l2_copy_ref(eviction.epoch, victim), sc.DISPLACED) for victim in eviction.victims),
    )
    return _span(index, ref, sc.HOST_EVICTION, eviction.epoch, end, end, known(attributes), links=links)


def _rejection(index: InstanceIndex, rejection: Rejection) -> SpanSpec:
    attributes: dict[str, Value | None] = {
        sc.NODE: rejection.node if rejection.node >= 0 else None,
        sc.OWNER: rejection.owner,
        sc.EVICTION_FREE: rejection.available,
        **extent(rejection.start, rejection.end, rejection.tokens),
    }
    ref, moment = index.rejection_ref(rejection), rejection.moment
    links = (_caused_by(index, rejection.rid, moment),)
    return _span(index, ref, sc.BACKUP_REJECTED, rejection.epoch, moment, moment, known(attributes), links=links)


def _backup(index: InstanceIndex, backup: Backup) -> SpanSpec:
    attributes: dict[str, Value | None] = {
        sc.NODE: backup.node,
        sc.OWNER: backup.owner,
        sc.WRITE_BACK: backup.write_back,
        sc.TRANSFER: backup.transfer,
        sc.TRANSFER_DURATION: duration(backup.duration_ns),
        **extent(backup.start, backup.end, backup.tokens),
        **slots(backup.slots),
    }
    return _span(
        index,
        index.backup_ref(backup),
        sc.BACKUP,
        backup.epoch,
        backup.queued,
        backup.acked,
        known(attributes),
        events=started_event(index, backup.started),
        links=(_caused_by(index, backup.rid, backup.queued),),
    )


def _residency(index: InstanceIndex, residency: Residency) -> SpanSpec:
    attributes: dict[str, Value | None] = {
        sc.NODE: residency.node if residency.node >= 0 else None,
        sc.OWNER: residency.owner,
        **extent(residency.start, residency.end),
        **slots(residency.slots),
    }
    in_l1 = residency.tier == "L1"
    return _span(
        index,
        index.residency_ref(residency),
        sc.RESIDENCY_L1 if in_l1 else sc.RESIDENCY_L2,
        residency.epoch,
        residency.since,
        residency.until,
        known(attributes),
        links=_l1_links(index, residency) if in_l1 else (_l2_link(index, residency),),
    )


def _l1_links(index: InstanceIndex, residency: Residency) -> tuple[LinkSpec | None, ...]:
    load = index.load_that_made(residency)
    if load is not None:
        made: Ref | None = index.load_ref(load)
    elif residency.since.kind == "Inserted":
        # What an insert made resident is known by the request that was inserted.
        made = _ref(index.use_at(residency.owner, residency.since.seq))
    else:
        made = None
    victim = index.victim(residency.until)
    return (
        LinkSpec(made, sc.MADE_BY) if made is not None else None,
        LinkSpec(victim, sc.ENDED_BY) if victim is not None else None,
    )


def _l2_link(index: InstanceIndex, residency: Residency) -> LinkSpec | None:
    origin = "backup" if residency.backup is not None else "prefetch"
    number = residency.backup if residency.backup is not None else residency.since.seq
    writer = index.writer(origin, number)
    return LinkSpec(writer, sc.WRITTEN_BY) if writer is not None else None


def _caused_by(index: InstanceIndex, rid: str | None, moment: Moment) -> LinkSpec | None:
    ref = _ref(index.use_at(rid, moment.seq))
    return LinkSpec(ref, sc.CAUSED_BY) if ref is not None else None


def _ref(use: RequestUse | None) -> Ref | None:
    return use.ref if use is not None else None


def _span(
    index: InstanceIndex,
    ref: Ref,
    name: str,
    epoch: int,
    begin: Moment,
    end: Moment | None,
    attributes: dict[str, Value],
    *,
    parent: Ref | None = None,
    events: tuple[EventSpec, ...] = (),
    links: tuple[LinkSpec | None, ...] = (),
    unit: str | None = None,
) -> SpanSpec:
    """A span within an epoch's trace. The end of an epoch, or of the journal, leaves what has no end open."""
    return SpanSpec(
        ref=ref,
        name=name,
        parent=(parent or index.epoch_ref(epoch)).span_id,
        start_ns=index.wall(begin.t_ns),
        end_ns=index.wall(max(begin.t_ns, index.end_of(end, epoch))),
        resource=index.resource,
        attributes=attributes | seqs(begin, end) | ({sc.OPEN: True} if end is None else {}),
        events=events,
        links=tuple(dict.fromkeys(link for link in links if link is not None)),
        unit=unit or ref.span_id,
        open=end is None,
        complete=end is not None or index.over(epoch),
    )
