"""A run that is cut short leaves a bundle that says what is missing, and --resume goes on with it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from protocol.fake_sglang import FakeSglang

from kvwitness.tracer.bundle import open_bundle, verify_bundle
from kvwitness.tracer.cli import driving

from .conftest import Command

SMALL = ("--prefix-tokens", "320", "--warmups", "0", "--seed", "5", "--repeats", "3")


def _terminable() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_sigterm_leaves_a_bundle_and_resume_ends_it(kvwitness: Command, program: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FakeSglang(device_tokens=1024) as server:

        def hang(number: int) -> None:
            server.faults = {"B": "hang"} if number == 9 else {}

        server.before_post = hang
        command = [*program, "run", "abc", "--url", server.url, "--out", str(out), *SMALL]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_terminable
        ) as process:
            assert server.hanging.wait(60)
            process.terminate()
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "missing: 2 of 3 rounds" in stderr
        assert f"--resume {out}`" in stderr
        assert verify_bundle(out).ok
        assert open_bundle(out).environment["run"]["missing_rounds"] == [1, 2]
        assert "missing: 2 of 3 rounds" in (out / "summary.md").read_text()
        server.released.set()

        result = kvwitness("run", "abc", "--url", server.url, "--resume", out)
        assert result.exit_code == 0, result.stderr
        assert "(round 2 of 3 again)" in result.stderr and "(round 3 of 3)" in result.stderr
        bundle = open_bundle(out)
        assert verify_bundle(out).ok
        assert len({one.round for one in bundle.requests if one.series == "C"}) == 3
        assert [one.error for one in bundle.requests if one.error] == ["interrupted by the user"]
        run = bundle.environment["run"]
        assert run["missing_rounds"] == [] and run["stopped"] == "no, it reached its end"
        assert len(run["earlier_parts"]) == 1 and "interrupted by the user" in run["earlier_parts"][0]

        again = kvwitness("run", "abc", "--url", server.url, "--resume", out)
        assert again.exit_code == 2
        assert "all of its rounds are complete" in again.stderr


def cut_short(kvwitness: Command, server: FakeSglang, out: Path) -> None:
    """A run whose second round ends with the server."""

    def cut(number: int) -> None:
        server.faults = {"B": "500", "A": "500", "evict": "500", "C": "500"} if number > 7 else {}

    server.before_post = cut
    assert kvwitness("run", "abc", "--url", server.url, "--out", out, *SMALL).exit_code == 1
    server.before_post = lambda number: None
    server.faults = {}


def test_resume_refuses_what_would_not_belong_together(kvwitness: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FakeSglang(device_tokens=1024) as server:
        cut_short(kvwitness, server, out)
        for args, said in (
            (("--seed", "6"), "--seed: a resumed run keeps its own"),
            (("--repeats", "9"), "--repeats: a resumed run keeps its own"),
        ):
            result = kvwitness("run", "abc", "--url", server.url, "--resume", out, *args)
            assert result.exit_code == 2 and said in result.stderr
        server.info = {"hicache_ratio": 2.0}
        result = kvwitness("run", "abc", "--url", server.url, "--resume", out)
        assert result.exit_code == 2
        assert "other settings than in the run's earlier part (hicache_ratio: 16.0 and 2.0)" in result.stderr
        server.info = {}
        (out / "requests.jsonl").write_bytes(b"")
        result = kvwitness("run", "abc", "--url", server.url, "--resume", out)
        assert result.exit_code == 2 and "it was changed" in result.stderr
        result = kvwitness("run", "abc", "--url", server.url, "--resume", tmp_path / "nothing")
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1


def test_journals_of_the_earlier_part_come_along(kvwitness: Command, data: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "out", tmp_path / "more"
    with FakeSglang(device_tokens=1024) as server:

        def cut(number: int) -> None:
            server.faults = {"A": "500", "B": "500", "evict": "500", "C": "500"} if number > 7 else {}

        server.before_post = cut
        kvwitness("run", "abc", "--url", server.url, "--out", out, *SMALL, "--dir", data)
        before = {path.name for path in (out / "journals").iterdir()}
        server.before_post = lambda number: None
        server.faults = {}
        result = kvwitness("run", "abc", "--url", server.url, "--resume", out, "--out", more)
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in (more / "journals").iterdir()} == before
    assert verify_bundle(out).ok and verify_bundle(more).ok


def test_a_control_that_is_none_is_refused_before_the_first_request(kvwitness: Command, tmp_path: Path) -> None:
    with FakeSglang() as server, FakeSglang() as other:
        args = ("run", "abc", "--url", server.url, "--out", tmp_path / "out", "--control-url", other.url)
        result = kvwitness(*args)
        assert result.exit_code == 2
        assert "HiCache on: start it without --enable-hierarchical-cache" in result.stderr
        flush = kvwitness(*args, "--flush")
        assert flush.exit_code == 2 and "flushes no cache" in flush.stderr
        assert server.generated == [] and other.generated == []


def test_a_control_that_does_not_start_costs_the_control_alone(kvwitness: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FakeSglang(device_tokens=1024) as server:
        command = "sh -c 'echo cannot bind; exit 3' --port 1"
        args = ("--prefix-tokens", 320, "--control-cmd", command, "--json")
        result = kvwitness("run", "abc", "--url", server.url, "--out", out, *args)
        assert result.exit_code == 1
        assert "cannot bind" in result.stderr
        assert "the control server ended with status 3" in json.loads(result.stdout)["control"]
        assert verify_bundle(out).ok
        assert not (out / "control").exists()
        sent = len(server.generated)
        with FakeSglang(device_tokens=1024, hicache=False) as other:
            again = kvwitness("run", "abc", "--url", server.url, "--resume", out, "--control-url", other.url)
        assert again.exit_code == 0, again.stderr
        assert len(server.generated) == sent, "only the control was missing"
    assert verify_bundle(out).ok and (out / "control").exists()


def test_a_control_is_a_bundle_within_the_bundle(kvwitness: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FakeSglang(device_tokens=1024) as server, FakeSglang(device_tokens=1024, hicache=False) as other:
        result = kvwitness("run", "abc", "--url", server.url, "--out", out, *SMALL, "--control-url", other.url)
    assert result.exit_code == 0, result.stderr
    assert verify_bundle(out).ok and verify_bundle(out / "control").ok
    mine, theirs = open_bundle(out), open_bundle(out / "control")
    assert [one.prompt_sha256 for one in mine.requests] == [one.prompt_sha256 for one in theirs.requests]
    assert mine.environment["run"]["control"] == driving.CONTROLLED
    assert theirs.environment["run"]["options"]["control"] is True


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("this user may mount nothing")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_leaves_a_bundle_without_journals(
    kvwitness: Command, data: Path, small_disk: Path
) -> None:
    out = small_disk / "out"
    with FakeSglang(device_tokens=1024) as server:

        def fill(number: int) -> None:
            if number == 3:
                with (small_disk / "others").open("wb", buffering=0) as file:
                    try:
                        while True:
                            file.write(b"x" * 4096)
                    except OSError:
                        pass

        server.before_post = fill
        result = kvwitness("run", "abc", "--url", server.url, "--out", out, *SMALL, "--dir", data)
    assert f"bundle: {out}" in result.stdout, result.stderr
    assert verify_bundle(out).ok
    bundle = open_bundle(out)
    assert len([one for one in bundle.requests if one.series == "C"]) == 3
    skipped = bundle.manifest.skipped_journals
    assert len(skipped) == 2 and all("the disk was full; it is still" in one.reason for one in skipped)
    assert [path.name for path in small_disk.iterdir() if "spare" in path.name] == []


def test_options_are_checked_in_one_line(kvwitness: Command, tmp_path: Path) -> None:
    questions = tmp_path / "q.yaml"
    questions.write_text("questions: [one]")
    url = "http://127.0.0.1:1"
    for args, said in (
        (("abc", "--url", url), "there is no place for the bundle"),
        (("abc", "--url", url, "--out", tmp_path / "o", "--document", tmp_path / "no"), "it cannot be read"),
        (("abc", "--url", url, "--out", tmp_path / "o", "--questions", questions), "B needs another question"),
        (("abc", "--url", url, "--out", tmp_path / "o", "--control-cmd", "'"), "it is no command"),
        (("abc", "--url", url, "--out", tmp_path / "o", "--control-url", "host"), "not the address of a server"),
        (("sweep", "--url", url, "--out", tmp_path / "o", "--lengths", "12"), "a sweep needs two lengths"),
    ):
        result = kvwitness("run", *args)
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ") and said in line


def test_a_sweep_prints_its_answer(kvwitness: Command, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    with FakeSglang(device_tokens=2048) as server:
        args = ("--lengths", "64,256", "--repeats", "2", "--warmups", "0")
        result = kvwitness("run", "sweep", "--url", server.url, "--out", out, *args)
    assert result.exit_code == 0, result.stderr
    assert "It was not shown that an L2 read pays at any length up to 256 tokens." in result.stdout
    assert open_bundle(out).environment["run"]["protocol"] == "sweep"
