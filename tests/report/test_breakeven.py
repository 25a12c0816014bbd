"""From which length does an L2 read pay? The answers on times that are made up, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvwitness.tracer.model import EventRef, Grade, RequestVerdict, Tier, TokensPerTier
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.report.breakeven import BreakEven, Standing, breakeven_of
from kvwitness.tracer.report.messages import words_for
from kvwitness.tracer.report.sweep import sweep_notes, sweep_sentence

from .pages import markdown_of, page_of
from .runs import bundle_of, record

LENGTHS = (128, 256, 512, 1024)
REPEATS = 8
DETAILS: dict[str, dict[str, Any]] = {
    "A": {"cached_tokens": 0, "cached_tokens_details": None},
    "B": {"cached_tokens": 9, "cached_tokens_details": {"device": 9, "host": 0}},
    "C": {"cached_tokens": 9, "cached_tokens_details": {"device": 0, "host": 9}},
}


def times(differences: tuple[float, ...], repeats: int = REPEATS, noise: float = 1.0) -> list[RequestRecord]:
    """Requests of a sweep: at each length L2 takes so many ms longer than cold, which takes 1 ms per 10 tokens."""
    found = []
    for length, difference in zip(LENGTHS, differences, strict=True):
        for repeat in range(repeats):
            jitter = noise * (repeat % 4 - 1.5)
            for series, ms in (("A", length / 10), ("B", 5.0), ("C", length / 10 + difference)):
                name = f"{series}-{length}-{repeat}"
                found.append(
                    record(
                        name, series, len(found), ttft_s=(ms + jitter) / 1e3, prefix_tokens=length, **DETAILS[series]
                    )
                )
    return found


def answer(*differences: float, **more: Any) -> BreakEven:
    found = breakeven_of(times(differences, **more), {})
    assert found is not None
    return found


def test_it_pays_from_a_length_on() -> None:
    found = answer(10, 5, -5, -40)
    assert found.standing is Standing.FROM
    # Straight between 256 (5 ms slower) and 512 (5 ms faster).
    assert found.length == 384
    assert found.interval and found.low is not None and found.high is not None
    assert 256 < found.low <= 384 <= found.high < 512
    assert "from a prefix of about 384 tokens on (95% interval: " in sweep_sentence(found, words_for("en"))


def test_always_never_and_not_shown() -> None:
    assert answer(-3, -5, -20, -40).standing is Standing.ALWAYS
    never = answer(9, 9, 9, 9)
    assert never.standing is Standing.NEVER
    assert sweep_sentence(never, words_for("en")).startswith("Never on this stand: up to 1024 tokens")
    assert answer(9, 9, 1, -0.2, noise=5).standing is Standing.NOT_SHOWN
    assert answer(9, -9, -9, 9).standing is Standing.NEVER, "it has to pay at all longer prefixes"


def test_an_interval_may_be_open_below() -> None:
    found = answer(0.2, -5, -20, -40, noise=3)
    assert found.low is None
    assert "128 or less" in sweep_sentence(found, words_for("en")) or found.standing is Standing.ALWAYS


def test_too_few_requests_give_no_interval() -> None:
    found = answer(10, 5, -5, -40, repeats=3)
    assert found.standing is Standing.NOT_SHOWN and not found.interval


def test_the_same_times_give_the_same_answer() -> None:
    assert answer(10, 5, -5, -40) == answer(10, 5, -5, -40)


def test_requests_that_went_another_way_are_not_used() -> None:
    records = times((10, 5, -5, -40))
    astray = [
        record(f"C-x-{n}", "C", 900 + n, ttft_s=9.0, prefix_tokens=128, cached_tokens=0, cached_tokens_details=None)
        for n in range(3)
    ]
    failed = record("C-f", "C", 999, prefix_tokens=128, error="HTTP 500")
    found = breakeven_of([*records, *astray, failed], {})
    assert found is not None and found.other == 3 and found.length == 384
    assert any("3 requests that went another way" in line for line in sweep_notes(found, words_for("en")))


def verdict(rid: str, tier: Tier, grade: Grade) -> RequestVerdict:
    import msgspec
    from bundle.runs import verdict_of

    plain = verdict_of(rid, "i", 100, 0, EventRef("i", 1, "Queued"), None)
    return msgspec.structs.replace(plain, tier=tier, grade=grade, tokens=TokensPerTier(l2=9))


def test_what_was_seen_counts_more_than_what_the_server_says() -> None:
    records = times((10, 5, -5, -40))
    latest = {
        one.rid: verdict(
            one.rid,
            {"A": Tier.RECOMPUTED, "B": Tier.L1, "C": Tier.L2}[one.series],
            Grade.RECOMPUTED if one.series == "A" else Grade.CONFIRMED,
        )
        for one in records
    }
    found = breakeven_of(records, latest)
    assert found is not None and found.unproven == 0
    latest["C-1024-0"] = verdict("C-1024-0", Tier.RECOMPUTED, Grade.RECOMPUTED)
    bent = breakeven_of(records, latest)
    assert bent is not None and bent.other == 1
    plain = breakeven_of(records, {})
    assert plain is not None and plain.unproven == len(records)


@pytest.mark.parametrize("records", [[], [record("A", "A", 1, prefix_tokens=128)], times((1, 2, 3, 4))[:3]])
def test_what_is_no_sweep(records: list[RequestRecord]) -> None:
    assert breakeven_of(records, {}) is None


def test_the_report_has_a_section(tmp_path: Path) -> None:
    path = bundle_of(tmp_path / "b", times((10, 5, -5, -40)), journals=())
    page = page_of(path)
    assert "An L2 read pays from a prefix of about 384 tokens on" in page.text("sweep")
    rows = page.tables["sweep-table"]
    assert [row[0] for row in rows[1:]] == [str(length) for length in LENGTHS]
    assert rows[1][1] == "8, 8, 8"
    assert "The series hold several prefix lengths" in page.text("timing")
    assert "timing-table" not in page.tables
    text = markdown_of(path)
    assert "**An L2 read pays from a prefix of about 384 tokens on" in text
    russian = page_of(path, "ru").text("sweep")
    assert "окупается с префикса примерно в 384 токенов" in russian
