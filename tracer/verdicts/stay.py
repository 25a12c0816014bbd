"""What left L1 between two events, and the pass that first reads what was reused."""

from __future__ import annotations

from kvwitness.patches.schema.events import Eviction
from kvwitness.tracer.ledger.facts import Moment, RequestFacts, Victim
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


def first_use(request: RequestFacts) -> Moment | None:
    """The launch of the first pass that reads what was reused."""
    return request.chunks[0].moment if request.chunks else None
