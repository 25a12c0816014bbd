"""Send spans to an OTLP endpoint through OpenTelemetry's exporters, and know whether they arrived."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from requests import Session

from kvwitness.tracer.addresses import is_loopback_name, is_web_address
from kvwitness.tracer.spans.sdk import readable_spans
from kvwitness.tracer.spans.spec import SpanSpec

BATCH: Final = 512
"""Spans in one request, as the SDK's own batches have."""

TIMEOUT_S: Final = 10.0
"""For one batch, the exporter's own retries included."""

_TRACES_PATH: Final = "/v1/traces"
_REASONS: Final = (
    re.compile(r"(?i)error details: (.+)"),  # gRPC
    re.compile(r"^Transient error (.+) encountered while exporting"),
    re.compile(r"^Failed to export \w+ batch code: (.+)"),
    re.compile(r"Caused by .+?: (.+?)[\"')]+$"),  # urllib3
    re.compile(r"last error: (.+)"),
)
_LOGGERS: Final = "opentelemetry.exporter"


class SendError(Exception):
    """The endpoint did not take the spans, or cannot be one; the message says why."""


class Sender:
    """A connection to one endpoint; use it in a ``with``. ``protocol`` is ``http`` or ``grpc``.

    Headers, certificates and compression come from OpenTelemetry's own variables (``OTEL_EXPORTER_OTLP_*``).
    Raises :class:`SendError` when ``url`` cannot be an endpoint.
    """

    def __init__(self, url: str, protocol: str = "http", *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._exporter = _exporter(url, protocol, timeout_s)
        self._log = _LastMessages(f"it did not take them within {timeout_s:g} s")

    def __enter__(self) -> Self:
        self._log.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exporter.shutdown()
        self._log.stop()

    def send(self, spans: Sequence[SpanSpec]) -> None:
        """Send one batch. Raises :class:`SendError` when the endpoint did not take it."""
        if self._exporter.export(readable_spans(spans)) is not SpanExportResult.SUCCESS:
            raise SendError(self._log.reason())


def batches(spans: Sequence[SpanSpec]) -> list[Sequence[SpanSpec]]:
    """The spans in parts that one request holds."""
    return [spans[start : start + BATCH] for start in range(0, len(spans), BATCH)]


def _exporter(url: str, protocol: str, timeout_s: float) -> SpanExporter:
    if not is_web_address(url):
        raise SendError("an OTLP endpoint looks like http://127.0.0.1:4318")
    parts = urlsplit(url)
    local = is_loopback_name(parts.hostname or "")
    if protocol == "grpc":
        # gRPC takes a proxy from the environment even for this machine's own addresses.
        options = (("grpc.enable_http_proxy", 0),) if local else ()
        return GrpcExporter(
            endpoint=url,
            insecure=parts.scheme == "http",
            timeout=timeout_s,
            channel_options=options,  # type: ignore[arg-type]
        )
    path = parts.path.rstrip("/")
    if not path.endswith(_TRACES_PATH):
        path += _TRACES_PATH
    session = Session()
    session.trust_env = not local
    return HttpExporter(endpoint=urlunsplit(parts._replace(path=path)), timeout=timeout_s, session=session)


class _LastMessages(logging.Handler):
    """Keeps what the exporters log instead of printing it: they tell the reason in no other way."""

    def __init__(self, unspoken: str) -> None:
        super().__init__(logging.WARNING)
        self._reason = unspoken
        self._logger = logging.getLogger(_LOGGERS)
        self._propagated = self._logger.propagate

    def listen(self) -> None:
        self._logger.addHandler(self)
        self._propagated, self._logger.propagate = self._logger.propagate, False

    def stop(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        # After retries the exporter's last message says only that it gave up.
        if "max retries or shutdown" not in message:
            self._reason = plain_reason(message)

    def reason(self) -> str:
        # Also that of an earlier batch: the exporters log the same thing only once in a while.
        return self._reason


def plain_reason(message: str) -> str:
    """What an exporter's log message says about the endpoint, without what it says about itself."""
    for pattern in _REASONS:
        found = pattern.search(message)
        if found is not None:
            message = found[1]
    return message
