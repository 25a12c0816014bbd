"""The page about every name in the spans (docs/semantic-conventions.md), made from the names themselves.

Written anew with ``python -m kvwitness.tracer.spans.reference > docs/semantic-conventions.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from kvwitness.tracer.spans import semconv as sc

_INTRODUCTION = f"""\
# Names in the spans

`kvwitness export` and `kvwitness collect` send these spans over OTLP; a bundle has the same ones in
`spans.otlp.jsonl` (OTLP/JSON, one `ExportTraceServiceRequest` a line). No span holds prompt or output text,
token ids or digests.

Names of OpenTelemetry's own conventions are used where there are any. Its `gen_ai.*` names are still in
development, and none of them knows tiers. `hicache.*` is what SGLang's cache did, `sglang.*` what the server
says of itself, `kvwitness.*` what kvwitness concludes from its evidence. An attribute is left out where its
value was not recorded. Schema: `{sc.SCHEMA_URL}`.

The ids are hashes of the process's name and of journal event numbers: exporting a run once more gives the
same ids. Times are the process's monotonic clock, placed on the wall clock once, when its journal was opened.
"""

_TRACES = """\
A request has a trace of its own: the client's, when it sent a W3C `traceparent`. Each process has one trace
per epoch for what its cache did. Links lead from one to the other; their relation is in
`kvwitness.link.relation`. A link may lead to a span that is sent later: what is still in the cache is a span
only when it has left, or when `kvwitness collect` ends.
"""


def reference_page() -> str:
    """The whole page."""
    parts = [
        _INTRODUCTION,
        "## Spans\n\n" + _TRACES + "\n" + _table(("span", "meaning"), ((t.name, t.meaning) for t in sc.SPANS.values())),
        "## Span events\n\n" + _table(("event", "meaning"), ((t.name, t.meaning) for t in sc.EVENTS.values())),
        "## Link relations\n\n" + _table(("relation", "meaning"), ((t.name, t.meaning) for t in sc.RELATIONS.values())),
        "## Attributes of spans, events and links\n\n" + _attributes(sc.ATTRIBUTES),
        "## Resource attributes\n\nWhat is sent has `telemetry.sdk.*` beside these.\n\n"
        + _attributes(sc.RESOURCE_ATTRIBUTES),
    ]
    return "\n".join(parts)


def _attributes(terms: Mapping[str, sc.Term]) -> str:
    rows = ((t.name, t.type, f"`{t.unit}`" if t.unit else "", t.meaning) for t in terms.values())
    return _table(("attribute", "type", "unit", "meaning"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *((f"`{name}`", *rest) for name, *rest in rows)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(reference_page())
