"""The facts of one instance, indexed once: judging a request must not walk over everybody else's events."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

from kvwitness.tracer.ledger.facts import (
    Backup,
    EvictionCall,
    Found,
    InstanceFacts,
    Load,
    Moment,
    Prefetch,
    RequestFacts,
    Residency,
    Victim,
)
from kvwitness.tracer.model import Link

T = TypeVar("T", Backup, Residency)


class InstanceView:
    """Look-ups over an instance's facts. Read-only."""

    def __init__(self, instance: InstanceFacts) -> None:
        self.instance = instance
        self.unsound: dict[Link, str] | None = None
        """Links that cannot hold on this instance, and why (filled by kvwitness.tracer.verdicts.links)."""
        self.loads: dict[int, Load] = {load.id: load for load in instance.loads}
        self.backups: dict[int, Backup] = {backup.id: backup for backup in instance.backups}
        self.found: dict[int, Found] = {found.id: found for found in instance.found}
        self.prefetches: dict[int, Prefetch] = {prefetch.done.seq: prefetch for prefetch in instance.prefetches}
        self.evictions: dict[int, EvictionCall] = {call.call: call for call in instance.evictions}
        self.requests: dict[str, RequestFacts] = {request.rid: request for request in instance.requests}
        self.resets: list[Moment] = [epoch.begin for epoch in instance.epochs]
        self._victims = sorted((v for c in instance.evictions for v in c.victims), key=lambda v: v.moment.seq)
        self._victim_seqs = [victim.moment.seq for victim in self._victims]
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


def _by_owner(facts: Iterable[T]) -> dict[tuple[str | None, int], list[T]]:
    found: dict[tuple[str | None, int], list[T]] = defaultdict(list)
    for fact in facts:
        found[(fact.owner, fact.epoch)].append(fact)
    return found
