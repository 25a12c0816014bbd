"""Errors are one line in kvwitness's own words: what, where, what to do."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_tools import QuietServer

from kvwitness.tracer.cli.errors import with_log

from .conftest import Command

LIBRARY = (
    "Invalid enum",
    "Request URL",
    "[Errno",
    "_ssl",
    "Object missing",
    "Traceback",
    "Input data",
    "not a zip file",
)


def error_line(kvwitness: Command, *args: object) -> str:
    result = kvwitness(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert not [words for words in LIBRARY if words in line]
    return line


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def another_server() -> Iterator[str]:
    """Something that speaks HTTP and is no SGLang."""
    with QuietServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("address", ["127.0.0.1:30000", "localhost:30000"])
def test_an_address_without_http_is_completed(kvwitness: Command, bundle: Path, tmp_path: Path, address: str) -> None:
    run = error_line(kvwitness, "run", "abc", "--url", address, "--out", tmp_path / "out")
    assert run == f"error: --url '{address}': it is not the address of a server; write http://{address}"
    export = error_line(kvwitness, "export", bundle, "--otlp", address)
    assert export == f"error: --otlp '{address}': it is not the address of a server; write http://{address}"


@pytest.mark.parametrize(
    "address", ["", "http://", "http://x:port", "http://x:99999", "ftp://x", "http://[::1", "a\x01b"]
)
def test_what_is_no_address(kvwitness: Command, data: Path, tmp_path: Path, address: str) -> None:
    line = error_line(kvwitness, "run", "abc", "--url", address, "--out", tmp_path / "out")
    assert line.endswith("write an address like http://127.0.0.1:30000")
    line = error_line(kvwitness, "collect", "--dir", data, "--otlp", address)
    assert line.endswith("write an address like http://127.0.0.1:4318")


def test_nobody_listens(kvwitness: Command, tmp_path: Path) -> None:
    line = error_line(kvwitness, "run", "abc", "--url", "http://127.0.0.1:1", "--out", tmp_path / "out")
    assert "no server answers at http://127.0.0.1:1 (Connection refused); check --url" in line


def test_another_server_listens(kvwitness: Command, tmp_path: Path, another_server: str) -> None:
    line = error_line(kvwitness, "run", "abc", "--url", f"http://{another_server}", "--out", tmp_path / "out")
    assert "is no SGLang server (it has no /health); check --url" in line
    line = error_line(kvwitness, "run", "abc", "--url", f"https://{another_server}", "--out", tmp_path / "out")
    assert "(it speaks http, and not https); check --url" in line


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("verdicts.json", b'"reported"', b'"report"', "verdicts.json: it is not as kvwitness writes it (at ["),
        ("requests.jsonl", b'{"', b"{", "requests.jsonl, line 1: it is not JSON, or is cut off"),
        ("manifest.json", b'"schema"', b'"scheme"', "manifest.json: it is not as kvwitness writes it"),
    ],
)
def test_a_file_that_is_not_as_written(
    kvwitness: Command, bundle: Path, file: str, old: bytes, new: bytes, said: str
) -> None:
    path = bundle / file
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    line = error_line(kvwitness, "show", bundle)
    assert said in line
    assert line.endswith(f"`kvwitness verify {bundle}` says what else is wrong with it")
    assert "Invalid" not in kvwitness("verify", bundle).stdout


def test_export_of_a_bundle_with_a_damaged_journal(kvwitness: Command, bundle: Path, another_server: str) -> None:
    next((bundle / "journals").iterdir()).write_text("hello")
    assert "not a kvwitness journal" in error_line(kvwitness, "export", bundle, "--otlp", f"http://{another_server}")


def test_doctor_does_not_repeat_what_another_program_says(kvwitness: Command) -> None:
    assert "not a Python that can be asked (exit code" in error_line(kvwitness, "doctor", "--python", "/bin/ls")


def test_a_port_that_is_none(kvwitness: Command) -> None:
    assert "99999999 is not in the range" in error_line(kvwitness, "stand", "serve", "--port", "99999999")


def test_a_log_comes_before_the_line_that_sums_it_up(capsys: pytest.CaptureFixture[str]) -> None:
    error = with_log(
        RuntimeError("the server ended with status 1; the end of /x/server.log:\none\ntwo"), "kvwitness demo"
    )
    assert capsys.readouterr().err == "one\ntwo\n"
    error.show()
    line = capsys.readouterr().err
    assert line == "error: kvwitness demo: the server ended with status 1; see the end of /x/server.log above\n"


def test_without_a_jaeger_there_is_one_remedy(
    kvwitness: Command, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAEGER_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert error_line(kvwitness, "jaeger", bundle, "--module", "tests/jaeger") == (
        "error: kvwitness jaeger: there is no Jaeger: JAEGER_BIN is not set, and there is no `go` on PATH to build one "
        "with; install Go (the version in tests/jaeger/go.mod or newer), or set JAEGER_BIN to a Jaeger v2 program"
    )
    monkeypatch.setenv("JAEGER_BIN", "/nowhere/jaeger")
    assert error_line(kvwitness, "jaeger", bundle) == (
        "error: kvwitness jaeger: JAEGER_BIN=/nowhere/jaeger is not a file; "
        "set it to a Jaeger v2 program, or unset it to build one"
    )


def test_a_build_of_jaeger_that_fails(
    kvwitness: Command, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    go.write_text('#!/bin/sh\n[ "$1" = env ] && exit 0\necho "cannot find module" >&2\nexit 1\n')
    go.chmod(0o755)
    monkeypatch.delenv("JAEGER_BIN", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("go.mod", "go.sum"):
        (tmp_path / name).write_text("module m\n")
    result = kvwitness("jaeger", bundle, "--module", tmp_path)
    assert result.exit_code == 2
    *log, line = result.stderr.splitlines()
    assert "cannot find module" in log
    assert line.startswith("error: kvwitness jaeger: building Jaeger failed (`go build` ended with 1); see the end of ")
    assert line.endswith("build.log above, or set JAEGER_BIN to a Jaeger v2 program")
