"""The recorded run in a real Jaeger: what a reader of the traces finds there."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
from journal_tools import ABC

from kvwitness.tracer.bundle import BundleInputs, read_bundle_spans, write_bundle
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.export import bundle_spans, export_bundle
from kvwitness.tracer.spans.jaeger import JaegerClient, JaegerProcess, JaegerSpan, tags_of
from kvwitness.tracer.spans.otlp_json import span_lines

from .recorded import CLIENT_SPAN, RIDS, record_http, request_span
from .waiting import wait_for

C = RIDS["C"]


def named(spans: list[JaegerSpan], name: str) -> JaegerSpan:
    [found] = [span for span in spans if span["operationName"] == name]
    return found


def span_at(client: JaegerClient, trace_id: str, span_id: str) -> JaegerSpan:
    def look() -> list[JaegerSpan]:
        trace = client.trace(trace_id)
        return [span for span in trace["spans"] if span["spanID"] == span_id] if trace else []

    [found] = wait_for(look, 20, what=f"span {span_id}")
    return found


def relations(client: JaegerClient, trace_id: str, span_id: str) -> dict[str, tuple[str, str]]:
    """Relation -> the span that a span's link leads to; only Jaeger's OTLP form has a link's attributes."""
    trace = client.otlp_trace(trace_id)
    assert trace is not None
    spans = [s for r in trace["resourceSpans"] for scope in r["scopeSpans"] for s in scope["spans"]]
    [span] = [span for span in spans if span["spanId"] == span_id]
    return {relation_of(link): (link["traceId"], link["spanId"]) for link in span["links"]}


def relation_of(link: dict[str, Any]) -> str:
    [attribute] = link["attributes"]
    assert attribute["key"] == sc.RELATION
    return str(attribute["value"]["stringValue"])


@pytest.mark.jaeger
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_story_of_c_can_be_read(jaeger: JaegerProcess, tmp_path: Path, protocol: str) -> None:
    client_trace = uuid.uuid4().hex
    # A name of its own: the other protocol's spans are in the same Jaeger.
    journal = tmp_path / f"scheduler-{uuid.uuid4().hex}.kvwj"
    journal.write_bytes(ABC.read_bytes())
    http = record_http(tmp_path / "http", C, f"00-{client_trace}-{CLIENT_SPAN}-01")
    bundle = write_bundle(tmp_path / "bundle", BundleInputs(journals=(journal, http))).path
    url = jaeger.otlp_http if protocol == "http" else jaeger.otlp_grpc
    spans = bundle_spans(bundle)
    assert export_bundle(bundle, url, protocol=protocol) == len(spans)

    with jaeger.client() as client:
        of_c = [span for span in spans if span.ref.trace_id == client_trace]
        trace = wait_for(
            lambda: (t := client.trace(client_trace)) and len(t["spans"]) == len(of_c) and t, 20, what="C's trace"
        )
        assert trace
        assert {p["serviceName"] for p in trace["processes"].values()} == {"sglang"}

        request = named(trace["spans"], sc.REQUEST)
        tags = tags_of(request)
        assert tags[sc.RID] == C
        assert (tags[sc.SENTENCE], tags[sc.GRADE], tags[sc.TOKENS_L2]) == ("L2 read confirmed", "confirmed", 1488)
        assert (tags[sc.GEN_AI_INPUT], tags[sc.GEN_AI_CACHE_READ]) == (1503, 1488)
        # The client's span is not here: it is the client's to send.
        assert ("CHILD_OF", client_trace, CLIENT_SPAN) in {
            (ref["refType"], ref["traceID"], ref["spanID"]) for ref in request["references"]
        }

        load = named(trace["spans"], sc.LOAD_BACK)
        tags = tags_of(load)
        assert (tags[sc.COUNT], tags[sc.TRANSFER_TOKENS], tags[sc.TRANSFER_BYTES]) == (1488, 1488, 1488 * 1024)
        assert load["duration"] == 125_964
        assert ("CHILD_OF", client_trace, request["spanID"]) in {
            (ref["refType"], ref["traceID"], ref["spanID"]) for ref in load["references"]
        }

        links = relations(client, client_trace, load["spanID"])
        found = {relation: span_at(client, *ref) for relation, ref in links.items()}
        assert {relation: span["operationName"] for relation, span in found.items()} == {
            sc.READ_FROM: sc.RESIDENCY_L2,
            sc.WRITTEN_BY: sc.BACKUP,
            sc.MADE_NECESSARY_BY: sc.VICTIM,
        }
        assert all(tags_of(span)[sc.OWNER] == RIDS["A"] for span in found.values())

        # The eviction of which that was a part leads to the request that needed room.
        victim = found[sc.MADE_NECESSARY_BY]
        [parent] = [ref for ref in victim["references"] if ref["refType"] == "CHILD_OF"]
        caused_by = relations(client, parent["traceID"], parent["spanID"])[sc.CAUSED_BY]
        assert caused_by == request_span(spans, RIDS["fill 2"]).ref

        # And by attribute, as a person would look for it.
        [confirmed] = [
            t["traceID"]
            for t in client.traces("sglang", operation=sc.REQUEST, tags={sc.TIER: "L2", sc.RID: C})
            if t["traceID"] == client_trace
        ]
        assert confirmed == client_trace


@pytest.mark.jaeger
def test_a_bundles_file_is_understood(jaeger: JaegerProcess, tmp_path: Path) -> None:
    journal = tmp_path / f"scheduler-{uuid.uuid4().hex}.kvwj"
    journal.write_bytes(ABC.read_bytes())
    bundle = write_bundle(tmp_path / "bundle", BundleInputs(journals=(journal,)), spans=span_lines).path
    raw = read_bundle_spans(bundle)
    assert raw is not None
    with httpx.Client(trust_env=False, headers={"Content-Type": "application/json"}) as http:
        for line in raw.splitlines():
            answer = http.post(f"{jaeger.otlp_http}/v1/traces", content=line)
            assert answer.status_code == 200, answer.text
            assert answer.json() == {"partialSuccess": {}}
        # What Jaeger's page asks of its server when a person drops the file onto it: all lines as one request.
        merged = [resource for line in raw.splitlines() for resource in json.loads(line)["resourceSpans"]]
        answer = http.post(f"{jaeger.query_url}/api/transform", json={"resourceSpans": merged})
        assert answer.status_code == 200, answer.text
        shown = [span["spanID"] for trace in answer.json()["data"] for span in trace["spans"]]
    spans = bundle_spans(bundle)
    assert sorted(shown) == sorted(span.ref.span_id for span in spans)
    c = request_span(spans, C)
    with jaeger.client() as client:
        trace = wait_for(lambda: client.trace(c.ref.trace_id), 20, what="C's trace")
        assert named(trace["spans"], sc.REQUEST)["spanID"] == c.ref.span_id
