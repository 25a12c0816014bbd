"""Spans as the OpenTelemetry SDK's own objects, which its exporters take."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvwitness.tracer.bundle.version import kvwitness_version
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.spec import Kind, ResourceSpec, SpanSpec

_KINDS = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER}


def readable_spans(specs: Sequence[SpanSpec]) -> list[ReadableSpan]:
    """The same spans, in the same order."""
    # One object per process: the exporter groups what it sends by resource.
    resources = {spec.resource.instance: _resource(spec.resource) for spec in specs}
    scope = InstrumentationScope(sc.SCOPE, kvwitness_version(), sc.SCHEMA_URL)
    return [_readable(spec, resources[spec.resource.instance], scope) for spec in specs]


def _resource(resource: ResourceSpec) -> Resource:
    # create() adds telemetry.sdk.* and what OTEL_RESOURCE_ATTRIBUTES says; ours win.
    return Resource.create(dict(resource.attributes), sc.SCHEMA_URL)


def _readable(spec: SpanSpec, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    trace = spec.ref.trace_id
    return ReadableSpan(
        name=spec.name,
        context=_context(trace, spec.ref.span_id, False),
        parent=_context(trace, spec.parent, spec.parent_is_remote) if spec.parent is not None else None,
        resource=resource,
        attributes=spec.attributes,
        events=[Event(event.name, event.attributes, event.time_ns) for event in spec.events],
        links=[
            Link(_context(link.to.trace_id, link.to.span_id, False), {sc.RELATION: link.relation})
            for link in spec.links
        ],
        kind=_KINDS[spec.kind],
        status=Status(StatusCode.ERROR, spec.error) if spec.error is not None else Status(),
        start_time=spec.start_ns,
        end_time=spec.end_ns,
        instrumentation_scope=scope,
    )


def _context(trace_id: str, span_id: str, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))
