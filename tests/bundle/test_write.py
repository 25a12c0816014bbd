"""Writing: what is in a bundle, and what is kept when something fails."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from kvwitness.tracer.bundle import (
    BundleError,
    BundleInputs,
    check_destination,
    open_bundle,
    read_bundle_journals,
    read_bundle_spans,
    verify_bundle,
    write_bundle,
)

from .runs import CREATED, RECORDS


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_round_trip(bundle: Path) -> None:
    report = verify_bundle(bundle)
    assert report.problems == ()
    assert report.ok
    assert report.verdicts == 4
    opened = open_bundle(bundle)
    assert opened.changed == ()
    assert opened.requests == RECORDS
    assert opened.environment["sglang"] == "0.5.23"
    assert [verdict.tokens.l2 for verdict in opened.verdicts if verdict.rid == "abc-c-1"] == [64]
    assert {journal.role for journal in read_bundle_journals(bundle)} == {"scheduler", "http"}
    assert read_bundle_spans(bundle) == b'{"resourceSpans":[]}\n'


def test_layout(folder: Path) -> None:
    names = contents(folder).keys()
    assert {
        "manifest.json",
        "manifest.sha256",
        "environment.json",
        "requests.jsonl",
        "verdicts.json",
        "spans.otlp.jsonl",
        "summary.md",
        "statement.json",
        "ro-crate-metadata.json",
        "metrics/before.prom",
        "metrics/after.prom",
    } < names
    assert sum(name.startswith("journals/") and name.endswith(".kvwj") for name in names) == 2
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [entry["path"] for entry in manifest["files"]] == sorted(
        names - {"manifest.json", "manifest.sha256", "statement.json"}
    )
    assert manifest["created"] == CREATED
    subprocess.run(["sha256sum", "--check", "--quiet", "manifest.sha256"], cwd=folder, check=True)


def test_summary_tells_the_run(folder: Path) -> None:
    text = (folder / "summary.md").read_text()
    assert "| abc-c-1 | C | 100 | 0 | 64 | 0 | 36 | reported | L2 reported |" in text
    assert "attach the hooks before the run" in text
    assert "C (abc-c-1)" in text
    assert "| server.page_size | 16 |" in text
    assert "unknown" in text


def test_same_inputs_give_the_same_bytes(tmp_path: Path, inputs: BundleInputs) -> None:
    one = write_bundle(tmp_path / "one", inputs).path
    two = write_bundle(tmp_path / "two", inputs).path
    assert contents(one) == contents(two)
    assert (
        write_bundle(tmp_path / "one.zip", inputs).path.read_bytes()
        == write_bundle(tmp_path / "two.zip", inputs).path.read_bytes()
    )


def test_spans_and_metrics_are_optional(tmp_path: Path, inputs: BundleInputs) -> None:
    bare = msgspec.structs.replace(inputs, metrics={})
    path = write_bundle(tmp_path / "bare", bare).path
    assert not (path / "metrics").exists()
    assert read_bundle_spans(path) is None
    assert verify_bundle(path).ok


def test_no_temporary_folder_stays(tmp_path: Path, bundle: Path) -> None:
    assert {path.name for path in tmp_path.iterdir()} == {"data", bundle.name}


@pytest.mark.parametrize("name", ["bundle", "bundle.zip"])
def test_an_existing_destination_is_refused_unless_told(tmp_path: Path, inputs: BundleInputs, name: str) -> None:
    path = tmp_path / name
    write_bundle(path, inputs)
    with pytest.raises(BundleError, match="something is there already"):
        write_bundle(path, inputs)
    with pytest.raises(BundleError):
        check_destination(path)
    changed = msgspec.structs.replace(inputs, environment={"new": True})
    write_bundle(path, changed, replace=True)
    assert open_bundle(path).environment == {"new": True}
    assert verify_bundle(path).ok
    assert {one.name for one in tmp_path.iterdir()} == {"data", name}


def test_replacing_spares_what_is_not_a_bundle(tmp_path: Path, inputs: BundleInputs) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    notes = tmp_path / "notes.txt"
    notes.write_text("notes")
    for path in (precious, notes):
        with pytest.raises(BundleError, match="not a bundle"):
            write_bundle(path, inputs, replace=True)
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert notes.read_text() == "notes"


def test_an_empty_destination_is_used(tmp_path: Path, inputs: BundleInputs) -> None:
    (tmp_path / "empty").mkdir()
    assert verify_bundle(write_bundle(tmp_path / "empty", inputs).path).ok


def test_a_failure_midway_loses_nothing(tmp_path: Path, inputs: BundleInputs) -> None:
    def broken(judged: object, records: object) -> list[str]:
        raise RuntimeError("no spans\ntoday")

    destination = tmp_path / "bundle"
    with pytest.raises(BundleError, match="no spans today") as caught:
        write_bundle(destination, inputs, spans=broken)
    assert not destination.exists()
    (partial,) = tmp_path.glob(".bundle.partial-*")
    assert str(partial) in str(caught.value)
    assert str(inputs.journals[0].parent) in str(caught.value)
    assert len((partial / "requests.jsonl").read_text().splitlines()) == len(RECORDS)
    assert all(path.is_file() for path in inputs.journals)


def test_a_failure_keeps_the_bundle_that_was_to_be_replaced(
    tmp_path: Path, inputs: BundleInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bundle(tmp_path / "bundle", inputs).path
    before = contents(path)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(BundleError, match="No space left"):
        write_bundle(path, inputs, replace=True)
    assert contents(path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_place_is_named_before_the_run(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BundleError, match="nothing can be written"):
        check_destination(tmp_path / "deep" / "bundle")


def test_a_stray_file_among_the_journals_is_noted(tmp_path: Path, inputs: BundleInputs) -> None:
    stray = tmp_path / "data" / "stray.kvwj"
    stray.write_bytes(b"")
    info = write_bundle(tmp_path / "bundle", msgspec.structs.replace(inputs, journals=(*inputs.journals, stray)))
    assert [one.name for one in info.manifest.skipped_journals] == ["stray.kvwj"]
    assert "stray.kvwj" in (info.path / "summary.md").read_text()
    assert verify_bundle(info.path).ok
