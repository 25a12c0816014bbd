"""What the recorded run does not show: refusals, retractions, flushes, storage, several ranks, ids used twice."""

from __future__ import annotations

import msgspec
from journal_tools import described

from kvwitness.patches.schema.events import Refusal, ReleaseState
from kvwitness.tracer.ledger.facts import ChunkFact, EpochFact, HostVictim, Rejection
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.build import build_spans
from kvwitness.tracer.spans.facts import model_of
from kvwitness.tracer.spans.spec import Kind, LinkSpec, SpanSpec

from .made import at, host_eviction, instance, judged, l2, load, match, prefetch, refused, request, wall
from .recorded import CLIENT_SPAN, CLIENT_TRACE, TRACEPARENT, children


def named(spans: list[SpanSpec], name: str) -> list[SpanSpec]:
    return [span for span in spans if span.name == name]


def test_a_refused_load_back_says_why() -> None:
    one = request("R", 10, 30, match=match(11, 0, 64), decision=refused(12, Refusal.TOO_SHORT))
    [span] = named(build_spans(judged(instance(requests=(one,)))), sc.LOAD_BACK)
    assert span.attributes[sc.DECLINED] is True
    assert span.attributes[sc.REFUSAL] == "shorter than the load-back threshold"
    assert (span.attributes[sc.PROMISED], span.attributes[sc.LOADED]) == (64, 0)
    assert span.start_ns == span.end_ns == wall(12)
    assert span.links == ()


def test_a_prompt_in_chunks_has_a_span_for_each() -> None:
    chunks = (
        ChunkFact(at(13), 1, 0, 64, False, at(14), 0),
        ChunkFact(at(15), 2, 64, 100, True, at(16), 1),
    )
    spans = build_spans(judged(instance(requests=(request("R", 10, 30, chunks=chunks),))))
    prefills = named(spans, sc.PREFILL)
    assert [(p.attributes[sc.START], p.attributes[sc.END], p.attributes[sc.LAST_CHUNK]) for p in prefills] == [
        (0, 64, False),
        (64, 100, True),
    ]
    [span] = named(spans, sc.REQUEST)
    [first] = [event for event in span.events if event.name == sc.FIRST_TOKEN]
    assert first.time_ns == wall(16)


def test_a_retraction_stays_within_one_request() -> None:
    first = request("R", 10, 20, ReleaseState.RETRACTED)
    again = request("R", 30, 50, attempt=2)
    spans = build_spans(judged(instance(requests=(first, again))))
    [span] = named(spans, sc.REQUEST)
    assert (span.start_ns, span.end_ns) == (wall(10), wall(50))
    assert [event.name for event in span.events if event.name == sc.RETRACTED] == [sc.RETRACTED]
    assert span.attributes[sc.ATTEMPT] == 2
    assert [queue.attributes[sc.ATTEMPT] for queue in children(spans, span, sc.QUEUE)] == [1, 2]

    [waiting] = named(build_spans(judged(instance(requests=(first,)))), sc.REQUEST)
    assert waiting.open and not waiting.complete


def test_an_aborted_request_is_an_error() -> None:
    aborted = request("R", 10, 12, ReleaseState.ABORTED, admitted=None, chunks=())
    [span] = named(build_spans(judged(instance(requests=(aborted,)))), sc.REQUEST)
    assert span.error == "aborted"
    assert span.attributes[sc.STATE] == "aborted"
    assert span.complete


def test_a_request_that_still_runs_is_open() -> None:
    [span] = named(build_spans(judged(instance(requests=(request("R", 10, None),)))), sc.REQUEST)
    assert span.attributes[sc.OPEN] is True
    assert span.end_ns == wall(14)
    assert not span.complete


def test_a_client_may_use_an_id_again() -> None:
    spans = build_spans(judged(instance(requests=(request("R", 10, 20), request("R", 30, 40)))))
    first, second = named(spans, sc.REQUEST)
    assert first.ref.trace_id != second.ref.trace_id
    assert (second.start_ns, second.end_ns) == (wall(30), wall(40))


def test_a_flush_ends_an_epoch() -> None:
    one = request("R", 10, 20)
    never_done = load(12, "R", 8, None)
    facts = instance(
        requests=(msgspec.structs.replace(one, loads=(12,)),),
        loads=(never_done,),
        prefetches=(prefetch("R", 7, 8),),
        epochs=(EpochFact(1, at(1)), EpochFact(2, at(50))),
    )
    spans = build_spans(judged(facts))
    before, after = named(spans, sc.EPOCH)
    assert (before.start_ns, before.end_ns, before.open) == (wall(1), wall(50), False)
    assert [event.name for event in before.events] == [sc.FLUSH]
    assert after.open and after.ref.trace_id != before.ref.trace_id
    [loading] = named(spans, sc.LOAD_BACK)
    # It can never complete: the span ends with the epoch, and is not waited for.
    assert loading.end_ns == wall(50) and loading.attributes[sc.OPEN] is True and loading.complete


def test_events_before_the_first_reset_have_an_epoch_as_well() -> None:
    spans = build_spans(judged(instance(requests=(request("R", 10, 20, epoch=0),), epochs=())))
    [span] = named(spans, sc.EPOCH)
    assert span.attributes[sc.EPOCH_INDEX] == 0
    assert span.start_ns == wall(0)


def test_storage_is_prefetched_and_read() -> None:
    one = request("R", 10, 40, match=match(20, 0, 64), loads=(21,), admitted=at(22), admitted_prefix=64)
    facts = instance(
        requests=(one,), loads=(load(21, "R", 15, 30),), prefetches=(prefetch("R", 9, 15),), residencies=(l2(15, 35),)
    )
    spans = build_spans(judged(facts))
    [span] = named(spans, sc.REQUEST)
    [fetch] = children(spans, span, sc.PREFETCH)
    assert (fetch.start_ns, fetch.end_ns) == (wall(9), wall(15))
    assert fetch.attributes[sc.PREFETCH_LOADED] == 64
    [loading] = children(spans, span, sc.LOAD_BACK)
    [resident] = named(spans, sc.RESIDENCY_L2)
    assert set(loading.links) == {LinkSpec(resident.ref, sc.READ_FROM), LinkSpec(fetch.ref, sc.WRITTEN_BY)}
    assert resident.links == (LinkSpec(fetch.ref, sc.WRITTEN_BY),)
    assert loading.attributes[sc.TRANSFER_DURATION] == 0.0025
    assert sc.NODE not in resident.attributes


def test_a_copy_that_left_before_the_load_is_not_linked() -> None:
    one = request("R", 10, 40, loads=(21,))
    facts = instance(requests=(one,), loads=(load(21, "R", 15, 30),), residencies=(l2(15, 20),))
    [loading] = named(build_spans(judged(facts)), sc.LOAD_BACK)
    assert loading.links == ()


def test_what_no_request_is_known_for_belongs_to_the_epoch() -> None:
    facts = instance(
        loads=(load(21, None, 15, 30),), prefetches=(prefetch(None, 9, 15),), host_evictions=(host_eviction(None, 40),)
    )
    spans = build_spans(judged(facts))
    [epoch] = named(spans, sc.EPOCH)
    assert [span.name for span in children(spans, epoch)] == [sc.PREFETCH, sc.LOAD_BACK, sc.HOST_EVICTION]


def test_a_host_eviction_names_its_slots_and_its_cause() -> None:
    facts = instance(requests=(request("R", 10, 40),), host_evictions=(host_eviction("R", 20),))
    spans = build_spans(judged(facts))
    [span] = named(spans, sc.HOST_EVICTION)
    assert span.links == (LinkSpec(named(spans, sc.REQUEST)[0].ref, sc.CAUSED_BY),)
    shown = span.attributes[sc.SLOTS]
    assert isinstance(shown, tuple) and len(shown) == 64 and shown[:2] == ("0..1", "2..3")
    assert span.attributes[sc.SLOT_RANGES] == 100


def test_a_host_eviction_leads_to_the_copies_that_it_displaced() -> None:
    copy = msgspec.structs.replace(l2(15, 20), node=7)
    victim = HostVictim(at(20), at(15), 7, "L", 0, 64)
    eviction = msgspec.structs.replace(host_eviction("R", 21), victims=(victim,), begin=at(19), available=32)
    facts = instance(requests=(request("R", 10, 40),), host_evictions=(eviction,), residencies=(copy,))
    spans = build_spans(judged(facts))
    [span], [held] = named(spans, sc.HOST_EVICTION), named(spans, sc.RESIDENCY_L2)
    assert LinkSpec(held.ref, sc.DISPLACED) in span.links
    shown = [span.attributes[name] for name in (sc.EVICTION_RIDS, sc.EVICTION_FREE, sc.EVICTION_VICTIMS)]
    assert shown == [("R",), 32, 1]


def test_a_rejected_backup_names_who_asked_for_it_and_the_room() -> None:
    rejected = Rejection(at(20), 1, "R", "R", 7, 0, 64, 64, 16)
    facts = instance(requests=(request("R", 10, 40),), rejections=(rejected,))
    spans = build_spans(judged(facts))
    [span] = named(spans, sc.BACKUP_REJECTED)
    assert span.links == (LinkSpec(named(spans, sc.REQUEST)[0].ref, sc.CAUSED_BY),)
    assert (span.attributes[sc.EVICTION_FREE], span.attributes[sc.COUNT]) == (16, 64)


def test_ranks_share_a_trace() -> None:
    ranks = [
        instance(f"scheduler-{rank}-1", ranks={"tp_rank": rank, "tp_size": 2}, requests=(request("R", 10, 20),))
        for rank in (0, 1)
    ]
    spans = build_spans(judged(*ranks))
    leader, other = named(spans, sc.REQUEST)
    assert (leader.kind, leader.parent, other.kind, other.parent) == (
        Kind.SERVER,
        None,
        Kind.INTERNAL,
        leader.ref.span_id,
    )
    assert leader.ref.trace_id == other.ref.trace_id and leader.unit == other.unit
    assert sc.GRADE in leader.attributes and sc.GRADE not in other.attributes
    assert [span.resource.attributes[sc.TP_RANK] for span in (leader, other)] == [0, 1]
    assert leader.complete and other.complete
    # Until the other rank's journal says its part, the request is not settled.
    [alone] = named(build_spans(judged(ranks[0])), sc.REQUEST)
    assert not alone.complete and alone.ref == leader.ref


def test_ranks_continue_the_clients_trace_together() -> None:
    ranks = [
        instance(
            f"scheduler-{rank}-1",
            ranks={"tp_rank": rank, "tp_size": 2},
            requests=(request("R", 10, 20, traceparent=TRACEPARENT),),
        )
        for rank in (0, 1)
    ]
    leader, other = named(build_spans(judged(*ranks)), sc.REQUEST)
    assert (leader.ref.trace_id, leader.parent, leader.parent_is_remote) == (CLIENT_TRACE, CLIENT_SPAN, True)
    assert (other.ref.trace_id, other.parent, other.parent_is_remote) == (CLIENT_TRACE, leader.ref.span_id, False)
    assert leader.unit == other.unit


def test_a_name_of_a_model_is_kept_and_a_path_is_not() -> None:
    def told(**arguments: str | None) -> str | None:
        return model_of(instance(facts=described({"process": {"arguments": arguments}})))

    assert told(model_path="Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert told(model_path="/data/models/Qwen3-8B/") == "Qwen3-8B"
    assert told(model_path="/data/x", served_model_name="chat") == "chat"
    assert told() is None


def test_nothing_recorded_is_no_span() -> None:
    assert build_spans(judged()) == []


def test_the_host_is_told_where_it_is_known() -> None:
    facts = instance(requests=(request("R", 10, 20),))
    spans = build_spans(judged(facts), hosts={facts.instance: "node-7"})
    assert {span.resource.attributes[sc.HOST_NAME] for span in spans} == {"node-7"}
