"""Prefixes that another instance held while a request recomputed them.

Every data-parallel rank has an L1 and an L2 of its own that no other rank can read. A request that is routed to
another rank than its prefix computes it anew, and on its own rank nothing explains why: the explanation is in the
other rank's journal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvwitness.tracer.ledger.chains import Chain, shared_prefix
from kvwitness.tracer.ledger.facts import InstanceFacts, RequestFacts, Residency
from kvwitness.tracer.model import RangeVerdict, Reason, RequestVerdict, Tier
from kvwitness.tracer.verdicts.groups import Server, servers_by_journal
from kvwitness.tracer.verdicts.l2 import covers
from kvwitness.tracer.verdicts.places import replica_of
from kvwitness.tracer.verdicts.sentences import sentence


class _Held(NamedTuple):
    """What an instance held of a prefix: from which position on to which, in which tier."""

    end: int
    tier: str
    owner: str


class _Index:
    """The residencies of one instance by the first digest of their prefix."""

    def __init__(self, instance: InstanceFacts) -> None:
        self.instance = instance
        used = Counter(request.rid for request in instance.requests if request.attempt == 1)
        self.rids = frozenset(used)
        # Whose prefix a residency is says its owner's name: of a name used twice nobody can tell.
        chains = {rid: chain for rid, chain in instance.chains.items() if used[rid] == 1 and chain.cells}
        self._owners: dict[bytes, list[Chain]] = defaultdict(list)
        for chain in chains.values():
            self._owners[chain.cells[0]].append(chain)
        self._residencies: dict[str, list[Residency]] = defaultdict(list)
        for residency in instance.residencies:
            if residency.owner in chains:
                self._residencies[residency.owner].append(residency)

    def held(self, chain: Chain, start: int, end: int, wall_ns: int, *, same_server: bool) -> _Held | None:
        """How much of ``[start, end)`` this instance held at a wall-clock time; None: nothing from ``start`` on.

        ``same_server``: it ran while the request did, also where it has nothing to tell of that time.
        """
        if wall_ns > self.instance.wall_time_ns(self.instance.last_ns) and (self.instance.closed or not same_server):
            return None
        live: list[Residency] = []
        for owner in self._owners.get(chain.cells[0], ()) if chain.cells else ():
            for residency in self._residencies[owner.rid]:
                # Up to where the digests show equality: behind the last whole cell there may be none.
                shared = shared_prefix(chain, owner, residency.end)
                if shared is not None and shared > max(start, residency.start) and self._at(residency, wall_ns):
                    live.append(msgspec.structs.replace(residency, end=shared))
        for tier, found in (("L1", [r for r in live if r.tier == "L1"]), ("L1 and L2", live)):
            reach = max((r.end for r in found if covers(found, start, r.end)), default=start)
            if reach > start:
                tiers = {r.tier for r in found if r.end > start}
                owner_name = next(r.owner for r in found if r.end == reach)
                return _Held(min(reach, end), tier if len(tiers) > 1 else tiers.pop(), owner_name or "")
        return None

    def _at(self, residency: Residency, wall_ns: int) -> bool:
        wall = self.instance.wall_time_ns
        if wall(residency.since.t_ns) > wall_ns:
            return False
        if residency.until is not None and wall(residency.until.t_ns) < wall_ns:
            return False
        # What was not recorded since may have ended it.
        return not any(last >= residency.since.seq for _, last, _ in self.instance.gaps)


def explain_elsewhere(
    verdicts: Sequence[RequestVerdict], instances: Sequence[InstanceFacts]
) -> tuple[RequestVerdict, ...]:
    """The verdicts; recomputed tokens that another instance held say so (:attr:`Reason.RESIDENT_ELSEWHERE`).

    Times of different instances are compared by their wall clocks. Nothing is claimed by this: it is why a request
    reused nothing, not that it reused something.
    """
    if len(instances) < 2:
        return tuple(verdicts)
    indexes = [_Index(instance) for instance in instances]
    requests = {(i.instance, r.rid, r.attempt): r for i in instances for r in i.requests}
    by_name = {instance.instance: instance for instance in instances}
    server_of = servers_by_journal(instances)
    return tuple(
        _explained(verdict, requests[key], by_name[verdict.instance], indexes, server_of)
        if (key := (verdict.instance, verdict.rid, verdict.attempt)) in requests
        else verdict
        for verdict in verdicts
    )


def _explained(
    verdict: RequestVerdict,
    request: RequestFacts,
    own: InstanceFacts,
    indexes: Sequence[_Index],
    server_of: Mapping[str, Server],
) -> RequestVerdict:
    chain = own.chains.get(verdict.rid)
    last = verdict.ranges[-1] if verdict.ranges else None
    if chain is None or last is None or last.tier is not Tier.RECOMPUTED or request.match is None or request.shared_id:
        return verdict
    # What differs from this rank's own requests may be another rank's.
    changed = last.reason is Reason.PREFIX_CHANGED
    if not changed and (last.reason is not Reason.RECOMPUTED or last.detail):
        return verdict
    best: tuple[_Held, InstanceFacts] | None = None
    for index in indexes:
        other = index.instance
        server = server_of[own.instance]
        same_server = server_of[other.instance] is server
        # The ranks that served the request have nothing to explain; another model's KV is another prefix, and where
        # prefixes are digested with another key nobody can tell.
        if verdict.rid in index.rids or (same_server and replica_of(other.facts.ranks) == replica_of(own.facts.ranks)):
            continue
        if _model(other) != _model(own) or _key(other) != _key(own):
            continue
        when = own.wall_time_ns(request.match.moment.t_ns)
        held = index.held(chain, last.start, last.end, when, same_server=same_server and not server.doubt)
        if held is not None and (best is None or held.end > best[0].end):
            best = held, other
    if best is None:
        return verdict
    held, other = best
    detail = f"in {held.tier} of {rank_name(other)}, this request ran on {rank_name(own)}"
    ranges = (
        *verdict.ranges[:-1],
        msgspec.structs.replace(last, end=held.end, reason=Reason.RESIDENT_ELSEWHERE, detail=detail),
        *_rest(last, held.end),
    )
    reason = Reason.RESIDENT_ELSEWHERE if verdict.tier is Tier.RECOMPUTED else verdict.reason
    note = f"tokens {last.start} to {held.end} were in {held.tier} of {rank_name(other)} since request {held.owner}"
    return msgspec.structs.replace(
        verdict,
        ranges=ranges,
        reason=reason,
        sentence=sentence(verdict.tier, verdict.grade, ranges) if reason is not verdict.reason else verdict.sentence,
        notes=(*verdict.notes, note),
    )


def _rest(last: RangeVerdict, start: int) -> tuple[RangeVerdict, ...]:
    """What lies behind that. Where it leaves this rank's own requests does not matter any more."""
    rest = msgspec.structs.replace(last, start=start, reason=Reason.RECOMPUTED, detail="")
    return (rest,) if start < last.end else ()


def _model(instance: InstanceFacts) -> tuple[object, ...]:
    arguments = instance.facts.arguments
    return arguments.model_path, arguments.kv_cache_dtype, arguments.dtype, arguments.quantization


def _key(instance: InstanceFacts) -> str | None:
    return instance.facts.process.key if instance.facts.process is not None else None


def rank_name(instance: InstanceFacts) -> str:
    """How people call an instance: by its data-parallel rank where the server has several, else by its process."""
    ranks = instance.facts.ranks
    if (ranks.dp_size or 1) > 1 and ranks.dp_rank is not None:
        return f"dp rank {ranks.dp_rank}"
    return f"process {instance.pid}"
