"""The file form of spans, and the page about their names."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from bundle.forging import reseal
from google.protobuf.json_format import MessageToDict
from journal_tools import ABC
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from kvwitness.tracer.bundle import BundleInputs, read_bundle_spans, verify_bundle, write_bundle
from kvwitness.tracer.bundle.layout import SPANS
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.spans.build import build_spans
from kvwitness.tracer.spans.otlp_json import otlp_lines, span_lines
from kvwitness.tracer.spans.reference import reference_page
from kvwitness.tracer.spans.sdk import readable_spans

from .made import instance, judged, load, prefetch, request
from .recorded import recorded_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "semantic-conventions.md"


def test_the_page_and_the_names_are_the_same() -> None:
    assert PAGE.read_text() == reference_page(), (
        "python -m kvwitness.tracer.spans.reference > docs/semantic-conventions.md"
    )


def sent(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Spans as the SDK's exporter sends them, with ids as OTLP/JSON writes them."""
    spans = [span for r in message["resourceSpans"] for scope in r["scopeSpans"] for span in scope["spans"]]
    for span in spans:
        for carrier in (span, *span.get("links", ())):
            for key in ("traceId", "spanId", "parentSpanId"):
                if key in carrier:
                    carrier[key] = base64.b64decode(carrier[key]).hex()
    return spans


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_empty(item) for key, item in value.items() if item not in ([], {})}
    return [without_empty(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", ["recorded", "made"])
def test_the_file_says_what_is_sent(case: str) -> None:
    if case == "recorded":
        spans = build_spans(judge(recorded_run()))
    else:
        aborted = request("R", 10, 20, 2, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-00", loads=(12,))
        facts = instance(requests=(aborted,), loads=(load(12, "R", 8, 15),), prefetches=(prefetch("R", 7, 8),))
        spans = build_spans(judged(facts))
    lines = [json.loads(line) for line in otlp_lines(spans)]
    written = [span for line in lines for r in line["resourceSpans"] for s in r["scopeSpans"] for span in s["spans"]]
    wanted = sent(MessageToDict(encode_spans(readable_spans(spans)), use_integers_for_enums=True))
    assert without_empty(written) == without_empty(wanted)


def test_a_line_is_one_trace() -> None:
    spans = build_spans(judge(recorded_run()))
    lines = [json.loads(line) for line in otlp_lines(spans)]
    assert len(lines) == len({span.ref.trace_id for span in spans}) == 11
    for line in lines:
        [resource] = line["resourceSpans"]
        [scope] = resource["scopeSpans"]
        assert scope["scope"]["name"] == "kvwitness"
        assert len({span["traceId"] for span in scope["spans"]}) == 1


def test_long_traces_are_several_lines() -> None:
    spans = build_spans(judged(instance(loads=tuple(load(n, None, 1, n + 2) for n in range(10, 1210)))))
    lines = [json.loads(line) for line in otlp_lines(spans)]
    assert [len(line["resourceSpans"][0]["scopeSpans"][0]["spans"]) for line in lines] == [512, 512, 177]


def test_a_bundle_has_the_same_lines_every_time(tmp_path: Path) -> None:
    inputs = BundleInputs(journals=(ABC,))
    written = [write_bundle(tmp_path / name, inputs, spans=span_lines).path for name in ("one", "two")]
    one, two = map(read_bundle_spans, written)
    assert one == two == "".join(f"{line}\n" for line in otlp_lines(build_spans(judge(recorded_run())))).encode()


def test_forged_spans_do_not_verify(tmp_path: Path) -> None:
    journal = tmp_path / "scheduler-1-1.kvwj"
    journal.write_bytes(ABC.read_bytes())
    folder = write_bundle(tmp_path / "bundle", BundleInputs(journals=(journal,)), spans=span_lines).path
    assert verify_bundle(folder, spans=span_lines).ok
    spans = folder / SPANS
    spans.write_text(spans.read_text().replace("L1 read confirmed", "L2 read confirmed", 1))
    reseal(folder)
    (problem,) = verify_bundle(folder, spans=span_lines).problems
    assert problem.path == SPANS
