"""The facts of one instance, indexed once: judging a request must not walk over everybody else's events."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

from kvwitness.tracer.ledger.facts import (
    Backup,
    EvictionCall,
    Found,
    HostEviction,
    InstanceFacts,
    Load,
    Moment,
    Prefetch,
    RequestFacts,
    Residency,
    Victim,
)
from kvwitness.tracer.model import Link
from kvwitness.tracer.verdicts.leaks import leaks_of
from kvwitness.tracer.verdicts.prompts import PromptIndex

T = TypeVar("T", Backup, Residency)


class InstanceView:
    """Look-ups over an instance's facts. Read-only."""

    def __init__(self, instance: InstanceFacts) -> None:
        self.instance = instance
        self.unsound: dict[Link, str] | None = None
        """Links that cannot hold on this instance, and why (filled by kvwitness.tracer.verdicts.links)."""
        self.installed: dict[Link, tuple[int, str]] | None = None
        """Since which event the hooks of each link are there, and the last of them (filled by the same)."""
        self.loads: dict[int, Load] = {load.id: load for load in instance.loads}
        self.backups: dict[int, Backup] = {backup.id: backup for backup in instance.backups}
        self.found: dict[int, Found] = {found.id: found for found in instance.found}
        self.prefetches: dict[int, Prefetch] = {prefetch.done.seq: prefetch for prefetch in instance.prefetches}
        self.evictions: dict[int, EvictionCall] = {call.call: call for call in instance.evictions}
        self.requests: dict[str, RequestFacts] = {request.rid: request for request in instance.requests}
        self.doubted: dict[int, str] = dict(_doubted(instance))
        """Where a prefix was told -> why nothing is built on what was recorded of its request."""
        self.leaks = tuple(leaks_of(instance))
        self.prompts = PromptIndex(instance)
        self.resets: list[Moment] = [epoch.begin for epoch in instance.epochs]
        self._victims = sorted((v for c in instance.evictions for v in c.victims), key=lambda v: v.moment.seq)
        self._victim_seqs = [victim.moment.seq for victim in self._victims]
        self.victim_at: dict[int, tuple[EvictionCall, Victim]] = {
            victim.moment.seq: (call, victim) for call in instance.evictions for victim in call.victims
        }
        """By the event that says so: what left L1, in which eviction."""
        self.host_victim_at: dict[tuple[int, int, int], tuple[HostEviction, int]] = {
            (victim.moment.seq, victim.node, victim.end): (eviction, place)
            for eviction in instance.host_evictions
            for place, victim in enumerate(eviction.victims)
        }
        """The same for L2, and as which of its victims: one event can free the slots of several copies."""
        self._backups = _by_owner(instance.backups)
        self._l1 = _by_owner(r for r in instance.residencies if r.tier == "L1")
        self._l2 = _by_owner(r for r in instance.residencies if r.tier == "L2")

    def victims(self, after: int, before: int) -> list[Victim]:
        """What left L1 between two events."""
        return self._victims[bisect_right(self._victim_seqs, after) : bisect_left(self._victim_seqs, before)]

    def loads_of(self, request: RequestFacts) -> list[Load]:
        """The load-backs queued on behalf of one attempt of a request, by position."""
        found = [self.loads[number] for number in request.loads if number in self.loads]
        # One queued before the last match was for a match that was not admitted.
        since = request.match.moment.seq if request.match is not None else 0
        return sorted((load for load in found if load.queued.seq > since), key=lambda load: load.start)

    def l1_of(self, owner: str | None, epoch: int) -> list[Residency]:
        """Intervals in which L1 held parts of ``owner``'s prefix."""
        return self._l1.get((owner, epoch), [])

    def l2_of(self, owners: Iterable[str | None], epoch: int) -> list[Residency]:
        """Intervals in which L2 held parts of the prefixes of ``owners``."""
        return [residency for owner in owners for residency in self._l2.get((owner, epoch), ())]

    def backups_of(self, owners: Iterable[str | None], epoch: int) -> list[Backup]:
        """Backups of parts of the prefixes of ``owners``."""
        return [backup for owner in owners for backup in self._backups.get((owner, epoch), ())]

    def held_in_l2(self, moment: Moment) -> tuple[int, int]:
        """Tokens that L2 held at a moment, and how many of them L1 held as well."""
        held = [r for residencies in self._l2.values() for r in residencies if _at(r, moment)]
        twice = 0
        for copy in held:
            for r in self._l1.get((copy.owner, copy.epoch), ()):
                if _at(r, moment):
                    twice += max(min(r.end, copy.end) - max(r.start, copy.start), 0)
        return sum(r.end - r.start for r in held), twice


def _doubted(instance: InstanceFacts) -> Iterator[tuple[int, str]]:
    for request in instance.requests:
        since = request.chain.since if request.chain is not None else request.queued.seq
        if request.shared_id:
            yield since, f"two requests had the id {request.rid} at a time"
        elif request.wrong:
            yield since, f"what was recorded of request {request.rid} contradicts itself: {request.wrong}"


def owners_of(view: InstanceView, request: RequestFacts) -> set[str | None]:
    """Whose L1 or L2 copies can hold this request's prefix: the earlier request's and those that it built on."""
    owners: set[str | None] = {request.prior_rid}
    for current in _built_on(view, request):
        if current.match is not None:
            # What was there when kvwitness was attached belongs to no request.
            owners.update(node.owner for node in current.match.nodes if node.same_prefix)
        owners.add(current.prior_rid)
    return owners


def forgotten(view: InstanceView, request: RequestFacts) -> bool:
    """Whether something of what the request's prefix was built on is not remembered any more."""
    if not view.instance.remembers_from:
        return False
    return any(
        prior is not None and prior not in view.requests
        for prior in (request.prior_rid, *(current.prior_rid for current in _built_on(view, request)))
    )


def _built_on(view: InstanceView, request: RequestFacts) -> Iterator[RequestFacts]:
    """The earlier request that shares the longest prefix, the one that it shared its own with, and so on."""
    seen: set[str] = set()
    current = view.requests.get(request.prior_rid or "")
    while current is not None and current.rid not in seen:
        seen.add(current.rid)
        yield current
        current = view.requests.get(current.prior_rid or "")


def _at(residency: Residency, moment: Moment) -> bool:
    return residency.since.seq < moment.seq and (residency.until is None or residency.until.seq > moment.seq)


def _by_owner(facts: Iterable[T]) -> dict[tuple[str | None, int], list[T]]:
    found: dict[tuple[str | None, int], list[T]] = defaultdict(list)
    for fact in facts:
        found[(fact.owner, fact.epoch)].append(fact)
    return found
