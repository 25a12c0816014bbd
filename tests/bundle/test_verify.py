"""Verifying: whatever is changed in a bundle is named, in one line each."""

from __future__ import annotations

import json
import random
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvwitness.tracer.bundle import BundleError, BundleInputs, ProblemKind, VerifyReport, verify_bundle, write_bundle
from kvwitness.tracer.bundle.layout import decode_manifest, entry_of, hash_line

from .forging import SELF, files_of, reseal, write_manifest
from .runs import simple_judge


def names_in(report: VerifyReport) -> set[str]:
    """Every file that the report names, in a path or in a message."""
    lines = "\n".join(str(problem) for problem in report.problems)
    return {name for name in (*files_of_report(report), *SELF) if name in lines}


def files_of_report(report: VerifyReport) -> set[str]:
    return {problem.path for problem in report.problems}


def check_lines(report: VerifyReport) -> None:
    for problem in report.problems:
        line = str(problem)
        assert "\n" not in line
        assert "Traceback" not in line
        assert line.isprintable(), line


def rezip(source: Path, target: Path, change: Callable[[str, bytes], bytes | None] = lambda name, raw: raw) -> Path:
    """Zip a folder with another program's habits; ``change`` may alter files or (None) leave them out."""
    with zipfile.ZipFile(target, "w") as archive:
        for name in files_of(source):
            content = change(name, (source / name).read_bytes())
            if content is not None:
                archive.writestr(name, content)
    return target


@pytest.mark.parametrize("zipped", [False, True])
def test_each_file_changed(folder: Path, tmp_path: Path, zipped: bool) -> None:
    for victim in files_of(folder):
        original = (folder / victim).read_bytes()
        (folder / victim).write_bytes(original + b" ")
        path = rezip(folder, tmp_path / "again.zip") if zipped else folder
        report = verify_bundle(path)
        (folder / victim).write_bytes(original)
        assert not report.ok
        assert victim in names_in(report), report.problems
        check_lines(report)
    assert verify_bundle(folder).ok


@pytest.mark.parametrize("zipped", [False, True])
def test_each_file_removed(folder: Path, tmp_path: Path, zipped: bool) -> None:
    for victim in files_of(folder):
        original = (folder / victim).read_bytes()
        (folder / victim).unlink()
        path = rezip(folder, tmp_path / "again.zip") if zipped else folder
        report = verify_bundle(path)
        (folder / victim).write_bytes(original)
        assert any(one.kind is ProblemKind.MISSING and one.path == victim for one in report.problems), victim
        check_lines(report)


@pytest.mark.parametrize("name", ["extra.txt", "journals/scheduler-1-1.kvwj", "metrics/during.prom"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_added(folder: Path, tmp_path: Path, name: str, zipped: bool) -> None:
    (folder / name).write_bytes(b"new")
    report = verify_bundle(rezip(folder, tmp_path / "again.zip") if zipped else folder)
    assert any(one.kind is ProblemKind.ADDED and one.path == name for one in report.problems)
    check_lines(report)


def test_random_single_byte_changes_in_the_folder(folder: Path) -> None:
    choose = random.Random(20_26)
    names = files_of(folder)
    # Small files would hardly ever be hit by position alone, so the file is drawn first.
    draws = [*names, *(choose.choice(names) for _ in range(50 - len(names)))]
    assert len(draws) == 50
    for name in draws:
        original = (folder / name).read_bytes()
        damaged = bytearray(original)
        damaged[choose.randrange(len(damaged))] ^= choose.randrange(1, 256)
        (folder / name).write_bytes(damaged)
        report = verify_bundle(folder)
        (folder / name).write_bytes(original)
        assert not report.ok, name
        assert name in names_in(report), (name, report.problems)
        check_lines(report)


def test_random_single_byte_changes_in_the_zip(tmp_path: Path, inputs: BundleInputs) -> None:
    path = write_bundle(tmp_path / "bundle.zip", inputs).path
    original = path.read_bytes()
    choose = random.Random(7)
    tail = range(len(original) - 1200, len(original))  # the directory, where most bytes are structure
    spots = [choose.randrange(len(original)) for _ in range(50)] + [choose.choice(tail) for _ in range(150)]
    for at in spots:
        damaged = bytearray(original)
        damaged[at] ^= choose.randrange(1, 256)
        path.write_bytes(damaged)
        report = verify_bundle(path)
        assert not report.ok, at
        assert "bundle.zip" in files_of_report(report)
        check_lines(report)


def test_a_zip_cut_off_anywhere(tmp_path: Path, inputs: BundleInputs) -> None:
    path = write_bundle(tmp_path / "bundle.zip", inputs).path
    original = path.read_bytes()
    for keep in (0, 1, 21, 22, 100, len(original) // 2, len(original) - 90, len(original) - 1):
        path.write_bytes(original[:keep])
        report = verify_bundle(path)
        assert not report.ok
        check_lines(report)


def test_another_programs_zip_of_the_bundle_is_accepted(folder: Path, tmp_path: Path) -> None:
    assert verify_bundle(rezip(folder, tmp_path / "again.zip")).ok
    around = tmp_path / "around"
    around.mkdir()
    shutil.copytree(folder, around / "bundle")
    assert verify_bundle(rezip(around, tmp_path / "around.zip")).ok


# --- forgeries with fitting hashes ---------------------------------------------------------------------


def test_a_forged_verdict_is_found_by_judging_again(folder: Path) -> None:
    verdicts = json.loads((folder / "verdicts.json").read_text())
    victim = next(one for one in verdicts if one["rid"] == "abc-b-1")
    victim["ranges"][0]["grade"] = "confirmed"
    (folder / "verdicts.json").write_text(json.dumps(verdicts))
    reseal(folder)
    (problem,) = verify_bundle(folder).problems
    assert problem.kind is ProblemKind.VERDICT
    assert "abc-b-1" in problem.message
    assert "ranges[0].grade" in problem.message
    assert "'confirmed'" in problem.message
    assert "'reported'" in problem.message


@pytest.mark.parametrize("change", ["dropped", "added"])
def test_a_verdict_more_or_less_is_found(folder: Path, change: str) -> None:
    verdicts = json.loads((folder / "verdicts.json").read_text())
    last = verdicts.pop() if change == "dropped" else verdicts[-1]
    if change == "added":
        verdicts.append(last | {"rid": "ghost"})
    (folder / "verdicts.json").write_text(json.dumps(verdicts))
    reseal(folder)
    (problem,) = verify_bundle(folder).problems
    assert problem.kind is ProblemKind.VERDICT
    assert ("ghost" if change == "added" else last["rid"]) in problem.message


def test_a_forged_request_is_found_by_judging_again(folder: Path) -> None:
    lines = (folder / "requests.jsonl").read_text().replace('"host":64', '"host":80')
    (folder / "requests.jsonl").write_text(lines)
    reseal(folder)
    (problem,) = verify_bundle(folder).problems
    assert "abc-c-1" in problem.message


def test_a_journal_left_out_is_found_by_judging_again(folder: Path) -> None:
    next((folder / "journals").glob("scheduler*")).unlink()
    reseal(folder)
    assert [one.kind for one in verify_bundle(folder).problems] == [ProblemKind.VERDICT]


def test_a_forged_summary_is_found(folder: Path) -> None:
    summary = folder / "summary.md"
    summary.write_text(summary.read_text().replace("L2 reported", "L2 read confirmed"))
    reseal(folder)
    (problem,) = verify_bundle(folder).problems
    assert problem.path == "summary.md"


def test_a_judge_that_fails_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise KeyError("no\nsuch thing")

    monkeypatch.setattr("kvwitness.tracer.judgement.judge", failing)
    report = verify_bundle(folder)
    (problem,) = report.problems
    assert "KeyError" in problem.message
    check_lines(report)


# --- hostile and malformed bundles ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a\\..\\b", "C:/x", "a/./b", "a//b", "", ".", "a\n"])
def test_a_manifest_that_leads_outside(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_bytes(b"secret")
    old = decode_manifest((folder / "manifest.json").read_bytes())
    write_manifest(folder, msgspec.structs.replace(old, files=(*old.files, entry_of(name, b"secret"))))
    report = verify_bundle(folder)
    assert [(one.kind, one.path) for one in report.problems] == [(ProblemKind.UNSAFE, "manifest.json")]
    check_lines(report)


@pytest.mark.parametrize("name", ["../outside", "/abs", "a\\b", "journals/../../x", "journals//x"])
def test_a_zip_entry_that_leads_outside(folder: Path, tmp_path: Path, name: str) -> None:
    path = rezip(folder, tmp_path / "again.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"evil")
    report = verify_bundle(path)
    assert [(one.kind, one.path) for one in report.problems] == [(ProblemKind.UNSAFE, name)]
    assert not (tmp_path.parent / "outside").exists()


def test_a_zip_with_an_entry_twice(folder: Path, tmp_path: Path) -> None:
    path = rezip(folder, tmp_path / "again.zip")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("verdicts.json", b"[]")
    report = verify_bundle(path)
    assert any(one.kind is ProblemKind.UNSAFE and one.path == "verdicts.json" for one in report.problems)


def test_a_link_in_a_zip(folder: Path, tmp_path: Path) -> None:
    path = rezip(folder, tmp_path / "again.zip", lambda name, raw: None if name == "summary.md" else raw)
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo("summary.md")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    report = verify_bundle(path)
    assert [(one.kind, one.path) for one in report.problems] == [(ProblemKind.UNSAFE, "summary.md")]


@pytest.mark.parametrize("victim", ["summary.md", "requests.jsonl", "manifest.json"])
def test_a_link_in_a_folder(folder: Path, victim: str) -> None:
    # The linked file has the right content: it is the link itself that must not pass.
    elsewhere = folder.parent / "elsewhere"
    shutil.move(folder / victim, elsewhere)
    (folder / victim).symlink_to(elsewhere)
    report = verify_bundle(folder)
    assert any(one.kind is ProblemKind.UNSAFE and one.path == victim for one in report.problems)
    assert sum(one.path == victim for one in report.problems) == 1


def test_a_linked_folder_is_not_entered(folder: Path) -> None:
    shutil.move(folder / "metrics", folder.parent / "elsewhere")
    (folder / "metrics").symlink_to(folder.parent / "elsewhere")
    report = verify_bundle(folder)
    assert {one.path for one in report.problems} >= {"metrics", "metrics/before.prom"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"schema":"1"}', b'{"schema":99,"kvwitness":"9",'
     b'"created":"","skipped_journals":[],"files":[]}'],
)  # fmt: skip
def test_a_malformed_manifest(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    (folder / "manifest.sha256").write_bytes(hash_line(content))
    report = verify_bundle(folder)
    assert any(one.kind is ProblemKind.MALFORMED and one.path == "manifest.json" for one in report.problems)
    check_lines(report)


@pytest.mark.parametrize("victim", ["verdicts.json", "requests.jsonl", "environment.json", "journals"])
@pytest.mark.parametrize("content", [b"{", b"\xff", b"7", b"[" * 100_000, b'{"a": "\xed\xa0\x80"}'])
def test_malformed_contents_with_fitting_hashes(folder: Path, victim: str, content: bytes) -> None:
    path = folder / victim
    target = next(path.iterdir()) if path.is_dir() else path
    target.write_bytes(content)
    reseal(folder)
    report = verify_bundle(folder)
    assert report.problems
    assert any(victim in str(one) for one in report.problems)
    check_lines(report)


def test_a_manifest_of_nothing_proves_nothing(folder: Path) -> None:
    old = decode_manifest((folder / "manifest.json").read_bytes())
    for name in files_of(folder):
        (folder / name).unlink()
    write_manifest(folder, msgspec.structs.replace(old, files=()))
    assert not verify_bundle(folder).ok


def test_not_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.zip").write_text("hello")
    for name, what in (("nothing", "no such file"), ("empty", "neither a bundle nor"), ("text.zip", "but no zip")):
        with pytest.raises(BundleError, match=what):
            verify_bundle(tmp_path / name)


def test_a_damaged_zip_is_still_checked(tmp_path: Path, folder: Path) -> None:
    whole = write_bundle(tmp_path / "whole.zip", BundleInputs(journals=())).path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"????" + whole[4:]):
        (tmp_path / "damaged").write_bytes(damaged)
        assert not verify_bundle(tmp_path / "damaged").ok


def test_the_judge_of_these_tests_is_at_the_seam() -> None:
    from kvwitness.tracer import judgement

    assert judgement.judge is simple_judge
