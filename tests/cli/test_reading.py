"""The commands that look at evidence: show, explain, verify."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from bundle.forging import reseal
from bundle.runs import record_journal

from kvwitness.tracer.bundle import BundleInputs, write_bundle
from kvwitness.tracer.model import EventRef, LoadBack

from .conftest import Command


def test_show_a_bundle(kvwitness: Command, bundle: Path) -> None:
    result = kvwitness("show", bundle)
    assert result.exit_code == 0
    head, *lines = [line for line in result.stdout.splitlines() if line.strip() and "─" not in line]
    names = ["request", "series", "prompt", "L1", "L2", "L3", "recomputed", "grade", "sentence"]
    assert head.split() == names
    assert lines[2].split() == ["abc-c-1", "C", "100", "0", "64", "0", "36", "reported", "L2", "reported"]
    assert lines[3].split()[0] == "other"


def test_show_a_folder_of_journals(kvwitness: Command, data: Path) -> None:
    rows = json.loads(kvwitness("show", data, "--json").stdout)["requests"]
    assert [row["request"] for row in rows] == ["other", "abc-a-1", "abc-b-1", "abc-c-1"]


def test_health_checks_are_left_out_and_counted(kvwitness: Command, tmp_path: Path) -> None:
    data = tmp_path / "checked"
    record_journal(data, ["HEALTH_CHECK_1", "mine", "HEALTH_CHECK_2"])
    result = kvwitness("show", data)
    assert "mine" in result.stdout and "HEALTH_CHECK" not in result.stdout
    assert result.stderr == "left out: 2 health checks of the server itself (--all shows them)\n"
    everything = kvwitness("show", data, "--all")
    assert "HEALTH_CHECK_2" in everything.stdout
    assert everything.stderr == ""
    assert len(json.loads(kvwitness("show", data, "--json").stdout)["requests"]) == 3


def test_a_server_that_was_only_checked_has_no_requests_yet(kvwitness: Command, tmp_path: Path) -> None:
    record_journal(tmp_path / "checked", ["HEALTH_CHECK_1"])
    result = kvwitness("show", tmp_path / "checked")
    assert result.stdout.startswith("no requests yet in ")
    assert result.stderr == "left out: 1 health check of the server itself (--all shows them)\n"


def test_bundles_kept_beside_the_journals_are_not_counted_twice(kvwitness: Command, data: Path) -> None:
    write_bundle(data / "bundle", BundleInputs(journals=tuple(data.glob("*.kvwj"))))
    rows = json.loads(kvwitness("show", data, "--json").stdout)["requests"]
    assert len(rows) == 4


@pytest.mark.parametrize("rid", ["abc-c-1", "abc-c", "C"])
def test_explain(kvwitness: Command, bundle: Path, rid: str) -> None:
    result = kvwitness("explain", bundle, "--rid", rid)
    assert result.exit_code == 0
    text = result.stdout
    assert text.startswith("L2 reported\n")
    assert "request abc-c-1, 100 prompt tokens" in text
    assert "cache epoch 0 (since the last flush or start)" in text
    assert "by the server" in text
    assert "seen     born  queued  [Queued 6]" in text
    assert "MISSING  read  no load was seen" in text
    assert "to obtain read: attach the hooks before the run" in text
    assert "cached_tokens_details" in text
    assert "agrees" in text


def test_a_load_is_named_by_its_event(kvwitness: Command, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bundle.runs import simple_judge

    from kvwitness.tracer.judgement import Judgement

    load = LoadBack(12, 1504, 1504, 4096, 1_000_000, 2_000_000, 3_000_000, None, (EventRef("i", 175, "LoadQueued"),))

    def judge(*args: object) -> Judgement:
        verdicts = simple_judge(*args).verdicts  # type: ignore[arg-type]
        return Judgement((), tuple(msgspec.structs.replace(one, load_backs=(load,)) for one in verdicts))

    monkeypatch.setattr("kvwitness.tracer.judgement.judge", judge)
    text = kvwitness("explain", data, "--rid", "other").stdout
    assert "load queued by event 175: 1504 tokens from L2, 4096 bytes, done 2.00 ms later  [LoadQueued 175" in text


def test_explain_prints_brackets_as_they_are(kvwitness: Command, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bundle.runs import simple_judge

    from kvwitness.tracer.judgement import Judgement

    def judge(*args: object) -> Judgement:
        verdicts = simple_judge(*args).verdicts  # type: ignore[arg-type]
        return Judgement((), tuple(msgspec.structs.replace(one, notes=("slots [0:93] [/bold]",)) for one in verdicts))

    monkeypatch.setattr("kvwitness.tracer.judgement.judge", judge)
    assert "note: slots [0:93] [/bold]" in kvwitness("explain", data, "--rid", "other").stdout


def test_a_changed_bundle_is_shown_as_not_verified(kvwitness: Command, bundle: Path) -> None:
    (bundle / "summary.md").write_text("all fine")
    for args in (("show", bundle), ("explain", bundle, "--rid", "A")):
        result = kvwitness(*args)
        assert result.exit_code == 1
        assert "this bundle does not verify" in result.stderr
        assert "summary.md" in result.stderr
        assert "NOT VERIFIED" in " ".join(result.stdout.split())
    assert json.loads(kvwitness("show", bundle, "--json").stdout)["intact"] is False


def test_a_forged_verdict_is_not_shown_as_proven(kvwitness: Command, bundle: Path) -> None:
    """With every hash made to fit: only judging again tells."""
    path = bundle / "verdicts.json"
    path.write_bytes(path.read_bytes().replace(b"L2 reported", b"L2 read confirmed"))
    reseal(bundle)
    result = kvwitness("explain", bundle, "--rid", "C")
    assert result.exit_code == 1
    assert "verdicts.json" in result.stderr
    assert result.stdout.startswith("NOT VERIFIED: L2 read confirmed")


def test_a_bundle_without_its_manifest_is_named_as_such(kvwitness: Command, bundle: Path) -> None:
    (bundle / "manifest.json").unlink()
    result = kvwitness("show", bundle)
    assert result.exit_code == 2
    assert "not a complete bundle" in result.stderr


def test_verify(kvwitness: Command, bundle: Path) -> None:
    result = kvwitness("verify", bundle)
    assert result.exit_code == 0
    assert result.stdout.startswith("ok: ")
    (bundle / "requests.jsonl").write_text("")
    (bundle / "extra").write_text("")
    (bundle / "metrics" / "after.prom").unlink()
    result = kvwitness("verify", bundle)
    assert result.exit_code == 1
    for name in ("changed: requests.jsonl", "added: extra", "missing: metrics/after.prom", "verdict: verdicts.json"):
        assert name in result.stdout
    report = json.loads(kvwitness("verify", bundle, "--json").stdout)
    assert report["ok"] is False
    assert {problem["kind"] for problem in report["problems"]} == {"changed", "added", "missing", "verdict"}
