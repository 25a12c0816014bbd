"""Jaeger's query API, and its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NotRequired, Self, TypedDict, cast

import httpx


class JaegerKeyValue(TypedDict):
    """An attribute, in the JSON of ``/api/traces``."""

    key: str
    type: str
    value: Any


class JaegerReference(TypedDict):
    """A parent (``CHILD_OF``) or a link (``FOLLOWS_FROM``)."""

    refType: str
    traceID: str
    spanID: str


class JaegerLog(TypedDict):
    """A span event; ``timestamp`` is in microseconds since the epoch."""

    timestamp: int
    fields: list[JaegerKeyValue]


class JaegerSpan(TypedDict):
    """A span; ``startTime`` and ``duration`` are in microseconds."""

    traceID: str
    spanID: str
    operationName: str
    references: list[JaegerReference]
    startTime: int
    duration: int
    tags: list[JaegerKeyValue]
    logs: list[JaegerLog]
    processID: str
    warnings: NotRequired[list[str] | None]


class JaegerResource(TypedDict):
    """A process: the service's name and its resource attributes."""

    serviceName: str
    tags: NotRequired[list[JaegerKeyValue]]


class JaegerTrace(TypedDict):
    """One trace as ``/api/traces`` returns it."""

    traceID: str
    spans: list[JaegerSpan]
    processes: dict[str, JaegerResource]
    warnings: NotRequired[list[str] | None]


def tags_of(span: JaegerSpan) -> dict[str, Any]:
    """A span's attributes as a dictionary; lists come as the JSON text that Jaeger makes of them."""
    # Integers that a browser could not hold exactly are sent as text, still declared int64.
    return {tag["key"]: int(tag["value"]) if tag["type"] == "int64" else tag["value"] for tag in span["tags"]}


class JaegerClient:
    """The little of Jaeger's query API that the tests and the demo ask for."""

    def __init__(self, query_url: str, *, timeout: float = 10.0) -> None:
        # trust_env=False: a proxy from the environment has no business with the loopback interface.
        self._http = httpx.Client(base_url=query_url, timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def services(self) -> list[str]:
        """Names of the services that have sent spans, sorted."""
        return sorted(cast(list[str], self._data("/api/services") or []))

    def traces(
        self,
        service: str,
        *,
        operation: str | None = None,
        tags: Mapping[str, str] | None = None,
        limit: int = 1000,
    ) -> list[JaegerTrace]:
        """Traces with a span of ``service``, of any time; ``tags`` must be on one of its spans.

        Jaeger returns ``limit`` traces at most and does not say when there were more; it refuses a limit
        above its own number of kept traces.
        """
        # Left to itself Jaeger looks back two days from now, and recorded traces may be older than that.
        parameters: dict[str, str] = {
            "service": service,
            "limit": str(limit),
            "start": "1",
            "end": str(int((time.time() + 86_400) * 1_000_000)),
        }
        if operation is not None:
            parameters["operation"] = operation
        if tags:
            parameters["tags"] = json.dumps(dict(tags))
        return cast(list[JaegerTrace], self._data("/api/traces", parameters) or [])

    def trace(self, trace_id: str) -> JaegerTrace | None:
        """The trace with this hexadecimal id, or None when Jaeger has none (yet)."""
        found = cast(list[JaegerTrace], self._data(f"/api/traces/{trace_id}") or [])
        return found[0] if found else None

    def otlp_trace(self, trace_id: str) -> dict[str, Any] | None:
        """The same trace as OTLP JSON (``resourceSpans``), which has the links' attributes as well."""
        answer = self._http.get(f"/api/v3/traces/{trace_id}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return cast(dict[str, Any], answer.raise_for_status().json()["result"])

    def _data(self, path: str, parameters: Mapping[str, str] | None = None) -> Any:
        answer = self._http.get(path, params=parameters)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return answer.raise_for_status().json()["data"]
