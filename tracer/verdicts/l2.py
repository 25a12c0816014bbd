"""Claim: these tokens were read from L2 (or, where the slots were filled from storage for it, from L3)."""

from __future__ import annotations

from collections.abc import Iterable

from kvwitness.patches.schema.events import Eviction
from kvwitness.tracer.ledger.facts import (
    Backup,
    Found,
    InstanceFacts,
    Load,
    LoadSegment,
    MatchedNode,
    Moment,
    Prefetch,
    RequestFacts,
    Residency,
)
from kvwitness.tracer.model import Link, RangeVerdict, Reason, Tier
from kvwitness.tracer.verdicts.content import compare_content
from kvwitness.tracer.verdicts.grading import graded
from kvwitness.tracer.verdicts.l3 import link_prefetched, moments_of
from kvwitness.tracer.verdicts.links import AT_ATTACH, FOUND_IN_L1, FOUND_IN_L2, Evidence
from kvwitness.tracer.verdicts.stay import link_stayed
from kvwitness.tracer.verdicts.usage import Usage
from kvwitness.tracer.verdicts.view import InstanceView


def judge_loads(view: InstanceView, request: RequestFacts, usage: Usage, start: int, end: int) -> list[RangeVerdict]:
    """Verdicts for ``[start, end)``, the part that this request's load-back brought into L1."""
    found: list[RangeVerdict] = []
    covered = start
    for load in view.loads_of(request):
        for segment in load.segments:
            low, high = max(segment.start, covered), min(segment.end, end)
            if low >= high:
                continue
            if low > covered:
                found.append(_unexplained(view, request, usage, covered, low))
            found.append(_judge_segment(view, request, usage, load, segment, low, high))
            covered = high
    if covered < end:
        found.append(_unexplained(view, request, usage, covered, end))
    return found


def _unexplained(view: InstanceView, request: RequestFacts, usage: Usage, start: int, end: int) -> RangeVerdict:
    evidence = Evidence(view, request)
    evidence.miss(Link.READ, "no load-back of these tokens was recorded for this request")
    usage.link(evidence)
    return graded(start, end, Tier.L2, Reason.INCONCLUSIVE, evidence.complete())


def _judge_segment(
    view: InstanceView,
    request: RequestFacts,
    usage: Usage,
    load: Load,
    segment: LoadSegment,
    start: int,
    end: int,
) -> RangeVerdict:
    evidence = Evidence(view, request)
    tier, reason = Tier.L2, Reason.L2_READ if load.ended_short is None else Reason.L2_READ_PARTIAL
    backup = view.backups.get(segment.origin_id) if segment.origin == "backup" else None
    prefetch = view.prefetches.get(segment.origin_id) if segment.origin == "prefetch" else None
    found = view.found.get(segment.origin_id) if segment.origin == "snapshot" else None
    if found is not None:
        _found(evidence, segment, found)
        _left_l1(evidence, view, request, found.moment, start, end)
    elif prefetch is not None and prefetch.rid == request.rid:
        tier, reason = Tier.L3, Reason.L3_READ
        link_prefetched(evidence, request, prefetch, segment)
    else:
        if prefetch is not None:
            _from_storage(evidence, segment, prefetch)
        else:
            _born(evidence, backup)
            _backed_up(evidence, segment, backup, request.match.moment if request.match else load.queued)
        usable = backup.acked if backup is not None else prefetch.done if prefetch is not None else None
        _left_l1(evidence, view, request, usable, start, end)
    _resident_l2(evidence, request, load, segment, start, end)
    _read(evidence, view, request, load)
    usage.link(evidence)
    link_stayed(evidence, view, request, start, end)
    compared = compare_content(evidence, view, request, load, start, end)
    compared.link(evidence)
    reason = Reason.INVALID_MODE if view.instance.facts.transit_mode is not None else reason
    return compared.weigh(graded(start, end, tier, reason, evidence.complete()))


def _born(evidence: Evidence, backup: Backup | None) -> None:
    if backup is None:
        evidence.miss(Link.BORN, "nothing recorded says what the slots that were read hold")
        return
    if backup.owner is None or backup.born is None:
        detail = (
            "no recorded prefill put these tokens into L1 before they were backed up, and kept them there until then"
        )
        evidence.miss(Link.BORN, detail, backup.queued, backup.acked)
        return
    evidence.prefix_told(backup.owner_since, *(birth.owner_since for birth in backup.born))
    first = min(backup.born, key=lambda birth: birth.since.seq)
    if first.since.kind == AT_ATTACH:
        evidence.hold(Link.BORN, f"in place of it: {FOUND_IN_L1}", first.since)
        return
    evidence.hold(Link.BORN, f"put into L1 by the prefill of request {first.owner}", first.computed, first.since)


def _from_storage(evidence: Evidence, segment: LoadSegment, prefetch: Prefetch) -> None:
    """A prefetch for another request brought it into L2: that stands in for its birth and its backup."""
    evidence.prefix_told(prefetch.queued)
    detail = f"read from storage into L2 for request {prefetch.rid}"
    if prefetch.unfounded:
        evidence.miss(Link.BORN, f"{detail}, and {prefetch.unfounded}", prefetch.asked, prefetch.done)
    elif _stored(evidence, segment, prefetch.done, "the prefetch from storage"):
        evidence.hold(Link.BORN, detail, *moments_of(prefetch), also=(Link.PREFETCHED,))
        evidence.hold(Link.BACKED_UP, f"in place of it: {detail}", prefetch.done)


def _found(evidence: Evidence, segment: LoadSegment, found: Found) -> None:
    """A usable copy was there when kvwitness was attached: that stands in for its birth and its backup."""
    evidence.prefix_told(found.since)
    if _stored(evidence, segment, found.moment, "the node found in L2"):
        slots = sum(run.length for run in found.slots)
        evidence.hold(Link.BORN, f"in place of it: {FOUND_IN_L2}", found.moment)
        detail = f"in place of it: node {found.node} had an acknowledged copy in {slots} host slots, {FOUND_IN_L2}"
        evidence.hold(Link.BACKED_UP, detail, found.moment)


def covers(residencies: Iterable[Residency | MatchedNode | LoadSegment], start: int, end: int) -> bool:
    """Whether the residencies (or nodes) together cover ``[start, end)``."""
    position = start
    for residency in sorted(residencies, key=lambda r: r.start):
        if residency.start > position:
            break
        position = max(position, residency.end)
    return position >= end


def _stored(evidence: Evidence, segment: LoadSegment, usable: Moment, what: str) -> bool:
    """The slots hold the same positions of the same prefix; adds the missing link if not."""
    if not segment.aligned:
        evidence.miss(Link.BACKED_UP, f"{what} wrote the slots for other positions", usable)
        return False
    if segment.same_prefix is not True:
        why = "another prefix" if segment.same_prefix is False else "a prefix whose digests are not recorded"
        evidence.miss(Link.BACKED_UP, f"{what} wrote the slots for {why}", usable)
        return False
    return True


def _backed_up(evidence: Evidence, segment: LoadSegment, backup: Backup | None, by: Moment) -> None:
    """A copy to the slots was acknowledged before ``by``, for the same positions of an equal prefix."""
    if backup is None:
        evidence.miss(Link.BACKED_UP, "no acknowledged backup wrote the slots that were read")
        return
    if backup.acked is None or backup.started is None:
        evidence.miss(Link.BACKED_UP, "the backup's copy was never acknowledged", backup.queued, backup.started)
        return
    if backup.acked.seq > by.seq:
        evidence.miss(Link.BACKED_UP, "the backup was acknowledged only after the match", backup.queued, backup.acked)
        return
    if not _stored(evidence, segment, backup.acked, "the backup"):
        return
    slots = sum(run.length for run in backup.slots)
    detail = f"backup of {backup.tokens} tokens into {slots} host slots, acknowledged"
    if segment.digest_to < segment.end:
        detail += f"; prefix equality by digest to token {segment.digest_to}, the rest by the radix match"
    evidence.hold(Link.BACKED_UP, detail, backup.queued, backup.started, backup.acked)


def _left_l1(
    evidence: Evidence,
    view: InstanceView,
    request: RequestFacts,
    usable: Moment | None,
    start: int,
    end: int,
) -> None:
    assert request.match is not None
    matched = request.match.moment
    nodes = [node for node in request.match.nodes if node.start < end and node.end > start]
    if not nodes:
        evidence.miss(Link.LEFT_L1, "the matched path was not recorded", matched)
        return
    if not covers(nodes, start, end):
        evidence.miss(Link.LEFT_L1, "the matched path does not cover these tokens", matched)
        return
    for node in nodes:
        wrong = _still_in_l1(node, usable)
        if wrong is not None:
            evidence.miss(Link.LEFT_L1, wrong, node.evicted, matched)
            return
    last = max((n.evicted for n in nodes if n.evicted is not None), key=lambda m: m.seq)
    call = next((view.evictions[n.evicted_call] for n in nodes if n.evicted_call in view.evictions), None)
    who = " for request " + ", ".join(call.rids) if call is not None and call.rids else ""
    how = Eviction.NAMES.get(nodes[-1].evicted_how or 0, "evicted")
    detail = f"{how} from L1{who}, and not in L1 at the match"
    if all(n.evicted is not None and n.evicted.kind == AT_ATTACH for n in nodes):
        detail = "in place of it: not in L1 when kvwitness was attached, and not in L1 at the match"
    evidence.hold(Link.LEFT_L1, detail, last, matched)


def _still_in_l1(node: MatchedNode, usable: Moment | None) -> str | None:
    """Why it is not shown that a node had left L1 for its copy in L2; None when it is."""
    if node.on_device:
        return f"node {node.node} was in L1 at the match"
    if not node.known or node.same_prefix is not True:
        return f"the ledger cannot tell whose prefix node {node.node} holds"
    if node.load is not None:
        return f"a load-back of node {node.node} had been queued before the match"
    if node.evicted is None or node.resident is not None:
        return f"no eviction of node {node.node} from L1 was recorded"
    if node.evicted_how != Eviction.DEMOTED:
        return f"node {node.node} was {Eviction.NAMES.get(node.evicted_how or 0, 'evicted')}, not demoted to L2"
    if usable is None or node.evicted.seq < usable.seq:
        return f"node {node.node} left L1 before its copy in L2 was usable"
    return None


def _resident_l2(
    evidence: Evidence, request: RequestFacts, load: Load, segment: LoadSegment, start: int, end: int
) -> None:
    assert request.match is not None
    match = request.match
    promised = (match.device, match.device + match.host)
    above = next((node for node in match.nodes if node.on_device and node.start < end and start < node.end), None)
    if segment.origin == "unknown":
        evidence.miss(Link.RESIDENT_L2, "by the ledger these host slots hold nothing", match.moment, load.queued)
    elif not segment.usable:
        detail = "the copy in these host slots was not acknowledged when they were read"
        evidence.miss(Link.RESIDENT_L2, detail, match.moment, load.queued)
    elif start < promised[0] or end > promised[1]:
        evidence.miss(Link.RESIDENT_L2, f"the match promised tokens {promised[0]} to {promised[1]} of L2", match.moment)
    elif not covers(match.nodes, 0, promised[1]):
        evidence.miss(Link.RESIDENT_L2, "the recorded path is shorter than what was matched", match.moment)
    elif above is not None:
        evidence.miss(Link.RESIDENT_L2, f"node {above.node} was in L1 at the match", match.moment)
    elif any(node.doubt and node.start < end and start < node.end for node in match.nodes):
        evidence.miss(Link.RESIDENT_L2, "a matched node's number was seen for something else, too", match.moment)
    elif load.freed_while_loading:
        evidence.miss(Link.RESIDENT_L2, "host slots were given back while they were being read", load.queued, load.done)
    else:
        evidence.hold(
            Link.RESIDENT_L2,
            f"matched in L2 ({match.host} tokens); its slots were not freed, reused or cleared before the read",
            match.moment,
            load.queued,
        )


def _read(evidence: Evidence, view: InstanceView, request: RequestFacts, load: Load) -> None:
    decision = request.decision
    loads = view.loads_of(request)
    wrong = _not_copied(view.instance, load) or _not_waited(view.instance, request, load)
    if wrong is not None:
        evidence.miss(Link.READ, wrong, load.queued, load.started, load.done, load.waited)
    elif any(other is not load and other.start < load.end and load.start < other.end for other in loads):
        evidence.miss(Link.READ, "two load-backs of the same tokens were queued", *(other.queued for other in loads))
    elif load.started is not None and request.chunks and load.started.seq > request.chunks[0].moment.seq:
        detail = "the copy from L2 was launched only after the first pass that uses it"
        evidence.miss(Link.READ, detail, request.chunks[0].moment, load.started)
    elif request.admitted is None or load.queued.seq > request.admitted.seq:
        evidence.miss(Link.READ, "the load-back was queued after the admission", load.queued)
    elif decision is None or decision.loaded != sum(other.tokens for other in loads):
        evidence.miss(Link.READ, "the load-back's result does not match the copy", load.queued, load.done)
    else:
        detail = f"{load.tokens} tokens copied from L2 to L1 ({load.transfer_bytes} bytes in all"
        detail += f", {load.duration_ns / 1e6:.2f} ms on the device)" if load.duration_ns is not None else ")"
        if load.transfer_tokens != load.tokens:
            detail += f"; one transfer of {load.transfer_tokens} tokens for several requests"
        if load.waited is not None:
            detail += f"; the forward pass waited for it in each of {load.waited_layers} layers"
        evidence.hold(Link.READ, detail, load.queued, decision.moment, load.started, load.done, load.waited)


def _not_copied(instance: InstanceFacts, load: Load) -> str | None:
    """Why it is not shown that a load-back was carried out; None when it is."""
    if load.started is None:
        return "the copy from L2 was queued and never launched"
    if load.ended_short is not None:
        return f"the copy from L2 ended with {load.ended_short} of {load.transfer_tokens} tokens"
    if load.done is None:
        return "the completion of the copy from L2 was never seen"
    if not _bytes_fit(instance, load):
        return f"the transfer moved {load.transfer_bytes} bytes for {load.transfer_tokens} tokens"
    return None


def _not_waited(instance: InstanceFacts, request: RequestFacts, load: Load) -> str | None:
    """Why it is not shown that the forward pass read what the load-back brought; None when it is.

    SGLang 0.5.2 and newer order the two on the device. Older ones count layers in a thread, and a pass can go
    on to read a layer before it was copied.
    """
    if not instance.facts.instance.copy_threads:
        return None
    if load.read_early:
        return "the forward pass went on to read a layer before its copy had ended: SGLang did not make it wait"
    layers = instance.facts.instance.layers
    if load.waited is None or layers is None or load.waited_layers != layers:
        return f"the forward pass was seen to wait for the copy in {load.waited_layers} of {layers} layers"
    passes = request.chunks[:1]
    if not any(p.done is not None and p.moment.seq < load.waited.seq < p.done.seq for p in passes):
        return "the forward pass that was seen to wait for the copy is not this request's"
    return None


def link_loaded(evidence: Evidence, view: InstanceView, load: Load, start: int, end: int) -> None:
    """Link "born" of what an earlier load-back put into L1: it holds what the slots held that were read.

    Whose prefix that is rests on the same events as the claim of the request that it was loaded for.
    """
    before = Evidence(view)
    segments = [segment for segment in load.segments if segment.start < end and start < segment.end]
    for segment in segments:
        backup = view.backups.get(segment.origin_id) if segment.origin == "backup" else None
        prefetch = view.prefetches.get(segment.origin_id) if segment.origin == "prefetch" else None
        found = view.found.get(segment.origin_id) if segment.origin == "snapshot" else None
        if found is not None:
            _found(before, segment, found)
        elif prefetch is not None:
            _from_storage(before, segment, prefetch)
        else:
            _born(before, backup)
            _backed_up(before, segment, backup, load.queued)
    evidence.prefix_told(*before.told)
    wrong = _not_copied(view.instance, load)
    differing = next((c for c in load.checks if c.differing and c.start < end and start < c.end), None)
    if differing is not None:
        wrong = f"the page of tokens {differing.start} to {differing.end} came back with other bytes"
    if load.freed_while_loading:
        wrong = "its host slots were given back while they were being read"
    if not covers(segments, start, end):
        wrong = "nothing recorded says what the slots hold that it read"
    moments = (*before.moments, load.queued, load.started, load.done)
    missing = before.missing
    if wrong is None and missing is not None:
        wrong = f"{missing.link.value}: {missing.detail}"
    if wrong is None:
        evidence.hold(Link.BORN, f"loaded back from L2 for request {load.rid}", *moments, also=(Link.READ,))
    else:
        evidence.miss(Link.BORN, f"loaded back from L2 for request {load.rid}, and {wrong}", *moments)


def _bytes_fit(instance: InstanceFacts, load: Load) -> bool:
    """Bytes = tokens x bytes per token (all layers). With further pools in the transfer there are more bytes."""
    per_token = instance.facts.instance.bytes_per_token
    if per_token is None or load.transfer_tokens is None or load.transfer_bytes is None:
        return False
    expected = load.transfer_tokens * per_token
    alone = len(instance.facts.instance.pools) <= 1
    return load.transfer_bytes == expected if alone else load.transfer_bytes >= expected
