"""The recorded run, its requests by name, and spans as readable text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from journal_tools import ABC

from kvwitness.collectors.journal import Journal, read_journal
from kvwitness.patches.recorder import Recorder
from kvwitness.patches.schema.events import HttpRequest
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.spec import Ref, SpanSpec

EXPECTED = Path(__file__).resolve().parent / "expected" / "abc.txt"
"""The run's spans as text; ``KVWITNESS_UPDATE=1 pytest tests/spans`` writes it anew."""

NAMES = {
    "78e3f46389f145f99744d2a97f097a12": "warm-up",
    "HEALTH_CHECK_d19eb0c5874b4dc3b493d7cca58b56ee": "health",
    "cfe530e4a7274dcba61e7c9cb97bd1c6": "A",
    "6edfbdb670204fc1aaa20e17a412e0c9": "B",
    "ab053df4b4d34feaa69b73f939f3a61b": "fill 1",
    "2d535078d43c4c23a5cdc8fc4a95a3b0": "fill 2",
    "37a0e26b6c7540b887c8bba42e051303": "fill 3",
    "77f780f8c9cf4f6a81ef3c1b65e00046": "fill 4",
    "a30c069e435f44fc8fe19956ac531e90": "C",
    "0984030d55144aeebc1b020b20b98e90": "C2",
}
RIDS = {name: rid for rid, name in NAMES.items()}

CLIENT_TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
TRACEPARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"


def recorded_run() -> list[Journal]:
    return [read_journal(ABC)]


def record_http(directory: Path, rid: str, traceparent: str) -> Path:
    """The journal of an HTTP process that saw a traceparent."""
    recorder = Recorder(directory, role="http", quota_bytes=200_000, chunk_bytes=1 << 13)
    recorder.emit(HttpRequest, recorder.text(rid), tail=traceparent.encode())
    recorder.close()
    return recorder.path


def request_span(spans: Sequence[SpanSpec], rid: str) -> SpanSpec:
    [found] = [span for span in spans if span.name == sc.REQUEST and span.attributes[sc.RID] == rid]
    return found


def children(spans: Sequence[SpanSpec], parent: SpanSpec, name: str | None = None) -> list[SpanSpec]:
    return [
        span
        for span in spans
        if (span.ref.trace_id, span.parent) == (parent.ref.trace_id, parent.ref.span_id) and name in (None, span.name)
    ]


def as_text(spans: Sequence[SpanSpec]) -> str:
    """Traces as trees: names for ids, milliseconds since the first span for times."""
    zero = min(span.start_ns for span in spans)
    labels = {span.ref: _label(span) for span in spans}
    lines: list[str] = []
    for span in spans:
        if span.parent is None or Ref(span.ref.trace_id, span.parent) not in labels:
            lines += ["", *_tree(spans, span, zero, labels, "")]
    return _named("\n".join(lines[1:]) + "\n")


def _tree(spans: Sequence[SpanSpec], span: SpanSpec, zero: int, labels: dict[Ref, str], indent: str) -> list[str]:
    begin, length = (span.start_ns - zero) / 1e6, (span.end_ns - span.start_ns) / 1e6
    lines = [f"{indent}{labels[span.ref]}  at {begin:.3f} ms, {length:.3f} ms"]
    told = {name: value for name, value in span.attributes.items() if name != sc.RID}
    lines += [f"{indent}  {name} = {value}" for name, value in told.items()]
    for event in span.events:
        attributes = " ".join(f"{name}={value}" for name, value in event.attributes.items())
        lines.append(f"{indent}  * {event.name} at {(event.time_ns - zero) / 1e6:.3f} ms {attributes}".rstrip())
    lines += [f"{indent}  -> {link.relation}: {labels[link.to]}" for link in span.links]
    for child in children(spans, span):
        lines += _tree(spans, child, zero, labels, indent + "    ")
    return lines


def _label(span: SpanSpec) -> str:
    rid = span.attributes.get(sc.RID)
    return f"{span.name} {rid}" if rid is not None else f"{span.name} #{span.attributes[sc.FIRST_SEQ]}"


def _named(text: str) -> str:
    for rid, name in NAMES.items():
        text = text.replace(rid, name)
    return text
