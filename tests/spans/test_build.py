"""Spans of a recorded run: the tree, its links, its ids, and what they never say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest
from journal_tools import ABC

from kvwitness.collectors.journal import Journal, read_journal
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.build import build_spans
from kvwitness.tracer.spans.spec import LinkSpec, Ref, SpanSpec

from .recorded import (
    CLIENT_SPAN,
    CLIENT_TRACE,
    EXPECTED,
    RIDS,
    TRACEPARENT,
    as_text,
    children,
    record_http,
    recorded_run,
    request_span,
)

C = RIDS["C"]


@pytest.fixture(scope="module")
def spans() -> list[SpanSpec]:
    return build_spans(judge(recorded_run()))


def test_the_tree_is_as_expected(spans: list[SpanSpec]) -> None:
    text = as_text(spans)
    if os.environ.get("KVWITNESS_UPDATE"):
        EXPECTED.write_text(text)
    assert text == EXPECTED.read_text()


def test_the_recorded_run_names_no_machine() -> None:
    assert not re.search(rb"/(root|home|tmp|work|mnt|usr|models)\b", ABC.read_bytes())


def test_ids_are_unique_and_parents_exist(spans: list[SpanSpec]) -> None:
    refs = {span.ref for span in spans}
    assert len({ref.span_id for ref in refs}) == len(spans)
    for span in spans:
        assert re.fullmatch("[0-9a-f]{32}", span.ref.trace_id) and re.fullmatch("[0-9a-f]{16}", span.ref.span_id)
        assert span.parent is None or Ref(span.ref.trace_id, span.parent) in refs
        assert span.start_ns <= span.end_ns


def test_links_lead_to_spans_of_the_run(spans: list[SpanSpec]) -> None:
    refs = {span.ref for span in spans}
    links = [link for span in spans for link in span.links]
    assert {link.to for link in links} <= refs
    # Nothing left L2 in this run.
    assert {link.relation for link in links} == set(sc.RELATIONS) - {sc.DISPLACED}


def test_what_made_the_load_back_possible_and_necessary(spans: list[SpanSpec]) -> None:
    by_ref = {span.ref: span for span in spans}
    [load] = children(spans, request_span(spans, C), sc.LOAD_BACK)
    linked = {link.relation: by_ref[link.to] for link in load.links}
    assert linked.keys() == {sc.READ_FROM, sc.WRITTEN_BY, sc.MADE_NECESSARY_BY}
    for span, name in zip(linked.values(), (sc.RESIDENCY_L2, sc.BACKUP, sc.VICTIM), strict=True):
        assert span.name == name
        assert (span.attributes[sc.START], span.attributes[sc.END]) == (0, 1488)
        assert span.attributes[sc.OWNER] == RIDS["A"]
    assert linked[sc.READ_FROM].attributes[sc.SLOTS] == load.attributes[sc.SLOTS] == ("16..1504",)
    assert linked[sc.WRITTEN_BY].end_ns < linked[sc.MADE_NECESSARY_BY].start_ns < load.start_ns
    eviction = by_ref[Ref(linked[sc.MADE_NECESSARY_BY].ref.trace_id, linked[sc.MADE_NECESSARY_BY].parent or "")]
    assert eviction.links == (LinkSpec(request_span(spans, RIDS["fill 2"]).ref, sc.CAUSED_BY),)


def test_the_same_run_has_the_same_ids_for_ever(spans: list[SpanSpec]) -> None:
    assert build_spans(judge(recorded_run())) == spans
    assert request_span(spans, C).ref == Ref("1654bb45edc6d5cba40d5eb7b518f538", "7dc1ecc25f1ee6b7")


def test_what_is_complete_does_not_change_any_more(spans: list[SpanSpec]) -> None:
    """What `collect` sends early is what `export` sends later: true after every single event."""
    [journal] = recorded_run()
    final = {span.ref: span for span in spans}
    seen: set[Ref] = set()
    for count in range(1, len(journal.events)):
        unfinished = msgspec.structs.replace(journal, events=journal.events[:count], closed=False)
        now = build_spans(judge([unfinished]))
        broken = {span.unit for span in now if not span.complete}
        for span in now:
            if span.unit not in broken:
                assert final[span.ref] == span
                seen.add(span.ref)
    assert {span.name for span in spans if span.ref not in seen} == {sc.EPOCH, sc.RESIDENCY_L1, sc.RESIDENCY_L2}


def test_nothing_is_left_open_silently(spans: list[SpanSpec]) -> None:
    still_there = [span for span in spans if span.attributes.get(sc.OPEN)]
    assert {span.name for span in still_there} == {sc.RESIDENCY_L1, sc.RESIDENCY_L2}
    assert all(span.end_ns == max(s.end_ns for s in spans) for span in still_there)


def test_names_and_types_are_documented(spans: list[SpanSpec]) -> None:
    types = {"string": str, "int": int, "boolean": bool, "double": float, "string[]": tuple}
    for span in spans:
        assert span.name in sc.SPANS
        assert {event.name for event in span.events} <= set(sc.EVENTS)
        for attributes in (span.attributes, *(event.attributes for event in span.events)):
            for name, value in attributes.items():
                assert type(value) is types[sc.ATTRIBUTES[name].type], name
        for name, value in span.resource.attributes.items():
            assert type(value) is types[sc.RESOURCE_ATTRIBUTES[name].type], name


def test_no_name_is_also_a_namespace() -> None:
    names = [*sc.ATTRIBUTES, *sc.RESOURCE_ATTRIBUTES]
    assert not [(a, b) for a in names for b in names if b.startswith(f"{a}.")]
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+", name) for name in names)


# --- the client's trace --------------------------------------------------------------------------------


def with_http(directory: Path, traceparent: str) -> list[Journal]:
    return [read_journal(record_http(directory, C, traceparent)), *recorded_run()]


def test_a_clients_trace_is_continued(tmp_path: Path, spans: list[SpanSpec]) -> None:
    continued = build_spans(judge(with_http(tmp_path, TRACEPARENT)))
    span = request_span(continued, C)
    assert span.ref == Ref(CLIENT_TRACE, request_span(spans, C).ref.span_id)
    assert span.parent == CLIENT_SPAN and span.parent_is_remote
    assert span.attributes[sc.CONTINUED] is True and span.attributes[sc.SAMPLED] is True
    assert {part.ref.trace_id for part in children(continued, span)} == {CLIENT_TRACE}
    # Links from elsewhere follow.
    refs = {one.ref for one in continued}
    assert {link.to for one in continued for link in one.links} <= refs
    assert LinkSpec(span.ref, sc.CAUSED_BY) in [link for one in continued for link in one.links]
    # Other requests are as before.
    assert request_span(continued, RIDS["B"]) == request_span(spans, RIDS["B"])


def test_a_client_that_does_not_sample_is_noted(tmp_path: Path) -> None:
    span = request_span(build_spans(judge(with_http(tmp_path, TRACEPARENT[:-1] + "0"))), C)
    assert span.ref.trace_id == CLIENT_TRACE
    assert span.attributes[sc.SAMPLED] is False


def record_of(traceparent: str | None) -> RequestRecord:
    return RequestRecord(
        rid=C, series="C", order=1, prompt_tokens=1503, prompt_sha256="", sent_ns=0, ttft_s=None, total_s=0.1,
        status=200, error=None, traceparent=traceparent,
    )  # fmt: skip


def test_the_clients_own_record_serves_as_well(tmp_path: Path) -> None:
    span = request_span(build_spans(judge(recorded_run()), [record_of(TRACEPARENT)]), C)
    assert (span.ref.trace_id, span.parent) == (CLIENT_TRACE, CLIENT_SPAN)
    # What the server saw counts for more.
    other = TRACEPARENT.replace(CLIENT_TRACE, "1" * 32)
    span = request_span(build_spans(judge(with_http(tmp_path, TRACEPARENT)), [record_of(other)]), C)
    assert span.ref.trace_id == CLIENT_TRACE


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        "nonsense",
        TRACEPARENT.upper(),
        f"00-{'0' * 32}-{CLIENT_SPAN}-01",
        f"00-{CLIENT_TRACE}-{'0' * 16}-01",
        f"ff-{CLIENT_TRACE}-{CLIENT_SPAN}-01",
        f"{TRACEPARENT}-more",
    ],
)
def test_what_is_no_trace_context_starts_a_new_trace(traceparent: str | None, spans: list[SpanSpec]) -> None:
    assert build_spans(judge(recorded_run()), [record_of(traceparent)]) == spans


def test_a_later_version_may_say_more(spans: list[SpanSpec]) -> None:
    later = f"01{TRACEPARENT[2:]}-more"
    assert request_span(build_spans(judge(recorded_run()), [record_of(later)]), C).ref.trace_id == CLIENT_TRACE
