"""The spans of a bundle: who makes their lines is given from outside, the file is written and checked here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvwitness.tracer.judgement import Judgement
from kvwitness.tracer.protocol.record import RequestRecord

SpanLines = Callable[[Judgement, Sequence[RequestRecord]], Iterable[str]]
"""Gives the lines of ``spans.otlp.jsonl`` (OTLP/JSON, without line ends)."""


def span_file(lines: Iterable[str]) -> bytes:
    """The content of ``spans.otlp.jsonl``."""
    return "".join(f"{line}\n" for line in lines).encode()
