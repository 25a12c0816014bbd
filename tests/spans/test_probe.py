"""An endpoint that cannot take spans is told from one that can, at once and with the likely cause."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from http_tools import QuietServer
from journal_tools import ABC

from kvwitness.tracer.bundle import BundleInputs, write_bundle
from kvwitness.tracer.cli.application import application
from kvwitness.tracer.spans.probe import endpoint_problem


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def http_port() -> Iterator[int]:
    with QuietServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()


@pytest.fixture
def grpc_port() -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def problem(port: int, protocol: str) -> tuple[str, str]:
    found = endpoint_problem(f"http://127.0.0.1:{port}", protocol)
    assert found is not None
    return found


def test_http_and_grpc_are_told_apart(http_port: int, grpc_port: int) -> None:
    assert endpoint_problem(f"http://127.0.0.1:{http_port}", "http") is None
    assert endpoint_problem(f"http://127.0.0.1:{grpc_port}", "grpc") is None
    assert problem(grpc_port, "http")[0] == "it speaks gRPC, and not HTTP"
    assert problem(http_port, "grpc")[0] == "it speaks HTTP, and not gRPC"
    assert "use --protocol grpc, or its port for HTTP (by custom 4318 is HTTP" in problem(grpc_port, "http")[1]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_nothing_listens(free_port: int, protocol: str) -> None:
    what, what_to_do = problem(free_port, protocol)
    assert what == f"nothing listens on port {free_port} (connection refused)"
    assert "4317 is gRPC" in what_to_do


def test_what_is_silent_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("kvwitness.tracer.spans.probe.TIMEOUT_S", 0.1)
        assert endpoint_problem(f"http://127.0.0.1:{silent.getsockname()[1]}", "http") is None
    found = endpoint_problem("http://no-such-host.invalid:4318", "http")
    assert found is not None and found.what == "there is no host 'no-such-host.invalid'"


def test_a_proxy_is_left_to_the_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert endpoint_problem("http://no-such-host.invalid:4318", "http") is None


def test_export_says_it_in_one_line_and_at_once(tmp_path: Path, grpc_port: int) -> None:
    bundle = write_bundle(tmp_path / "bundle", BundleInputs(journals=(ABC,))).path
    url = f"http://127.0.0.1:{grpc_port}"
    began = time.monotonic()
    ran = CliRunner().invoke(application, ["export", str(bundle), "--otlp", url])
    assert time.monotonic() - began < 5
    assert ran.exit_code == 2
    [line] = ran.stderr.splitlines()
    assert line.startswith(f"error: {url}: no span was sent: it speaks gRPC, and not HTTP; use --protocol grpc")
