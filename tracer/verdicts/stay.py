"""What has to stay where it is until the request's prefill has read it."""

from __future__ import annotations

from kvwitness.patches.schema.events import Eviction
from kvwitness.tracer.ledger.facts import Moment, RequestFacts, Victim
from kvwitness.tracer.model import Link
from kvwitness.tracer.verdicts.links import Evidence
from kvwitness.tracer.verdicts.view import InstanceView

_LEFT = (Eviction.DEMOTED, Eviction.DROPPED, Eviction.DROPPED_HOST_PRESSURE)


def link_stay(evidence: Evidence, view: InstanceView, request: RequestFacts, start: int, end: int) -> None:
    """Take the link "used" when ``[start, end)`` did not stay in L1 from the match to the last prefill's result,
    or when what was matched and loaded is not what the prefill began behind.

    SGLang locks what a request uses. Events that say otherwise do not explain themselves, and nothing is confirmed.
    """
    match = request.match
    done = max((chunk.done.seq for chunk in request.chunks if chunk.done is not None), default=None)
    if match is None or done is None:
        return
    for reset in view.resets:
        if match.moment.seq < reset.seq < done:
            evidence.miss(Link.USED, "the cache was reset before the prefill had ended", match.moment, reset)
            return
    loaded = sum(load.tokens for load in view.loads_of(request))
    if request.chunks[0].start != match.device + loaded:
        detail = (
            f"{match.device} tokens matched in L1 and {loaded} loaded, the prefill began at {request.chunks[0].start}"
        )
        evidence.miss(Link.USED, detail, match.moment, request.chunks[0].moment)
        return
    victim = left_l1(view, request, match.moment.seq, done, start, end)
    if victim is not None:
        detail = f"node {victim.node} left L1 before the prefill had ended"
        evidence.miss(Link.USED, detail, match.moment, victim.moment)


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
