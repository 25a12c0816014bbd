"""From a judgement to spans. Pure: the same judgement gives the same spans, with the same ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvwitness.tracer.judgement import Judgement
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.spans.cache import cache_spans
from kvwitness.tracer.spans.facts import resource_of
from kvwitness.tracer.spans.index import index_run
from kvwitness.tracer.spans.requests import request_spans
from kvwitness.tracer.spans.spec import SpanSpec


def build_spans(
    judgement: Judgement, records: Sequence[RequestRecord] = (), hosts: Mapping[str, str] | None = None
) -> list[SpanSpec]:
    """The spans of a run: for each process its requests in order, then its epochs.

    The trace context that a client sent is taken from the server's journals, or else from the client's own
    ``records``. ``hosts`` names the machine of each instance where that is known.
    """
    hosts = hosts or {}
    traceparents = {record.rid: record.traceparent for record in records}
    resources = {facts.instance: resource_of(facts, hosts.get(facts.instance)) for facts in judgement.instances}
    spans: list[SpanSpec] = []
    for index in index_run(judgement, traceparents, resources):
        for use in index.uses:
            spans.extend(request_spans(index, use))
        spans.extend(cache_spans(index))
    return spans
