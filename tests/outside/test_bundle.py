"""A recording from outside as a bundle: what it shows, what its report says, and what a change of it costs."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvwitness.collectors.environment import ServerProcesses, host_facts
from kvwitness.tracer.bundle.environment import environment_of_recording
from kvwitness.tracer.bundle.layout import MANIFEST, MANIFEST_HASH
from kvwitness.tracer.bundle.verify import verify_bundle
from kvwitness.tracer.bundle.write import BundleInputs, write_bundle
from kvwitness.tracer.cli.application import application
from kvwitness.tracer.outside import counting
from kvwitness.tracer.outside.records import (
    HOST,
    KV_EVENTS,
    METRICS_LINES,
    RECORDING,
    SERVER,
    Counted,
    End,
    Head,
    HostReading,
    Line,
    Server,
)

from .recorded import DATA, messages

S = 10**9


def recording() -> dict[str, bytes]:
    kv = messages("0.5.23")
    first, last = kv[0].batch.at_ns - 5 * S, kv[-1].batch.at_ns + 5 * S
    gained = {counting.CACHED_HOST: 4464.0, counting.LOADED: 4464.0, counting.EVICTED: 18080.0}
    facts = {"version": "0.5.23", "max_total_num_tokens": 4096}
    files: dict[str, tuple[Line, ...]] = {
        RECORDING: (Head("http://127.0.0.1:30000", "0.1", first, 1.0, True, {}), End(last, "ended by the user")),
        KV_EVENTS: kv,
        METRICS_LINES: (Counted(first, last, False, gained, {}),),
        SERVER: (Server(first, dict(facts), ()),),
        HOST: (HostReading(first, 2 << 30, 0, None), HostReading(last, 1 << 30, 0, None)),
    }
    return {name: b"".join(msgspec.json.encode(line) + b"\n" for line in lines) for name, lines in files.items()}


def bundle(tmp_path: Path, *, hooks: bool = False) -> Path:
    journals: tuple[Path, ...] = ()
    if hooks:
        journal = tmp_path / "scheduler-1-1.kvwj"
        journal.write_bytes(lzma.decompress((DATA / "0.5.23.kvwj.xz").read_bytes()))
        journals = (journal,)
    files = recording()
    environment = environment_of_recording(files, "ended", host_facts(), ServerProcesses(()))
    return write_bundle(tmp_path / "b", BundleInputs(journals, environment=environment, witnesses=files)).path


def kvwitness(*arguments: object) -> str:
    done = CliRunner().invoke(application, [str(one) for one in arguments], prog_name="kvwitness")
    assert done.exit_code == 0, done.output
    return done.output


def test_show_and_report_say_that_it_is_the_servers_word(tmp_path: Path) -> None:
    path = bundle(tmp_path)
    assert verify_bundle(path).ok
    shown = kvwitness("show", path)
    assert "L2 reads of 4464 tokens reported by the server, not confirmed" in shown
    assert "kvwitness attach --url http://127.0.0.1:30000" in shown
    out = tmp_path / "report.md"
    kvwitness("report", path, "--format", "md", "--out", out)
    text = out.read_text()
    assert "came from: L2 4464. Reported by the server, not confirmed: nobody looked inside it." in text
    assert "kvwitness attach --url http://127.0.0.1:30000" in text
    assert "18080 tokens by the counters" in text and "18080 tokens by the KV events" in text
    memory = json.loads((path / "environment.json").read_text())["recording"]
    assert (memory["memory_before"]["available"], memory["memory_after"]["available"]) == (2 << 30, 1 << 30)


def test_with_journals_both_ledgers_are_compared(tmp_path: Path) -> None:
    path = bundle(tmp_path, hooks=True)
    assert verify_bundle(path).ok
    assert "KV events and hooks agree: 1337 stays in L1 and 1055 stays in L2" in kvwitness("show", path)


@pytest.mark.parametrize("name", ["witnesses/derived.json", f"witnesses/{METRICS_LINES}"])
def test_what_does_not_follow_from_the_witnesses_is_named(tmp_path: Path, name: str) -> None:
    """Also where somebody has made the manifest fit."""
    path = bundle(tmp_path)
    changed = (path / name).read_bytes().replace(b"4464", b"9999")
    (path / name).write_bytes(changed)
    manifest = json.loads((path / MANIFEST).read_bytes())
    for entry in manifest["files"]:
        if entry["path"] == name:
            entry.update(sha256=hashlib.sha256(changed).hexdigest(), bytes=len(changed))
    raw = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    (path / MANIFEST).write_bytes(raw)
    (path / MANIFEST_HASH).write_text(f"{hashlib.sha256(raw).hexdigest()}  {MANIFEST}\n")
    problems = verify_bundle(path).problems
    assert [one.path for one in problems if "does not follow" in one.message] == ["witnesses/derived.json"]


def test_a_recording_that_was_not_finished_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "b.recording"
    folder.mkdir()
    for name, raw in recording().items():
        (folder / name).write_bytes(raw.splitlines(keepends=True)[0] if name == RECORDING else raw)
    shown = kvwitness("show", folder)
    assert "reported by the server, not confirmed" in shown and "the collector was killed" in shown


def test_the_same_witnesses_give_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    path = bundle(tmp_path, hooks=True)
    kept = recording()[KV_EVENTS].splitlines(keepends=True)[12:]
    code = (
        "import sys, hashlib\nfrom pathlib import Path\n"
        "from kvwitness.tracer.bundle.read import read_bundle_journals, read_bundle_witnesses\n"
        "from kvwitness.tracer.bundle.witnesses import derive_outside, encode_outside\n"
        "from kvwitness.tracer.judgement import judge\n"
        "path = Path(sys.argv[1])\njournals = read_bundle_journals(path)\n"
        "files = {**read_bundle_witnesses(path), 'kv-events.jsonl': Path(sys.argv[2]).read_bytes()}\n"
        "found = derive_outside(files, journals, judge(journals).instances)\n"
        "print(len(found.agreements[0].differences), hashlib.sha256(encode_outside(found)).hexdigest())\n"
    )
    (tmp_path / "kv").write_bytes(b"".join(kept))
    said = {
        subprocess.run(
            [sys.executable, "-c", code, str(path), str(tmp_path / "kv")],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1 and not said.pop().startswith("0 "), "there are differences, with an example each"
