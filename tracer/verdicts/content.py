"""Whether the bytes that a load-back put into L1 are the bytes that the backup took out of it.

Only asked where digests were taken. Equal ones raise a confirmed claim to verified; different ones refute it. What
was digested too late, or could have been, counts neither way.
"""

from __future__ import annotations

import msgspec

from kvwitness.tracer.ledger.facts import Load, PageCheck, RequestFacts
from kvwitness.tracer.model import Grade, Link, RangeVerdict, Reason
from kvwitness.tracer.verdicts.links import Evidence
from kvwitness.tracer.verdicts.stay import left_l1
from kvwitness.tracer.verdicts.view import InstanceView


class Compared(msgspec.Struct, frozen=True):
    """The pages of a range whose content was compared."""

    pages: int
    """Pages of the range ..."""
    equal: tuple[PageCheck, ...]
    different: tuple[PageCheck, ...]

    @property
    def detail(self) -> str:
        """In words."""
        if self.different:
            first = self.different[0]
            layers = ", ".join(map(str, first.differing[:3])) + (", ..." if len(first.differing) > 3 else "")
            others = f"; {len(self.different)} pages differ" if len(self.different) > 1 else ""
            return (
                f"the page of tokens {first.start} to {first.end} (host slots {first.slot} to "
                f"{first.slot + first.end - first.start}) came back with other bytes in layer {layers}: event "
                f"{first.backed_up.seq} digested it when it was backed up, event {first.loaded.seq} after the load"
                f"{others}"
            )
        return f"{len(self.equal)} of {self.pages} pages digested in L1 at the backup and after the load: equal"

    def link(self, evidence: Evidence) -> None:
        """Add the link to a claim, where anything was compared."""
        if self.different:
            first = self.different[0]
            evidence.miss(Link.CONTENT, self.detail, first.backed_up, first.loaded)
        elif self.equal:
            moments = (moment for check in self.equal for moment in (check.backed_up, check.loaded))
            evidence.hold(Link.CONTENT, self.detail, *moments)

    def weigh(self, verdict: RangeVerdict) -> RangeVerdict:
        """The grade of a claim whose links are complete, the content among them."""
        if self.different and all(link.link is Link.CONTENT for link in verdict.missing):
            return msgspec.structs.replace(
                verdict, grade=Grade.REFUTED, reason=Reason.CORRUPTION_SUSPECTED, detail=self.detail
            )
        if self.equal and verdict.grade is Grade.CONFIRMED:
            return msgspec.structs.replace(
                verdict, grade=Grade.VERIFIED, pages=self.pages, pages_compared=len(self.equal)
            )
        return verdict


def compare_content(
    evidence: Evidence, view: InstanceView, request: RequestFacts, load: Load, start: int, end: int
) -> Compared:
    """Compare what can be compared of ``[start, end)``."""
    page = max(view.instance.facts.instance.page_size or 1, 1)
    checks = [check for check in load.checks if check.start < end and start < check.end]
    if not evidence.is_sound(Link.CONTENT) or not all(c.sound and _in_time(view, request, load, c) for c in checks):
        checks = []
    return Compared(
        pages=(end - start + page - 1) // page,
        equal=tuple(check for check in checks if not check.differing),
        different=tuple(check for check in checks if check.differing),
    )


def _in_time(view: InstanceView, request: RequestFacts, load: Load, check: PageCheck) -> bool:
    """The page was in L1, as the load had left it, until its digest was recorded."""
    assert load.started is not None
    if any(gap[0] <= check.loaded.seq and gap[1] >= load.queued.seq for gap in view.instance.gaps):
        return False
    if any(load.started.seq < reset.seq < check.loaded.seq for reset in view.resets):
        return False
    return left_l1(view, request, load.started.seq, check.loaded.seq, check.start, check.end) is None
