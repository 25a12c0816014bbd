"""Claim: these tokens were served by L1."""

from __future__ import annotations

from kvwitness.tracer.ledger.facts import MatchedNode, RequestFacts
from kvwitness.tracer.model import Grade, Link, RangeVerdict, Reason, Tier
from kvwitness.tracer.verdicts.grading import graded
from kvwitness.tracer.verdicts.l2 import covers, link_loaded
from kvwitness.tracer.verdicts.links import AT_ATTACH, FOUND_IN_L1, Evidence
from kvwitness.tracer.verdicts.stay import first_use, link_stayed
from kvwitness.tracer.verdicts.usage import Usage
from kvwitness.tracer.verdicts.view import InstanceView


def judge_l1(view: InstanceView, request: RequestFacts, usage: Usage, start: int, end: int) -> list[RangeVerdict]:
    """Verdicts for the part ``[start, end)`` that the match found in L1, node by node, equal ones merged."""
    match = request.match
    if match is None or end <= start:
        return []
    found: list[RangeVerdict] = []
    covered = start
    for node in match.nodes:
        low, high = max(node.start, start), min(node.end, end)
        if low >= high:
            continue
        if low > covered:
            found.append(_without_node(view, request, usage, covered, low))
        found.append(_judge_node(view, request, usage, node, low, high))
        covered = high
    if covered < end:
        found.append(_without_node(view, request, usage, covered, end))
    return found


def _without_node(view: InstanceView, request: RequestFacts, usage: Usage, start: int, end: int) -> RangeVerdict:
    evidence = Evidence(view, request)
    moment = request.match.moment if request.match is not None else None
    evidence.miss(Link.BORN, "the matched path was not recorded", moment)
    usage.link(evidence)
    return graded(start, end, Tier.L1, Reason.L1_HIT, evidence.complete())


def _judge_node(
    view: InstanceView,
    request: RequestFacts,
    usage: Usage,
    node: MatchedNode,
    start: int,
    end: int,
) -> RangeVerdict:
    assert request.match is not None
    evidence = Evidence(view, request)
    matched = request.match.moment
    load = view.loads.get(node.load) if node.load is not None else None
    read = first_use(request)
    pending = load is not None and (load.done is None or read is None or load.done.seq > read.seq)
    evidence.prefix_told(node.owner_since)
    if node.resident is None and load is None:
        evidence.miss(Link.BORN, f"nothing recorded says how node {node.node} came into L1", matched)
    elif not node.known or node.same_prefix is not True:
        evidence.miss(Link.BORN, f"the ledger cannot tell whose prefix node {node.node} holds", matched)
    elif load is None and node.load is not None:
        evidence.miss(Link.BORN, f"the load-back that brought node {node.node} is not known", matched)
    elif load is not None and load.id in request.loads:
        evidence.miss(Link.BORN, "the request's own load-back brought it, for an earlier match", load.queued, matched)
    elif load is not None:
        link_loaded(evidence, view, load, start, end)
    elif node.resident is not None and node.resident.kind == AT_ATTACH:
        evidence.hold(Link.BORN, f"in place of it: {FOUND_IN_L1}", node.resident)
    else:
        by = f"put into L1 by the prefill of request {node.resident_by}"
        evidence.hold(Link.BORN, by, node.computed, node.resident)
    if pending:
        detail = "its load-back from L2 was not complete before this request used it"
        evidence.miss(Link.RESIDENT_L1, detail, load.queued if load is not None else None, matched)
    elif not covers(request.match.nodes, 0, request.match.device + request.match.host):
        evidence.miss(Link.RESIDENT_L1, "the recorded path is shorter than what was matched", matched)
    elif not node.on_device:
        evidence.miss(Link.RESIDENT_L1, f"the tree holds node {node.node} outside L1", matched)
    elif node.evicted is not None and node.resident is None and load is None:
        evidence.miss(Link.RESIDENT_L1, "the ledger saw it leave L1 before the match", node.evicted, matched)
    else:
        evidence.hold(Link.RESIDENT_L1, "matched in L1, not evicted since it was put there", matched)
    usage.link(evidence)
    link_stayed(evidence, view, request, start, end)
    reason = Reason.READ_OF_UNACKNOWLEDGED_LOAD if pending else Reason.L1_HIT
    verdict = graded(start, end, Tier.L1, reason, evidence.complete())
    if pending and verdict.grade is Grade.CONFIRMED:
        raise AssertionError("a pending load cannot be confirmed")
    return verdict
