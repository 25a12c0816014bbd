"""One verdict per request: over retractions (the last attempt) and over the ranks of a group (the weakest)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import (
    GRADE_ORDER,
    Grade,
    Link,
    LinkEvidence,
    RangeVerdict,
    Reason,
    RequestVerdict,
    Tier,
)
from kvwitness.tracer.verdicts.links import REMEDY
from kvwitness.tracer.verdicts.recorded import Place, named, places
from kvwitness.tracer.verdicts.request import overall_grade
from kvwitness.tracer.verdicts.sentences import sentence


def combine(verdicts: Sequence[RequestVerdict], instances: Sequence[InstanceFacts]) -> tuple[RequestVerdict, ...]:
    """One verdict per request id and use, in the order of their queueing.

    An id that a client used on two data-parallel ranks, or again after a restart, is of two requests.
    """
    by_instance = {instance.instance: instance for instance in instances}
    rank_of = {instance.instance: _place(instance) for instance in instances}
    starts = _starts(instances, rank_of)
    groups: dict[tuple[str, int, int, int], list[RequestVerdict]] = defaultdict(list)
    uses: dict[tuple[str, str], int] = defaultdict(int)
    for verdict in verdicts:
        key = (verdict.rid, verdict.instance)
        if verdict.attempt == 1:
            uses[key] += 1
        place = rank_of[verdict.instance]
        replica = place[0] if place is not None else 0
        groups[(verdict.rid, replica, starts[verdict.instance], uses[key])].append(verdict)
    return tuple(_combine_one(group, by_instance, rank_of) for group in groups.values())


def _place(instance: InstanceFacts) -> Place | None:
    """Which rank of its server an instance is; None where it does not say."""
    _, seen = places([instance])
    return next(iter(seen), None)


def _starts(instances: Sequence[InstanceFacts], rank_of: Mapping[str, Place | None]) -> dict[str, int]:
    """For each instance, how often its rank had been started before: another process in its place is a restart."""
    found: dict[str, int] = {}
    pids: dict[Place, list[int]] = defaultdict(list)
    for instance in sorted(instances, key=lambda one: one.wall_ns):
        place = rank_of[instance.instance]
        if place is None:
            found[instance.instance] = 0
            continue
        if instance.pid not in pids[place]:
            pids[place].append(instance.pid)
        found[instance.instance] = pids[place].index(instance.pid)
    return found


def _combine_one(
    group: list[RequestVerdict], instances: dict[str, InstanceFacts], rank_of: Mapping[str, Place | None]
) -> RequestVerdict:
    # By rank: two journals of one rank are not two ranks.
    last: dict[Place | str, RequestVerdict] = {}
    for verdict in group:
        last[rank_of[verdict.instance] or verdict.instance] = verdict
    ranks = list(last.values())
    weakest = min(ranks, key=_strength)
    wrong = _missing_ranks(ranks, instances) or _divergence(ranks)
    return _capped(weakest, wrong) if wrong is not None else weakest


def _strength(verdict: RequestVerdict) -> int:
    return GRADE_ORDER.get(verdict.grade, GRADE_ORDER[Grade.CONFIRMED])


def _missing_ranks(ranks: list[RequestVerdict], instances: dict[str, InstanceFacts]) -> tuple[Reason, str] | None:
    said = instances[ranks[0].instance].facts.ranks
    expected = (said.attn_tp_size or said.tp_size or 1) * (said.pp_size or 1)
    if len(ranks) < expected:
        detail = f"the request ran on {expected} ranks, {len(ranks)} of them were recorded"
        everywhere, seen = places(instances[rank.instance] for rank in ranks)
        replicas = {dp for dp, _, _ in seen}
        missing = {place for place in everywhere - seen if place[0] in replicas}
        return Reason.INCONCLUSIVE, f"{detail}, not {named(missing, everywhere)}" if missing else detail
    return None


def _divergence(ranks: list[RequestVerdict]) -> tuple[Reason, str] | None:
    first = ranks[0]
    for other in ranks[1:]:
        if other.tokens != first.tokens:
            detail = f"{first.instance} says {_tokens(first)}, {other.instance} says {_tokens(other)}"
            return Reason.RANKS_DIVERGE, detail
    return None


def _tokens(verdict: RequestVerdict) -> str:
    t = verdict.tokens
    return f"L1 {t.l1}, L2 {t.l2}, L3 {t.l3}, recomputed {t.recomputed}"


def _capped(verdict: RequestVerdict, wrong: tuple[Reason, str]) -> RequestVerdict:
    """Nothing may be confirmed for a group whose ranks are not all seen, or do not agree."""
    reason, detail = wrong
    link = LinkEvidence(Link.RECORD_COMPLETE, False, detail, (), REMEDY[Link.RECORD_COMPLETE])
    ranges = tuple(_capped_range(r, reason, link) for r in verdict.ranges)
    tier = verdict.tier
    # What was computed on the ranks that were seen is no claim of reuse, and says nothing about the strength of one.
    reused = [r for r in ranges if r.tier is not Tier.UNKNOWN]
    grade = overall_grade(reused or ranges, tier)
    return msgspec.structs.replace(
        verdict, ranges=ranges, grade=grade, reason=reason, sentence=sentence(tier, grade, ranges)
    )


def _capped_range(r: RangeVerdict, reason: Reason, link: LinkEvidence) -> RangeVerdict:
    links = (*r.links, link)
    if r.grade in (Grade.CONFIRMED, Grade.VERIFIED):
        grade = Grade.REPORTED
    elif r.grade is Grade.RECOMPUTED:
        return msgspec.structs.replace(r, tier=Tier.UNKNOWN, grade=Grade.UNKNOWN, reason=reason, links=links)
    else:
        grade = r.grade
    return msgspec.structs.replace(r, grade=grade, reason=reason, detail=link.detail, links=links)
