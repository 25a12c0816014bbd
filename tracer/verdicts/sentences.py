"""The sentence for people. It follows the grade, never the wish."""

from __future__ import annotations

from collections.abc import Sequence

from kvwitness.tracer.model import Grade, Link, RangeVerdict, Reason, Tier
from kvwitness.tracer.verdicts.links import AT_ATTACH

_DEPTH = {Tier.L3: 3, Tier.L2: 2, Tier.L1: 1}

_BY_GRADE = {
    Grade.CONFIRMED: "confirmed",
    Grade.VERIFIED: "verified",
    Grade.REPORTED: "reported by the server, not confirmed",
    Grade.CONSISTENT: "consistent with reuse, not confirmed",
    Grade.UNKNOWN: "unknown",
}

_PROVEN = (Grade.CONFIRMED, Grade.VERIFIED)

_WHY_RECOMPUTED = {
    Reason.PROMISED_NOT_LOADED: "promised, not loaded",
    Reason.RESIDENT_NOT_MATCHED: "resident in L2, not matched",
    Reason.NEVER_BACKED_UP: "never backed up to L2",
    Reason.LEFT_L2_BEFORE_READ: "left L2 before the read",
    Reason.RESIDENT_ELSEWHERE: "resident elsewhere",
    Reason.INVALID_MODE: "L2 is no tier here",
}


def deepest_tier(ranges: Sequence[RangeVerdict]) -> Tier:
    """The lowest tier that was read; ``recomputed`` when nothing was reused, ``unknown`` when nobody can say."""
    tiers = {r.tier for r in ranges}
    reused = tiers & _DEPTH.keys()
    if reused:
        return max(reused, key=_DEPTH.__getitem__)
    return Tier.RECOMPUTED if tiers == {Tier.RECOMPUTED} else Tier.UNKNOWN


def sentence(tier: Tier, grade: Grade, ranges: Sequence[RangeVerdict]) -> str:
    """One line about the whole request."""
    if grade is Grade.REFUTED:
        refuted = [r for r in ranges if r.grade is Grade.REFUTED]
        corrupted = next((r for r in refuted if r.reason is Reason.CORRUPTION_SUSPECTED), None)
        if corrupted is not None:
            return f"{corrupted.tier.value} read corrupted: {corrupted.detail}"
        text = f"refuted: {_first_detail(ranges, Grade.REFUTED)}"
        confirmed = {t: sum(r.tokens for r in ranges if r.tier is t and r.grade in _PROVEN) for t in _DEPTH}
        return text + "".join(f"; {t} read of {tokens} tokens confirmed" for t, tokens in confirmed.items() if tokens)
    if tier is Tier.RECOMPUTED:
        reasons = [_why(r) for r in ranges if r.reason in _WHY_RECOMPUTED]
        detail = next((r.detail for r in ranges if r.reason in _WHY_RECOMPUTED and r.detail), "")
        if not reasons:
            # Where the prompt leaves an earlier one says nothing of the part that they share.
            detail = next((r.detail for r in ranges if r.detail and r.reason is not Reason.PREFIX_CHANGED), "")
            return f"recomputed: {detail}" if detail else "recomputed"
        return f"recomputed: {reasons[0]}" + (f" ({detail})" if detail else "")
    if tier is Tier.UNKNOWN:
        detail = next((r.detail for r in ranges if r.detail), "")
        return "unknown" + (f": {detail}" if detail else "")
    kind = {Tier.L1: "L1 read", Tier.L2: "L2 read", Tier.L3: "L3 read"}[tier]
    text = f"{kind} {_BY_GRADE.get(grade, grade.value)}"
    compared, pages = pages_compared(ranges)
    if grade is Grade.CONFIRMED and compared and all(r.grade is Grade.VERIFIED for r in ranges if r.tier is tier):
        text += f", its bytes verified ({compared} of {pages} pages)"
    elif grade is Grade.VERIFIED and compared < pages:
        text += f" ({compared} of {pages} pages sampled)"
    if grade in _PROVEN and rests_on_attach(ranges, tier):
        text += " (resident at attach)"
    partial = next((r for r in ranges if r.reason is Reason.L2_READ_PARTIAL and r.tier is Tier.RECOMPUTED), None)
    if partial is not None:
        text += f", in part ({partial.detail})"
    missing = [link for r in ranges if r.tier is tier for link in r.missing]
    if missing and grade not in _PROVEN:
        text += f": missing link {missing[0].link.value} ({missing[0].detail})"
    others = sorted({r.tier for r in ranges if r.tier in _DEPTH and r.tier is not tier}, key=_DEPTH.__getitem__)
    if others:
        text += ", with " + " and ".join(
            f"{sum(r.tokens for r in ranges if r.tier is t)} tokens of {t}" for t in others
        )
    return text


def _why(r: RangeVerdict) -> str:
    if r.reason is Reason.NEVER_BACKED_UP and not any(link.link is Link.BACKED_UP for link in r.missing):
        return "never backed up to L3"  # L2 is not what it was missing from.
    return _WHY_RECOMPUTED[r.reason]


def pages_compared(ranges: Sequence[RangeVerdict]) -> tuple[int, int]:
    """Pages whose bytes were compared, and pages of the verified ranges."""
    return sum(r.pages_compared for r in ranges), sum(r.pages for r in ranges)


def rests_on_attach(ranges: Sequence[RangeVerdict], tier: Tier) -> bool:
    """Whether what was found when kvwitness was attached stands in for a link of the claim."""
    return any(event.kind == AT_ATTACH for r in ranges if r.tier is tier for link in r.links for event in link.events)


def _first_detail(ranges: Sequence[RangeVerdict], grade: Grade) -> str:
    return next((r.detail for r in ranges if r.grade is grade and r.detail), "the evidence contradicts the attribution")
