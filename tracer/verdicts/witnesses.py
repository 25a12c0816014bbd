"""The server's own attribution beside ours: agreement, disagreement, and what is left without a chain."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvwitness.tracer.model import (
    CrossCheck,
    Grade,
    Link,
    LinkEvidence,
    RangeVerdict,
    ServerReport,
    Tier,
    TokensPerTier,
)
from kvwitness.tracer.verdicts.links import REMEDY


def count(ranges: Sequence[RangeVerdict], total: int) -> TokensPerTier:
    """Tokens per tier; what no range covers is unknown, never a remainder booked to a tier."""
    sums = dict.fromkeys(Tier, 0)
    for r in ranges:
        sums[r.tier] += r.tokens
    covered = sum(sums.values())
    return TokensPerTier(
        l1=sums[Tier.L1],
        l2=sums[Tier.L2],
        l3=sums[Tier.L3],
        recomputed=sums[Tier.RECOMPUTED],
        unknown=sums[Tier.UNKNOWN] + max(0, total - covered),
    )


def check_report(report: ServerReport, tokens: TokensPerTier, judged: bool, declined: int = 0) -> CrossCheck:
    """Compare one of the server's own attributions with ours.

    ``declined``: tokens that the match promised of L2 and whose load-back was refused.
    """
    witness = f"cached tokens by the {report.source}"
    theirs = _describe(report)
    if not judged:
        return CrossCheck(witness, None, "no attribution", theirs, "the journal does not cover this request")
    ours = f"L1 {tokens.l1}, L2 {tokens.l2}, L3 {tokens.l3}"
    if report.device is None and report.host is None:
        if report.cached is None:
            return CrossCheck(witness, None, ours, theirs, "the server reported nothing")
        agrees = report.cached == tokens.l1 + tokens.l2 + tokens.l3
        return CrossCheck(witness, agrees, ours, theirs, "total only: this report has no tiers")
    # The server counts tokens that came from storage through L2 either as host or as storage.
    device, below = report.device or 0, (report.host or 0) + (report.storage or 0)
    agrees = device == tokens.l1 and below == tokens.l2 + tokens.l3
    if agrees or below <= tokens.l2 + tokens.l3:
        return CrossCheck(witness, agrees, ours, theirs)
    # SGLang 0.5.9 to 0.5.19 report what the match promised: the declined tokens are credited to the host
    # and taken from the device, so that the sum is right and both parts are wrong.
    known = bool(declined) and below == declined and device + below == tokens.l1 and not tokens.l2 + tokens.l3
    explanation = "the server credits L2 with tokens whose load-back was refused (SGLang 0.5.9 to 0.5.19 do that)"
    return CrossCheck(witness, agrees, ours, theirs, explanation, explained=known)


def _describe(report: ServerReport) -> str:
    if report.device is None and report.host is None:
        return f"cached {report.cached if report.cached is not None else 'not reported'}"
    text = f"device {report.device}, host {report.host}"
    return text if report.storage is None else f"{text}, storage {report.storage}"


def weigh(
    ranges: Sequence[RangeVerdict], checks: Sequence[CrossCheck], reports: Sequence[ServerReport]
) -> list[RangeVerdict]:
    """Apply the witnesses: a disagreement caps, a report lifts a broken chain to ``reported``, at most."""
    against = [check for check in checks if check.agrees is False and not check.explained]
    return [_weigh_one(r, against, reports) for r in ranges]


def _weigh_one(r: RangeVerdict, against: Sequence[CrossCheck], reports: Sequence[ServerReport]) -> RangeVerdict:
    if against:
        text = "; ".join(f"{c.witness} says {c.theirs}, the events say {c.ours}" for c in against)
        link = LinkEvidence(Link.WITNESSES_AGREE, False, text, (), REMEDY[Link.WITNESSES_AGREE])
        r = msgspec.structs.replace(r, links=(*r.links, link))
        # That a read was corrupted rests on the same chain as that it took place; the suspicion stays its reason.
        claimed = (Grade.CONFIRMED, Grade.VERIFIED, Grade.REFUTED)
        if r.tier in (Tier.L1, Tier.L2, Tier.L3) and r.grade in claimed:
            return msgspec.structs.replace(r, grade=Grade.REPORTED, detail=f"witnesses disagree: {text}")
        return r
    if r.grade is Grade.CONSISTENT and _attributed(r, reports):
        return msgspec.structs.replace(r, grade=Grade.REPORTED)
    return r


def _attributed(r: RangeVerdict, reports: Sequence[ServerReport]) -> bool:
    """Whether the server itself attributes tokens to the range's tier."""
    for report in reports:
        by_tier = {Tier.L1: report.device, Tier.L2: report.host, Tier.L3: report.storage or report.host}
        if (by_tier.get(r.tier) or 0) >= r.tokens:
            return True
    return False
