"""One verdict per request: over retractions (the last attempt) and over the ranks of a group (the weakest)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Final

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
from kvwitness.tracer.verdicts.places import named, place_of, width_of
from kvwitness.tracer.verdicts.request import overall_grade
from kvwitness.tracer.verdicts.sentences import sentence
from kvwitness.tracer.verdicts.uses import Served, served

SAME_NAME: Final = "several journals that are not the same have this one's name"


def combine(verdicts: Sequence[RequestVerdict], instances: Sequence[InstanceFacts]) -> tuple[RequestVerdict, ...]:
    """One verdict per request, in the order of their queueing; ``verdicts``: of each attempt on each rank, in order.

    An id that a client used several times, or on servers that came one after the other, is of several requests.
    """
    names = Counter(instance.instance for instance in instances)
    waiting: dict[tuple[str, str, int], deque[RequestVerdict]] = defaultdict(deque)
    for verdict in verdicts:
        waiting[verdict.instance, verdict.rid, verdict.attempt].append(verdict)
    by_use = {
        (id(instance), request.queued.seq): queue.popleft()
        for instance in instances
        for request in instance.requests
        if request.queued.seq not in instance.context
        and (queue := waiting[instance.instance, request.rid, request.attempt])
    }
    found = []
    for one in served(instances):
        ranks = [by_use.get((id(use.instance), use.last.queued.seq)) for use in one.uses]
        known = [rank for rank in ranks if rank is not None]
        if known:
            several = any(names[use.instance.instance] > 1 for use in one.uses)
            found.append(_combine_one(known, one, SAME_NAME if several else ""))
    return tuple(found)


def _combine_one(ranks: list[RequestVerdict], one: Served, wrong: str) -> RequestVerdict:
    weakest = min(ranks, key=_strength)
    inconclusive = one.wrong or _missing_ranks(one, len(ranks)) or wrong
    reason = (Reason.INCONCLUSIVE, inconclusive) if inconclusive else _divergence(ranks)
    return _capped(weakest, reason) if reason is not None else _weakest_by_range(weakest, ranks)


def _strength(verdict: RequestVerdict) -> int:
    return GRADE_ORDER.get(verdict.grade, GRADE_ORDER[Grade.CONFIRMED])


def _missing_ranks(one: Served, known: int) -> str:
    """Which of the ranks that served a request are not among those that tell of it, in words."""
    group = one.group
    needed = len(group.places) or width_of(one.uses[0].instance.facts.ranks)
    if known >= needed and not group.doubt:
        return ""
    there = {place_of(use.instance.facts.ranks) for use in one.uses}
    seen = group.recorded if group.doubt else there
    missing = group.places - seen
    if missing:
        detail = f"the request ran on {needed} ranks, {len(seen)} of them were recorded"
        return f"{detail}, not {named(missing, group.server)}"
    if group.doubt:
        return f"the request ran on {needed} ranks, and which journals are theirs is not known: {group.doubt}"
    return f"the request ran on {needed} ranks, {known} of them are judged"


def _weakest_by_range(verdict: RequestVerdict, ranks: Sequence[RequestVerdict]) -> RequestVerdict:
    """Each range is worth what it is worth on the rank where it is weakest, also where another range decides."""
    others = [other for other in ranks if other is not verdict]
    ranges = tuple(_with_ranks(r, others) for r in verdict.ranges)
    return verdict if ranges == verdict.ranges else msgspec.structs.replace(verdict, ranges=ranges)


def _with_ranks(r: RangeVerdict, others: Sequence[RequestVerdict]) -> RangeVerdict:
    for other in others if r.grade in (Grade.CONFIRMED, Grade.VERIFIED) else ():
        for there in other.ranges:
            if there.start < r.end and r.start < there.end and (there.tier is not r.tier or _weaker(there, r)):
                detail = f"{other.instance} says {there.tier.value} {there.grade.value}: {there.detail}"
                link = LinkEvidence(Link.RECORD_COMPLETE, False, detail, (), REMEDY[Link.RECORD_COMPLETE])
                grade = Grade.CONFIRMED if there.grade is Grade.CONFIRMED else Grade.REPORTED
                links = r.links if grade is Grade.CONFIRMED else (*r.links, link)
                r = msgspec.structs.replace(
                    r, grade=grade, detail=r.detail if grade is Grade.CONFIRMED else detail, links=links
                )
    return r


def _weaker(there: RangeVerdict, here: RangeVerdict) -> bool:
    return GRADE_ORDER.get(there.grade, GRADE_ORDER[Grade.UNKNOWN]) < GRADE_ORDER[here.grade]


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
