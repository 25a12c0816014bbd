"""Sending a bundle: what arrives, and what is said when nothing can."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from click.testing import CliRunner
from http_tools import QuietServer
from journal_tools import ABC
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvwitness.tracer.bundle import BundleInputs, write_bundle
from kvwitness.tracer.cli.application import application
from kvwitness.tracer.spans import sender
from kvwitness.tracer.spans.export import bundle_spans, export_bundle
from kvwitness.tracer.spans.sender import Sender, SendError, plain_reason

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("export") / "bundle", BundleInputs(journals=(ABC,))).path


class Endpoint:
    """An OTLP/HTTP endpoint that keeps what it is sent, and answers with ``status``."""

    def __init__(self) -> None:
        self.status = 200
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []
        self.url = ""

    @property
    def span_ids(self) -> list[str]:
        return [
            span.span_id.hex()
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def endpoint(port: int = 0) -> Iterator[Endpoint]:
    kept = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept.paths.append(self.path)
            if kept.status == 200:
                kept.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(kept.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = QuietServer(("127.0.0.1", port), Handler)
    kept.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_every_span_is_sent_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "BATCH", 10)
    lines: list[str] = []
    with endpoint() as kept:
        count = export_bundle(bundle, kept.url, progress=lines.append)
    spans = bundle_spans(bundle)
    assert count == len(spans)
    assert kept.span_ids == [span.ref.span_id for span in spans]
    assert set(kept.paths) == {"/v1/traces"}
    assert lines[0] == f"10 of {count} spans sent" and lines[-1] == f"{count} of {count} spans sent"
    resource = {a.key: a.value for a in kept.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"].string_value == "sglang"
    assert resource["telemetry.sdk.name"].string_value == "opentelemetry"


@pytest.mark.parametrize("path", ["/", "/v1/traces", "/v1/traces/", "/otlp"])
def test_an_endpoint_may_be_given_with_its_path(bundle: Path, path: str) -> None:
    with endpoint() as kept:
        export_bundle(bundle, kept.url + path)
    assert set(kept.paths) == {"/otlp/v1/traces" if path == "/otlp" else "/v1/traces"}


def test_the_command_says_how_many(bundle: Path) -> None:
    with endpoint() as kept:
        ran = CliRunner().invoke(application, ["export", str(bundle), "--otlp", kept.url, "--json"])
    assert ran.exit_code == 0
    assert json.loads(ran.stdout)["spans"] == len(kept.span_ids) > 90


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_endpoint_that_is_down_is_one_line(bundle: Path, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(export_bundle.__kwdefaults__ or {}, "timeout_s", 2.0)
    ran = CliRunner().invoke(application, ["export", str(bundle), "--otlp", NOWHERE, "--protocol", protocol])
    assert ran.exit_code == 2
    assert ran.stdout == ""
    [line] = ran.stderr.splitlines()
    assert line.startswith(f"error: {NOWHERE}: no span was sent: ")
    assert "onnection refused" in line and "retrying" not in line


def test_a_refusal_is_told_with_its_status(bundle: Path) -> None:
    with endpoint() as kept:
        kept.status = 401
        ran = CliRunner().invoke(application, ["export", str(bundle), "--otlp", kept.url])
    assert ran.exit_code == 2
    assert "no span was sent: 401, reason: Unauthorized" in ran.stderr


@pytest.mark.parametrize("url", ["127.0.0.1:4317", "localhost", "ftp://127.0.0.1", "http://", "http://x:port", ""])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_what_cannot_be_an_endpoint_is_said_at_once(url: str, protocol: str) -> None:
    with pytest.raises(SendError, match="looks like"):
        Sender(url, protocol)


def test_a_proxy_is_not_asked_for_this_machine(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with endpoint() as kept:
        assert export_bundle(bundle, kept.url) == len(kept.span_ids)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Failed to export spans batch code: 404, reason: Not Found", "404, reason: Not Found"),
        ("Transient error Bad Gateway encountered while exporting spans batch, retrying in 1.00s.", "Bad Gateway"),
        (
            "Transient error StatusCode.UNAVAILABLE encountered while exporting traces to x, retrying in 1.00s. "
            "Error details: failed to connect to all addresses; last error: UNKNOWN: no route",
            "UNKNOWN: no route",
        ),
        ("something new", "something new"),
    ],
)
def test_reasons_are_plain(message: str, reason: str) -> None:
    assert plain_reason(message) == reason


def test_the_sdk_is_loaded_only_to_send() -> None:
    code = "import sys, kvwitness.tracer.cli.run; print('opentelemetry' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
