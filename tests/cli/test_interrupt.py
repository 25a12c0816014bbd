"""Ctrl-C and a server that dies during `kvwitness run abc`: what was recorded becomes a bundle."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from protocol.fake_sglang import FakeSglang

from kvwitness.tracer.bundle import Bundle, open_bundle, verify_bundle
from kvwitness.tracer.interrupt import finishing

from .conftest import Command


def _may_be_interrupted() -> None:
    """A job in the background of a shell ignores Ctrl-C, and so would everything that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def arguments(server: FakeSglang, out: Path) -> list[str]:
    return ["run", "abc", "--url", server.url, "--out", str(out), "--seed", "5", "--warmups", "0"]


def series(bundle: Bundle) -> list[str]:
    return [record.series for record in bundle.requests]


def test_ctrl_c_leaves_a_bundle_that_says_so(kvwitness: Command, program: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FakeSglang(faults={"B": "hang"}) as server:
        command = [*program, *arguments(server, out)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_may_be_interrupted
        ) as process:
            assert server.hanging.wait(30)
            time.sleep(0.2)  # for the client to read the first token
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"bundle: {out}" in stdout
    assert "the run did not reach its end: interrupted by the user after 2 requests" in stderr
    assert "Traceback" not in stderr
    # As the command does: the judge of this process's tests is not the one that the bundle was written with.
    subprocess.run([*program, "verify", str(out)], check=True, capture_output=True)
    bundle = open_bundle(out)
    assert series(bundle) == ["A", "B"]
    assert bundle.requests[0].error is None
    assert bundle.requests[1].error == "interrupted by the user"
    assert len(bundle.requests[1].output_ids) == 1  # also of the request that was cut short nothing is lost
    assert "interrupted by the user after 2 requests" in (out / "summary.md").read_text()
    shown = kvwitness("show", out)
    assert shown.exit_code == 0
    assert "the run did not reach its end: interrupted by the user" in shown.stderr


def test_ctrl_c_before_the_first_request_leaves_nothing(program: list[str], tmp_path: Path) -> None:
    with FakeSglang(info={"page_size": 16}) as server:
        held = threading.Event()
        answer = server._get

        def slow(handler: object) -> None:
            held.set()
            server.released.wait(30)
            answer(handler)  # type: ignore[arg-type]

        server._get = slow  # type: ignore[method-assign, assignment]
        command = [*program, *arguments(server, tmp_path / "out")]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_may_be_interrupted
        ) as process:
            assert held.wait(30)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "kvwitness: interrupted"
    assert not (tmp_path / "out").exists()


def test_a_server_that_dies_leaves_a_bundle(kvwitness: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FakeSglang() as server:
        ended = threading.Event()
        post = server._post

        def dying(handler: object) -> None:
            if len(server.generated) == 2:
                ended.set()
                server._http.server_close()
                handler.connection.shutdown(2)  # type: ignore[attr-defined]
                return
            post(handler)  # type: ignore[arg-type]

        server._post = dying  # type: ignore[method-assign, assignment]
        result = kvwitness(*arguments(server, out))
    assert ended.is_set()
    assert result.exit_code == 1
    assert "the run did not reach its end: request 2 (evict) failed: the connection failed" in result.stderr
    assert "[Errno" not in result.stderr
    assert verify_bundle(out).ok
    assert series(open_bundle(out)) == ["A", "B", "evict"]


def test_ctrl_c_while_the_bundle_is_written_is_only_answered() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with finishing(said.append):
        os.kill(os.getpid(), signal.SIGINT)
    assert said == ["the bundle is being written, which takes seconds"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_that_cannot_be_printed_does_not_stop_the_writing() -> None:
    def say(_line: str) -> None:
        raise RuntimeError("reentrant call inside a writer")

    with finishing(say):
        os.kill(os.getpid(), signal.SIGINT)
