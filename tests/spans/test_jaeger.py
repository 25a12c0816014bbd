"""The Jaeger that the other tests rely on: it is found or built, runs, answers truly, and goes away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import Link, format_span_id, format_trace_id

from kvwitness.tracer.spans.jaeger import (
    JaegerError,
    JaegerProcess,
    JaegerTrace,
    JaegerUnavailable,
    find_or_build_jaeger,
    tags_of,
)
from kvwitness.tracer.spans.jaeger.config import Ports

from .waiting import wait_for

ATTRIBUTES: dict[str, Any] = {"text": "C host", "whole": 2**53 + 1, "part": 0.25, "yes": True, "several": ["a", "b"]}


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def listening(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rsplit(":")[-1])), 1).close()
    except OSError:
        return False
    return True


def whole(trace: JaegerTrace | None, spans: int) -> JaegerTrace | None:
    return trace if trace is not None and len(trace["spans"]) == spans else None


def write_script(path: Path, body: str) -> Path:
    path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
    path.chmod(0o755)
    return path


# --- against the real program ------------------------------------------------------------------------


@pytest.mark.jaeger
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_trace_with_a_link_comes_back(jaeger: JaegerProcess, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    exporter: SpanExporter = (
        HttpExporter(endpoint=f"{jaeger.otlp_http}/v1/traces")
        if protocol == "http"
        else GrpcExporter(endpoint=jaeger.otlp_grpc, insecure=True)
    )
    service = f"kvwitness-{protocol}-{uuid.uuid4().hex[:8]}"
    provider = TracerProvider(resource=Resource.create({"service.name": service, "run": "r-1"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests")
    with tracer.start_as_current_span("writer") as writer:
        pass
    link = Link(writer.get_span_context(), {"why": "wrote the page"})
    with tracer.start_as_current_span("request") as request:  # noqa: SIM117 (two spans, two lines)
        with tracer.start_as_current_span("load", links=[link], attributes=ATTRIBUTES) as load:
            load.add_event("page", {"number": 7})
    provider.shutdown()

    trace_id = format_trace_id(request.get_span_context().trace_id)
    written = format_trace_id(writer.get_span_context().trace_id)
    with jaeger.client() as client:
        # Each span is an export of its own here, and Jaeger shows a trace as soon as it has its first span.
        trace = wait_for(lambda: whole(client.trace(trace_id), 2), 10, what="the trace")
        wait_for(lambda: client.trace(written), 10, what="the linked trace")
        assert service in client.services()
        assert {found["traceID"] for found in client.traces(service)} == {trace_id, written}
        assert [found["traceID"] for found in client.traces(service, operation="writer")] == [written]
        assert [found["traceID"] for found in client.traces(service, tags={"text": "C host"})] == [trace_id]
        assert client.trace("1" * 32) is None
        assert client.otlp_trace("1" * 32) is None
        otlp = client.otlp_trace(trace_id)

    spans = {span["operationName"]: span for span in trace["spans"]}
    assert set(spans) == {"request", "load"}
    loaded = spans["load"]
    assert {key: tags_of(loaded)[key] for key in ATTRIBUTES} == {
        **ATTRIBUTES,
        "several": '["a","b"]',  # Jaeger's own JSON has no lists
    }
    references = {(ref["refType"], ref["traceID"], ref["spanID"]) for ref in loaded["references"]}
    assert references == {
        ("CHILD_OF", trace_id, format_span_id(request.get_span_context().span_id)),
        ("FOLLOWS_FROM", written, format_span_id(writer.get_span_context().span_id)),
    }
    fields = {field["key"]: field["value"] for field in loaded["logs"][0]["fields"]}
    assert fields == {"event": "page", "number": 7}
    resource = trace["processes"][loaded["processID"]]
    assert resource["serviceName"] == service
    assert {"key": "run", "type": "string", "value": "r-1"} in resource["tags"]

    # Only the OTLP form carries what a link says.
    assert otlp is not None
    otlp_spans = [
        span
        for per_resource in otlp["resourceSpans"]
        for per_scope in per_resource["scopeSpans"]
        for span in per_scope["spans"]
    ]
    [otlp_load] = [span for span in otlp_spans if span["name"] == "load"]
    [otlp_link] = otlp_load["links"]
    assert otlp_link["traceId"] == written
    assert otlp_link["attributes"] == [{"key": "why", "value": {"stringValue": "wrote the page"}}]


@pytest.mark.jaeger
def test_stop_leaves_nothing_behind(jaeger_program: Path, tmp_path: Path) -> None:
    process = JaegerProcess(jaeger_program, folder=tmp_path)
    process.start()
    pid = process.pid
    urls = [process.otlp_http, process.otlp_grpc, process.query_url]
    assert all(listening(url) for url in urls)
    with process.client() as client:
        assert client.services() == []  # in particular no traces of Jaeger itself
    process.stop()
    assert gone(pid)
    assert not any(listening(url) for url in urls)
    with pytest.raises(JaegerError, match="not running"):
        _ = process.query_url
    process.stop()  # once more does no harm


@pytest.mark.jaeger
def test_jaeger_dies_with_a_killed_parent(jaeger_program: Path) -> None:
    script = """
        import sys, time
        from pathlib import Path
        from kvwitness.tracer.spans.jaeger import JaegerProcess
        process = JaegerProcess(Path(sys.argv[1]))
        process.start()
        print(process.query_url, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(jaeger_program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert listening(url)
        parent.send_signal(signal.SIGKILL)
    # Not by process id: in a container without an init nobody may ever reap an orphan.
    wait_for(lambda: not listening(url), 10, what="Jaeger's end")


@pytest.mark.jaeger
def test_a_port_taken_meanwhile_is_replaced(jaeger_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Ports.free
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        choices = [Ports(**{**vars(choose()), "otlp_grpc": taken}), choose()]
        wanted = choices[1]
        monkeypatch.setattr(Ports, "free", lambda: choices.pop(0))
        with JaegerProcess(jaeger_program) as process:
            assert process.otlp_grpc == f"http://127.0.0.1:{wanted.otlp_grpc}"
    assert choices == []


# --- starting something that is no Jaeger ------------------------------------------------------------


def test_a_program_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    program = write_script(tmp_path / "dies", 'echo "no such luck" >&2\nexit 3\n')
    with pytest.raises(JaegerError, match=r"(?s)ended with 3.*no such luck"):
        JaegerProcess(program).start()


def test_a_program_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    program = write_script(tmp_path / "idles", f'echo $$ > "{tmp_path}/pid"\nexec sleep 600\n')
    with pytest.raises(JaegerError, match="not healthy after 1 s"):
        JaegerProcess(program, ready_timeout=1).start()
    assert gone(int((tmp_path / "pid").read_text()))


# --- finding and building ----------------------------------------------------------------------------


def test_jaeger_bin_must_be_a_jaeger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x7fELF\0 not really")
    silent = write_script(tmp_path / "silent", "exit 0\n")

    def refused(path: Path) -> str:
        monkeypatch.setenv("JAEGER_BIN", str(path))
        with pytest.raises(JaegerUnavailable) as caught:
            find_or_build_jaeger(pytest.fail, tmp_path)
        assert f"JAEGER_BIN={path}" in str(caught.value)
        assert "set it to a Jaeger v2 program, or unset it" in str(caught.value)
        return str(caught.value)

    assert "is not a file" in refused(tmp_path / "absent")
    assert "is not executable" in refused(garbage)
    garbage.chmod(0o755)
    assert "does not run" in refused(garbage)
    assert "is not a Jaeger v2" in refused(silent)


@pytest.fixture
def module_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module, and a `go` that builds it in no time: a pretended Jaeger, or a failure when asked for."""
    tools = tmp_path / "bin"
    tools.mkdir()
    write_script(
        tools / "go",
        f"""\
        if [ "$1" = env ]; then echo go9.9; exit 0; fi
        echo build >> "{tmp_path}/builds"
        if [ -e "{tmp_path}/broken" ]; then echo "cannot find module" >&2; exit 1; fi
        while [ -e "{tmp_path}/endless" ]; do echo >> "{tmp_path}/ticks"; sleep 0.05; done
        sleep 0.2
        while [ "$1" != -o ]; do shift; done
        printf '#!/bin/sh\\necho jaeger_query\\n' > "$2"
        chmod +x "$2"
        """,
    )
    module = tmp_path / "module"
    module.mkdir()
    (module / "go.mod").write_text("module pretended\n")
    (module / "go.sum").write_text("")
    monkeypatch.delenv("JAEGER_BIN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return module


def test_without_go_and_without_a_program(module_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(module_dir))
    with pytest.raises(JaegerUnavailable, match=r"install Go .* or set JAEGER_BIN"):
        find_or_build_jaeger(pytest.fail, module_dir)


def test_it_is_built_once_even_by_several_at_once(module_dir: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    found: list[Path] = []
    builders = [
        threading.Thread(target=lambda: found.append(find_or_build_jaeger(lines.append, module_dir))) for _ in range(3)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(found) == 3
    [program] = set(found)
    assert program.is_relative_to(tmp_path / "cache" / "kvwitness" / "jaeger")
    assert (tmp_path / "builds").read_text() == "build\n"
    assert any("waiting" in line for line in lines)

    assert find_or_build_jaeger(pytest.fail, module_dir) == program
    (module_dir / "go.sum").write_text("another version\n")
    assert find_or_build_jaeger(lines.append, module_dir) != program


def test_a_failed_or_killed_build_is_never_used(module_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(JaegerUnavailable, match="cannot find module"):
        find_or_build_jaeger(lambda line: None, module_dir)
    [folder] = (tmp_path / "cache" / "kvwitness" / "jaeger").iterdir()
    assert {entry.name for entry in folder.iterdir()} == {"lock", "build.log"}

    (tmp_path / "broken").unlink()
    half_made = folder / "build-killed"
    half_made.mkdir()
    (half_made / "jaeger").write_text("half")
    assert find_or_build_jaeger(lambda line: None, module_dir) == folder / "jaeger"
    assert not half_made.exists()


def test_a_killed_builder_takes_the_build_with_it(module_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "endless").touch()
    ticks = tmp_path / "ticks"
    script = """
        import sys
        from pathlib import Path
        from kvwitness.tracer.spans.jaeger import find_or_build_jaeger
        find_or_build_jaeger(print, Path(sys.argv[1]))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(module_dir)]) as builder:
        wait_for(ticks.exists, 20, what="the build")
        builder.send_signal(signal.SIGKILL)

    def quiet() -> bool:
        before = ticks.stat().st_size
        time.sleep(0.5)
        return ticks.stat().st_size == before

    wait_for(quiet, 10, what="the end of the build")


def test_wait_for_says_what_it_waited_for() -> None:
    answers = iter([0, 0, 5])
    assert wait_for(lambda: next(answers), 5, interval=0) == 5
    with pytest.raises(TimeoutError, match="a bus"):
        wait_for(lambda: False, 0, what="a bus")
