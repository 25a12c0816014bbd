"""What left L1 between two events, and the pass that first reads what was reused."""

from __future__ import annotations

from kvwitness.patches.schema.events import Eviction
from kvwitness.tracer.ledger.facts import Moment, RequestFacts, Victim
from kvwitness.tracer.model import Link
from kvwitness.tracer.verdicts.links import Evidence
from kvwitness.tracer.verdicts.view import InstanceView

_LEFT = (Eviction.DEMOTED, Eviction.DROPPED, Eviction.DROPPED_HOST_PRESSURE)


def left_l1(view: InstanceView, request: RequestFacts, after: int, before: int, start: int, end: int) -> Victim | None:
    """What left L1 between two events and may have held ``[start, end)`` of the request's matched path."""
    if request.match is None:
        return None
    nodes = [node for node in request.match.nodes if node.start < end and start < node.end]
    numbers, owners = {node.node for node in nodes}, {node.owner for node in nodes}
    for victim in view.victims(after, before):
        if victim.how not in _LEFT:
            continue
        overlaps = victim.start < end and start < victim.end
        if victim.node in numbers or (overlaps and (victim.owner is None or victim.owner in owners)):
            return victim
    return None


def link_stayed(evidence: Evidence, view: InstanceView, request: RequestFacts, start: int, end: int) -> None:
    """Take the link "used" when something left L1 meanwhile of which nobody knows whose prefix it held.

    That what is read was not taken away is a rule of the model; of what has no known prefix it cannot be said.
    """
    done = max((chunk.done.seq for chunk in request.chunks if chunk.done is not None), default=None)
    if request.match is None or done is None:
        return
    victim = left_l1(view, request, request.match.moment.seq, done, start, end)
    if victim is not None:
        detail = f"node {victim.node} left L1 before the prefill had ended, and whose prefix it held is not known"
        evidence.miss(Link.USED, detail, request.match.moment, victim.moment)


def first_use(request: RequestFacts) -> Moment | None:
    """The launch of the first pass that reads what was reused."""
    return request.chunks[0].moment if request.chunks else None
