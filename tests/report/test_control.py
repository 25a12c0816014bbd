"""The control in the report: it confirms only when the same load without HiCache recomputed what C reused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvwitness.tracer.bundle import BundleInputs, verify_bundle
from kvwitness.tracer.report.load import load_evidence
from kvwitness.tracer.report.outcome import outcome_of

from .pages import markdown_of, page_of
from .runs import ENVIRONMENT, abc_records, bundle_of, control_of_abc, record, server_info

CONTROLLED = "controlled: the same load without HiCache recomputed what C reused"


def with_control(path: Path, control: BundleInputs | None, **more: Any) -> Path:
    return bundle_of(path, environment={**ENVIRONMENT, **server_info()}, control=control, **more)


def test_confirmed_and_controlled(tmp_path: Path) -> None:
    path = with_control(tmp_path / "b", control_of_abc())
    assert verify_bundle(path).ok
    page = page_of(path)
    claim = page.text("claim")
    assert "confirmed for 1 of 1 requests of series C" in claim and CONTROLLED in claim
    assert "by the control server's own answers" in claim
    assert "Grade: confirmed, controlled" in claim
    assert "holds no control run" not in page.text("not_claimed")
    assert [row[0] for row in page.tables["control-table"]] == ["Series", "A", "B", "C"]
    assert "-350.0" in page.tables["control-table"][3][3]
    assert CONTROLLED in markdown_of(path)
    assert "с контролем" in page_of(path, "ru").text("claim")


def test_without_a_control_nothing_is_controlled(bundle: Path) -> None:
    page = page_of(bundle)
    assert "controlled" not in page.text("claim")
    assert "this bundle holds no control run" in page.text("not_claimed")
    assert "control-table" not in page.tables


def reusing() -> BundleInputs:
    inputs = control_of_abc()
    records = [
        msgspec.structs.replace(one, cached_tokens=1488) if one.series == "C" else one for one in inputs.requests
    ]
    return msgspec.structs.replace(inputs, requests=tuple(records))


def silent() -> BundleInputs:
    inputs = control_of_abc()
    records = [
        msgspec.structs.replace(one, cached_tokens=None) if one.series == "C" else one for one in inputs.requests
    ]
    return msgspec.structs.replace(inputs, requests=tuple(records))


def shortened() -> BundleInputs:
    inputs = control_of_abc()
    return msgspec.structs.replace(inputs, requests=tuple(one for one in inputs.requests if one.series != "A"))


def without_fills() -> BundleInputs:
    inputs = control_of_abc()
    return msgspec.structs.replace(inputs, requests=tuple(one for one in inputs.requests if one.series != "evict"))


def out_of_order() -> BundleInputs:
    inputs = control_of_abc()
    ordered = [msgspec.structs.replace(one, order=50 - one.order) for one in inputs.requests]
    return msgspec.structs.replace(inputs, requests=tuple(ordered))


@pytest.mark.parametrize(
    ("control", "said"),
    [
        (reusing(), "without HiCache it reused tokens of C as well (1 of 1 requests)"),
        (silent(), "it does not say what it reused"),
        (shortened(), "it did not get the same load"),
        (without_fills(), "it did not get the same load"),
        (out_of_order(), "it did not get the same load"),
        (control_of_abc(page_size=64), "its settings differ in more than HiCache"),
        (control_of_abc(enable_hierarchical_cache=True), "its settings differ in more than HiCache"),
        (msgspec.structs.replace(control_of_abc(), environment={}), "its settings differ in more than HiCache"),
    ],
)
def test_a_control_that_shows_nothing(tmp_path: Path, control: BundleInputs, said: str) -> None:
    path = with_control(tmp_path / "b", control)
    page = page_of(path)
    assert "confirmed for 1 of 1 requests of series C" in page.text("claim")
    assert "controlled" not in page.text("claim")
    assert said in page.text("not_claimed")
    assert "it shows nothing" in page.text("control")
    assert outcome_of(load_evidence(path)).controlled is False


def test_a_control_does_not_make_up_for_a_claim_that_is_missing(tmp_path: Path) -> None:
    path = with_control(tmp_path / "b", control_of_abc(), journals=())
    page = page_of(path)
    assert "Grade: reported" in page.text("claim") and "controlled" not in page.text("claim")
    assert "Not that the control confirms the claim" in page.text("not_claimed")


@pytest.mark.parametrize("name", ["requests.jsonl", "verdicts.json", "manifest.json"])
def test_a_control_that_was_changed_spoils_the_bundle(tmp_path: Path, name: str) -> None:
    path = with_control(tmp_path / "b", control_of_abc())
    target = path / "control" / name
    target.write_bytes(b" " + target.read_bytes())
    report = verify_bundle(path)
    assert not report.ok
    assert any(one.path == f"control/{name}" for one in report.problems)
    assert "Nothing is claimed" in page_of(path).text("claim")


def test_in_a_zip_as_well(tmp_path: Path) -> None:
    path = with_control(tmp_path / "b.zip", control_of_abc())
    assert verify_bundle(path).ok
    assert CONTROLLED in page_of(path).text("claim")


# --- what the run itself noticed -----------------------------------------------------------------------


def test_settings_that_the_run_saw_change(tmp_path: Path) -> None:
    change = {"after": "after A", "before": "after B", "name": "hicache_ratio", "one": "4.0", "other": "2.0"}
    run = {**ENVIRONMENT["run"], "settings_read": {"changes": [change]}, "stopped": "the server's settings changed"}
    path = bundle_of(tmp_path / "b", environment={**ENVIRONMENT, "run": run})
    page = page_of(path)
    assert "The experiment failed, and nothing is claimed." in page.text("claim")
    assert "restarted with other settings" in page.text("claim")
    assert ["hicache_ratio", "4.0", "2.0"] in page.tables[""]
    assert "difference-table" not in page.tables
    assert "The series are not compared" in page.text("timing")


def test_an_eviction_by_size_is_said(tmp_path: Path) -> None:
    evictions = [{"fills": 4, "decided_by": "size"}, {"fills": 3, "decided_by": "observer"}]
    run = {**ENVIRONMENT["run"], "evictions": evictions}
    path = bundle_of(tmp_path / "b", journals=(), environment={**ENVIRONMENT, "run": run})
    assert "the eviction was sized from the pools (4 unrelated prompts)" in page_of(path).text("claim")


# --- answers -------------------------------------------------------------------------------------------


def test_faster_and_wrong_is_wrong(tmp_path: Path) -> None:
    from kvwitness.tracer.protocol.quality import Kind, Reference

    right, wrong = Reference(Kind.CONTAINS, "ok"), Reference(Kind.EXACT, "no")
    records = [
        msgspec.structs.replace(one, reference={"A": right, "C": wrong}.get(one.series), correct=True)
        for one in abc_records()
    ]
    path = bundle_of(tmp_path / "b", records)
    page = page_of(path)
    assert "WRONG: 1 of 1 answers of C are not what their references say (of A: 0 of 1)" in page.text("claim")
    assert ["C", "1", "0", "length 1", "0 of 1"] in page.tables["answers-table"]
    assert "expected 'no', found 'ok'" in page.tables["wrong-table"][1][2]
    assert json.dumps(page.tables["answers-table"]).count("no reference") == 4


def test_errors_and_ends_are_counted(tmp_path: Path) -> None:
    failed = record("kvw-bad", "A", 90, error="HTTP 500", finish_reason=None)
    page = page_of(bundle_of(tmp_path / "b", [*abc_records(), failed]))
    assert ["A", "2", "1", "length 1", "no reference"] in page.tables["answers-table"]


def test_texts_are_compared_where_there_are_no_tokens(tmp_path: Path) -> None:
    records = [msgspec.structs.replace(one, output_ids=()) for one in abc_records()]
    assert "Answers: the texts of 1 of 1 requests of C" in page_of(bundle_of(tmp_path / "b", records)).text("claim")
