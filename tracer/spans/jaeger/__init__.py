"""A real Jaeger for the tests and the demo: find or build the program, run it, ask it for traces.

Spans that only ever reach a mock prove nothing about what a reader of the traces will see, so both run
against the Jaeger of ``tests/jaeger/go.mod``. The program keeps its traces in memory, listens on the
loopback interface only, and ends with the process that started it.
"""

from kvwitness.tracer.spans.jaeger.client import JaegerClient, JaegerSpan, JaegerTrace, tags_of
from kvwitness.tracer.spans.jaeger.errors import JaegerError, JaegerUnavailable
from kvwitness.tracer.spans.jaeger.process import JaegerProcess
from kvwitness.tracer.spans.jaeger.program import find_or_build_jaeger

__all__ = [
    "JaegerClient",
    "JaegerError",
    "JaegerProcess",
    "JaegerSpan",
    "JaegerTrace",
    "JaegerUnavailable",
    "find_or_build_jaeger",
    "tags_of",
]
