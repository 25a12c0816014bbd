"""The page about a recorded run: what it says, and that nothing but itself is needed to read it."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

import pytest
from spans.recorded import RIDS

from kvwitness.tracer.report.load import load_evidence
from kvwitness.tracer.report.messages import LANGUAGES

from .pages import html_of, markdown_of, page_of
from .runs import abc_records, bundle_of, gpu_bundle, record

STORED = Path(__file__).parents[1] / "soundness" / "data" / "storage" / "admin-0.5.23-rust.kvwj.xz"


def test_the_claim_its_grade_and_what_is_not_claimed(bundle: Path) -> None:
    page = page_of(bundle)
    claim = page.text("claim")
    assert "confirmed for 1 of 1 requests of series C (1488 prompt tokens each)" in claim
    assert "Grade: confirmed" in claim
    assert "the tokens of 1 of 1 requests of C equal those of A" in claim
    for words in ("another model, GPU", "worth it", "the content of the copies is not compared", "no control run"):
        assert words in page.text("not_claimed")


def test_the_chain_has_every_link_with_its_events(bundle: Path) -> None:
    chain = page_of(bundle).text("chain")
    for words in (
        "Born",
        "Prefill 36, Inserted 39",
        "Backed up",
        "BackupQueued 38, TransferStarted 41, BackupAcked 42",
        "Left L1",
        "EvictedL1 99, Matched 170",
        "Resident in L2",
        "Read",
        "1488 tokens copied from L2 to L1",
        "Used",
        "Record complete",
        "events 31 to 182 without a hole",
    ):
        assert words in chain
    assert "MISSING" not in chain


def test_what_became_of_the_storage_is_told(tmp_path: Path) -> None:
    journal = tmp_path / "scheduler-1-1.kvwj"
    journal.write_bytes(lzma.decompress(STORED.read_bytes()))
    bundle = bundle_of(tmp_path / "bundle", records=(), journals=(journal,))
    for text in (page_of(bundle).text("conditions"), markdown_of(bundle)):
        assert "storage attach refused: file" in text and "scheduler is not idle" in text
        assert "storage attached: dynamic (prefetch policy wait_complete)" in text
    assert "Хранилище (L3)" in markdown_of(bundle, "ru")


def test_without_storage_nothing_is_told_of_it(bundle: Path) -> None:
    assert "(L3)" not in page_of(bundle).text("conditions")


def test_residency_is_that_of_the_ledger(bundle: Path) -> None:
    page = page_of(bundle)
    head, *rows = page.tables["residency-table"]
    residencies = load_evidence(bundle).instances[0].residencies
    assert len(rows) == len(residencies)
    a = RIDS["A"]
    first = next(row for row in rows if row[0] == a and row[2] == "L1" and row[3] == "0..1488")
    assert first[1] == "A"
    assert "(evicted)" in first[5]
    assert first[6] == "Inserted 39, EvictedL1 99"
    assert head[0] == "Prefix of request"
    drawn = page.text("residency")
    assert "in L1" in drawn and "in L2" in drawn and "evicted or freed" in drawn


def test_times_of_single_requests_have_no_interval(bundle: Path) -> None:
    page = page_of(bundle)
    rows = {row[0]: row[1:] for row in page.tables["timing-table"]}
    assert rows["C"] == ["1", "50.0", "none: too few", "-", "-"]
    assert "Fewer than 5 requests in series warmup, A, B, evict, C, again: no interval." in page.text("timing")
    assert ["C minus A", "-350.0", "none: too few"] in page.tables["difference-table"]


def test_one_request_per_series_is_said(tmp_path: Path) -> None:
    records = [one for one in abc_records() if one.series in "ABC"]
    assert "1 request per series: no interval." in page_of(bundle_of(tmp_path / "b", records)).text("timing")


def test_enough_requests_have_intervals(tmp_path: Path) -> None:
    more = [
        record(f"{series}{number}", series, 100 + number, ttft_s=base + number / 1e3)
        for series, base in (("A", 0.4), ("C", 0.05))
        for number in range(12)
    ]
    page = page_of(bundle_of(tmp_path / "b", [*abc_records(), *more]))
    rows = {row[0]: row[1:] for row in page.tables["timing-table"]}
    assert re.fullmatch(r"[\d.]+ \.\. [\d.]+", rows["A"][2])
    assert rows["A"][3] != "-" and rows["A"][4] == "-"
    assert "percentile bootstrap" in page.text("timing")


def test_every_request_is_in_the_table(bundle: Path) -> None:
    _, *rows = page_of(bundle).tables["requests-table"]
    assert len(rows) == 10
    c = next(row for row in rows if row[1] == "C")
    assert c == [RIDS["C"], "C", "1503", "0", "1488", "0", "15", "50.0", "confirmed", "L2 read confirmed"]


def test_witnesses_stand_side_by_side(bundle: Path) -> None:
    page = page_of(bundle)
    _, *rows = page.tables["witnesses-table"]
    assert len(rows) == 6
    name, witness, answer, ours, theirs, _ = rows[-1]
    assert (name, answer) == (f"C ({RIDS['C']})", "agrees")
    assert witness == "cached tokens by the scheduler"
    assert (ours, theirs) == ("L1 0, L2 1488, L3 0", "device 0, host 1488, storage 0")


def test_a_witness_that_disagrees_is_shown(tmp_path: Path) -> None:
    wrong = {"cached_tokens": 1000, "cached_tokens_details": {"device": 0, "host": 1000}}
    page = page_of(bundle_of(tmp_path / "b", abc_records(**wrong)))
    assert "DISAGREES" in page.text("witnesses")
    assert "Grade: reported" in page.text("claim")
    assert "Missing link: Witnesses agree" in page.text("claim")


def test_conditions_and_what_is_unknown(bundle: Path) -> None:
    conditions = page_of(bundle).text("conditions")
    for words in ("host: gpus: nvidia-smi is not here", "server: weights", "server.page_size", "device_tokens"):
        assert words in conditions
    assert "host.gpus unknown" in conditions.replace("host.gpusunknown", "host.gpus unknown")


def test_how_to_check_it_again(bundle: Path) -> None:
    evidence = load_evidence(bundle)
    recheck = page_of(bundle).text("recheck")
    assert "kvwitness verify bundle" in recheck
    assert evidence.manifest_sha256 in recheck
    assert (bundle / "manifest.sha256").read_text().startswith(evidence.manifest_sha256)
    assert all(entry.sha256 in recheck for entry in evidence.manifest.files)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_is_whole_and_loads_nothing(bundle: Path, language: str) -> None:
    page = page_of(bundle, language)
    assert page.unclosed == []
    assert page.references() == []
    assert len(page.ids) == len(set(page.ids))
    assert len(page.scripts) == 1
    (policy,) = [v["content"] for tag, v in page.tags if v.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    html = html_of(bundle, language)
    assert "url(http" not in html and "@import" not in html
    assert ("html", {"lang": language}) in page.tags


def test_charts_have_text_alternatives_and_follow_the_theme(bundle: Path) -> None:
    page = page_of(bundle)
    charts = [values for tag, values in page.tags if tag == "svg"]
    assert [values["aria-labelledby"] for values in charts] == [
        "residency-title residency-description",
        "ttft-title ttft-description",
    ]
    assert all(values["role"] == "img" for values in charts)
    assert {"residency-title", "residency-description", "ttft-title", "ttft-description"} <= set(page.ids)
    html = html_of(bundle)
    svg = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert "var(--l1)" in svg and "var(--ink)" in svg
    assert not re.search(r"#[0-9a-f]{6}\b", svg)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_same_bundle_gives_the_same_bytes(bundle: Path, language: str) -> None:
    assert html_of(bundle, language) == html_of(bundle, language)
    assert markdown_of(bundle, language) == markdown_of(bundle, language)


def test_a_run_on_a_gpu(tmp_path: Path) -> None:
    page = page_of(gpu_bundle(tmp_path / "gpu", tmp_path / "journals"))
    assert "confirmed for 1 of 1 requests of series C (11968 prompt tokens each)" in page.text("claim")
    assert "ms on the device" in page.text("chain")


def test_markdown_says_the_same(bundle: Path) -> None:
    text = markdown_of(bundle)
    assert "confirmed for 1 of 1 requests of series C" in text
    assert "1. **Born**: seen; put into L1 by the prefill" in text
    assert f"| {RIDS['C']} | C | 1503 | 0 | 1488 | 0 | 15 | 50.0 | confirmed | L2 read confirmed |" in text
    assert "- server: weights" in text
    assert load_evidence(bundle).manifest_sha256 in text
    assert "\n\n\n" not in text


def test_russian(bundle: Path) -> None:
    page = page_of(bundle, "ru")
    assert "подтверждено для 1 из 1 запросов серии C" in page.text("claim")
    assert "Создан" in page.text("chain")
    assert "чтение из L2 подтверждено" in page.text("requests")
    assert "подтверждено для 1 из 1" in markdown_of(bundle, "ru")


def test_the_chain_that_is_shown_is_of_the_run_itself(tmp_path: Path) -> None:
    """The journal also has what came before, or from others: here a C, in a run that ended before its own."""
    before = [one for one in abc_records() if one.series in "AB"]
    page = page_of(bundle_of(tmp_path / "b", before))
    shown = page.text("chain")
    assert RIDS["B"] in shown and RIDS["C"] not in shown
