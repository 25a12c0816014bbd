"""Spans as OTLP/JSON lines: the ``spans.otlp.jsonl`` of a bundle, which Jaeger's page opens as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec

from kvwitness.tracer.bundle.version import kvwitness_version
from kvwitness.tracer.judgement import Judgement
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.build import build_spans
from kvwitness.tracer.spans.spec import EventSpec, LinkSpec, SpanSpec, Value

_SPANS_PER_LINE: Final = 512
_HAS_IS_REMOTE: Final = 0x100
_IS_REMOTE: Final = 0x200
_STATUS_ERROR: Final = 2


def span_lines(judgement: Judgement, records: Sequence[RequestRecord]) -> Iterator[str]:
    """What :func:`kvwitness.tracer.bundle.write_bundle` takes as ``spans``."""
    return otlp_lines(build_spans(judgement, records))


def otlp_lines(spans: Iterable[SpanSpec]) -> Iterator[str]:
    """One ``ExportTraceServiceRequest`` a line, without line ends: one trace of one process, or a part of it."""
    scope = {"name": sc.SCOPE, "version": kvwitness_version()}
    for _, group in groupby(spans, key=lambda span: (span.resource.instance, span.ref.trace_id)):
        trace = list(group)
        for start in range(0, len(trace), _SPANS_PER_LINE):
            yield msgspec.json.encode(_request(scope, trace[start : start + _SPANS_PER_LINE])).decode()


def _request(scope: Mapping[str, Any], spans: Sequence[SpanSpec]) -> dict[str, Any]:
    of_scope = {"scope": scope, "spans": [_span(span) for span in spans], "schemaUrl": sc.SCHEMA_URL}
    resource = {"attributes": _attributes(spans[0].resource.attributes)}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [of_scope], "schemaUrl": sc.SCHEMA_URL}]}


def _span(span: SpanSpec) -> dict[str, Any]:
    # Ids are hexadecimal and 64-bit numbers are text: that is OTLP/JSON's own rule.
    encoded: dict[str, Any] = {"traceId": span.ref.trace_id, "spanId": span.ref.span_id}
    if span.parent is not None:
        encoded["parentSpanId"] = span.parent
    encoded |= {
        "flags": _HAS_IS_REMOTE | (_IS_REMOTE if span.parent_is_remote else 0),
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.events:
        encoded["events"] = [_event(event) for event in span.events]
    if span.links:
        encoded["links"] = [_link(link) for link in span.links]
    encoded["status"] = {"message": span.error, "code": _STATUS_ERROR} if span.error is not None else {}
    return encoded


def _event(event: EventSpec) -> dict[str, Any]:
    return {"timeUnixNano": str(event.time_ns), "name": event.name, "attributes": _attributes(event.attributes)}


def _link(link: LinkSpec) -> dict[str, Any]:
    return {
        "traceId": link.to.trace_id,
        "spanId": link.to.span_id,
        "attributes": _attributes({sc.RELATION: link.relation}),
        "flags": _HAS_IS_REMOTE,
    }


def _attributes(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):  # before int, which a bool is too
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": [{"stringValue": item} for item in value]}}
