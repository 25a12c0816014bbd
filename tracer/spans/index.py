"""Where every span of a run will be, before any is made: what links and parents are looked up in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from kvwitness.tracer.judgement import Judgement
from kvwitness.tracer.ledger.facts import (
    Backup,
    EvictionCall,
    HostVictim,
    InstanceFacts,
    Load,
    Moment,
    Prefetch,
    Rejection,
    RequestFacts,
    Residency,
    Victim,
)
from kvwitness.tracer.model import RequestVerdict
from kvwitness.tracer.spans.facts import moments_of
from kvwitness.tracer.spans.spec import Ref, ResourceSpec, span_id_of, trace_id_of
from kvwitness.tracer.spans.traceparent import ClientContext, parse_traceparent
from kvwitness.tracer.verdicts.uses import Use, served


class RequestUse(msgspec.Struct, frozen=True):
    """One request on one process: all its attempts, from the first queueing to the next use of the same id."""

    rid: str
    instance: str
    attempts: tuple[RequestFacts, ...]
    ref: Ref
    parent: str | None
    """The client's span, or the span of the group's first rank."""
    client: ClientContext | None
    first: bool
    """Of the ranks that served the request; its span carries the verdict."""
    ranks: int
    """Processes that recorded it."""
    verdict: RequestVerdict | None

    @property
    def begin(self) -> Moment:
        return self.attempts[0].queued


class InstanceIndex:
    """Lookups within one process. Every method answers None for what was not recorded."""

    def __init__(self, facts: InstanceFacts, uses: Sequence[RequestUse], resource: ResourceSpec) -> None:
        self.facts = facts
        self.resource = resource
        self.uses = tuple(uses)
        self.last_ns = max((moment.t_ns for moment in moments_of(facts)), default=facts.monotonic_ns)
        self.epoch_begins = {epoch.index: epoch.begin for epoch in facts.epochs}
        self.loads = {load.id: load for load in facts.loads}
        self._by_rid: dict[str, list[RequestUse]] = defaultdict(list)
        for use in self.uses:
            self._by_rid[use.rid].append(use)
        self._use_of_load = {load: use for use in self.uses for attempt in use.attempts for load in attempt.loads}
        self._victims = {v.moment.seq: self.victim_ref(call, v) for call in facts.evictions for v in call.victims}
        self._backups = {backup.id: self.backup_ref(backup) for backup in facts.backups}
        self._prefetches = {prefetch.done.seq: prefetch for prefetch in facts.prefetches}
        self._prefetches_of: dict[str, list[Prefetch]] = defaultdict(list)
        for prefetch in facts.prefetches:
            waiting = self.use_of_prefetch(prefetch)
            if waiting is not None:
                self._prefetches_of[waiting.ref.span_id].append(prefetch)
        self._l2: dict[int, list[Residency]] = defaultdict(list)
        for residency in facts.residencies:
            if residency.tier == "L2":
                # What no backup wrote came from storage: usable since the prefetch's end.
                self._l2[residency.backup if residency.backup is not None else residency.since.seq].append(residency)
        self._loads_done: dict[int, list[Load]] = defaultdict(list)
        for load in facts.loads:
            if load.done is not None:
                self._loads_done[load.done.seq].append(load)

    # --- where spans are -----------------------------------------------------------------------------

    def epoch_ref(self, epoch: int) -> Ref:
        return Ref(trace_id_of("epoch", self.facts.instance, epoch), span_id_of("epoch", self.facts.instance, epoch))

    def eviction_ref(self, call: EvictionCall) -> Ref:
        return self._in_epoch(call.epoch, "eviction", call.begin.seq)

    def victim_ref(self, call: EvictionCall, victim: Victim) -> Ref:
        return self._in_epoch(call.epoch, "victim", victim.moment.seq)

    def host_eviction_ref(self, epoch: int, end: Moment) -> Ref:
        return self._in_epoch(epoch, "host_eviction", end.seq)

    def backup_ref(self, backup: Backup) -> Ref:
        return self._in_epoch(backup.epoch, "backup", backup.id)

    def residency_ref(self, residency: Residency) -> Ref:
        # Not the start: a split, or slots freed from the front, moves it while the rest goes on living.
        since = residency.since.seq
        return self._in_epoch(residency.epoch, f"residency.{residency.tier}", since, residency.node, residency.end)

    def l2_copy_ref(self, epoch: int, victim: HostVictim) -> Ref:
        """The residency of what an eviction took from L2."""
        return self._in_epoch(epoch, "residency.L2", victim.since.seq, victim.node, victim.end)

    def rejection_ref(self, rejection: Rejection) -> Ref:
        return self._in_epoch(rejection.epoch, "backup_rejected", rejection.moment.seq)

    def load_ref(self, load: Load) -> Ref:
        use = self._use_of_load.get(load.id)
        trace = use.ref.trace_id if use is not None else self.epoch_ref(load.epoch).trace_id
        return Ref(trace, self._span("load_back", load.id))

    def prefetch_ref(self, prefetch: Prefetch) -> Ref:
        use = self.use_of_prefetch(prefetch)
        trace = use.ref.trace_id if use is not None else self.epoch_ref(prefetch.epoch).trace_id
        return Ref(trace, self._span("prefetch", prefetch.done.seq))

    def part_ref(self, use: RequestUse, part: str, seq: int) -> Ref:
        """A part of a request that nothing links to."""
        return Ref(use.ref.trace_id, self._span(part, seq))

    def _in_epoch(self, epoch: int, kind: str, *parts: int) -> Ref:
        return Ref(self.epoch_ref(epoch).trace_id, self._span(kind, *parts))

    def _span(self, kind: str, *parts: int) -> str:
        return span_id_of(kind, self.facts.instance, *parts)

    # --- what belongs to what ------------------------------------------------------------------------

    def use_at(self, rid: str | None, seq: int) -> RequestUse | None:
        """The request that ``rid`` meant when event ``seq`` was recorded."""
        for use in reversed(self._by_rid.get(rid or "", ())):
            if use.begin.seq <= seq:
                return use
        return None

    def use_of_load(self, load: Load) -> RequestUse | None:
        return self._use_of_load.get(load.id)

    def use_of_prefetch(self, prefetch: Prefetch) -> RequestUse | None:
        # It may be asked for before the request is queued, but it belongs to the request that waited for it.
        uses = self._by_rid.get(prefetch.rid or "", ())
        return self.use_at(prefetch.rid, prefetch.done.seq) or (uses[0] if uses else None)

    def prefetches_of(self, use: RequestUse) -> list[Prefetch]:
        return self._prefetches_of.get(use.ref.span_id, [])

    def victim(self, moment: Moment | None) -> Ref | None:
        """The victim that was recorded with this event."""
        return self._victims.get(moment.seq) if moment is not None else None

    def writer(self, origin: str, number: int) -> Ref | None:
        """The backup or prefetch of a load's segment."""
        if origin == "backup":
            return self._backups.get(number)
        prefetch = self._prefetches.get(number) if origin == "prefetch" else None
        return self.prefetch_ref(prefetch) if prefetch is not None else None

    def read_residencies(self, load: Load) -> list[Residency]:
        """The L2 copies that were there when the load was queued, and that it reads."""
        at = load.queued.seq
        return [
            residency
            for segment in load.segments
            for residency in self._l2.get(segment.origin_id, ())
            if segment.origin != "unknown"
            and residency.since.seq <= at
            and (residency.until is None or residency.until.seq > at)
            and (not segment.aligned or (residency.start < segment.end and segment.start < residency.end))
        ]

    def load_that_made(self, residency: Residency) -> Load | None:
        """The load-back that brought an L1 residency, when only one of a merged copy can have."""
        covering = [
            load
            for load in self._loads_done.get(residency.since.seq, ())
            if load.start <= residency.start and residency.end <= load.end
        ]
        if len(covering) > 1:
            covering = [load for load in covering if residency.node == load.node]
        return covering[0] if len(covering) == 1 else None

    # --- times ---------------------------------------------------------------------------------------

    def epoch_end(self, epoch: int) -> Moment | None:
        """The reset that ended an epoch."""
        return self.epoch_begins.get(epoch + 1)

    def end_of(self, moment: Moment | None, epoch: int) -> int:
        """When something ended, or to when it is known to have gone on (monotonic)."""
        moment = moment or self.epoch_end(epoch)
        return moment.t_ns if moment is not None else self.last_ns

    def over(self, epoch: int) -> bool:
        """Nothing of this epoch can change any more."""
        return self.facts.closed or self.epoch_end(epoch) is not None

    def wall(self, t_ns: int) -> int:
        return self.facts.wall_time_ns(t_ns)


def index_run(
    judgement: Judgement, traceparents: Mapping[str, str | None], resources: Mapping[str, ResourceSpec]
) -> tuple[InstanceIndex, ...]:
    """The index of every process of a run."""
    verdicts = {(v.instance, v.rid, v.attempt, v.queued_ns): v for v in judgement.verdicts}
    uses: dict[str, list[RequestUse]] = defaultdict(list)
    for one in served(judgement.instances):
        for use in _group(one.uses, traceparents, verdicts):
            uses[use.instance].append(use)
    return tuple(
        InstanceIndex(
            facts,
            sorted(uses[facts.instance], key=lambda use: use.begin.seq),
            resources[facts.instance],
        )
        for facts in judgement.instances
    )


_Verdicts = Mapping[tuple[str, str, int, int | None], RequestVerdict]


def _group(uses: Sequence[Use], traceparents: Mapping[str, str | None], verdicts: _Verdicts) -> list[RequestUse]:
    """One request on all ranks: one trace, the first rank's span above the others."""
    rid = uses[0].rid
    recorded = (attempt.traceparent for use in uses for attempt in use.attempts)
    client = next(filter(None, map(parse_traceparent, (*recorded, traceparents.get(rid)))), None)
    leader, first = uses[0].instance, uses[0].attempts[0].queued.seq
    trace = client.trace_id if client else trace_id_of("request", leader.instance, first)
    leading = span_id_of("request", leader.instance, first)
    above = client.span_id if client else None
    keys = [(use.instance.instance, rid, use.last.attempt, use.last.queued.t_ns) for use in uses]
    verdict = next((verdicts[key] for key in keys if key in verdicts), None)
    return [
        RequestUse(
            rid=rid,
            instance=use.instance.instance,
            attempts=use.attempts,
            ref=Ref(trace, span_id_of("request", use.instance.instance, use.attempts[0].queued.seq)),
            parent=above if number == 0 else leading,
            client=client,
            first=number == 0,
            ranks=len(uses),
            verdict=verdict if number == 0 else None,
        )
        for number, use in enumerate(uses)
    ]
