"""From links to a grade."""

from __future__ import annotations

import msgspec

from kvwitness.tracer.model import Grade, LinkEvidence, RangeVerdict, Reason, Tier


def graded(
    start: int, end: int, tier: Tier, reason: Reason, links: tuple[LinkEvidence, ...], detail: str = ""
) -> RangeVerdict:
    """``confirmed`` when every link holds. Otherwise only that the tokens were reused is left, or nothing.

    ``reported`` is not given here: it needs a witness (see :mod:`kvwitness.tracer.verdicts.witnesses`).
    """
    missing = [link for link in links if not link.holds]
    if not missing:
        return RangeVerdict(start, end, tier, Grade.CONFIRMED, reason, detail, links)
    if not detail:
        detail = "missing: " + "; ".join(f"{link.link.value} ({link.detail})" for link in missing)
    return RangeVerdict(start, end, tier, Grade.CONSISTENT, reason, detail, links)


def merged(ranges: list[RangeVerdict]) -> tuple[RangeVerdict, ...]:
    """Join neighbours that say the same and rest on the same events."""
    out: list[RangeVerdict] = []
    for r in ranges:
        if r.start >= r.end:
            continue
        last = out[-1] if out else None
        if (
            last is not None
            and last.end == r.start
            and (last.tier, last.grade, last.reason, last.detail) == (r.tier, r.grade, r.reason, r.detail)
            and last.links == r.links
        ):
            out[-1] = msgspec.structs.replace(
                last, end=r.end, pages=last.pages + r.pages, pages_compared=last.pages_compared + r.pages_compared
            )
        else:
            out.append(r)
    return tuple(out)
