"""The pure parts: reports, rows, comparison, and one bundle with the real judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvwitness.tracer import judgement
from kvwitness.tracer.bundle import report_of, reports_by_rid
from kvwitness.tracer.bundle.compare import first_difference
from kvwitness.tracer.bundle.layout import metrics_path
from kvwitness.tracer.bundle.rows import rows_of
from kvwitness.tracer.bundle.summary import settings_of
from kvwitness.tracer.model import Grade, ServerReport

from .runs import RECORDS, record


@pytest.mark.parametrize(
    ("cached", "details", "expected"),
    [
        (None, None, None),
        (0, None, ServerReport("response", cached=0)),
        (96, {"device": 32, "host": 64}, ServerReport("response", 96, 32, 64)),
        (9, {"device": 1, "host": 3, "storage": 5, "storage_backend": "f"}, ServerReport("response", 9, 1, 3, 5)),
        (9, {"device": True, "host": "3", "storage": -5}, ServerReport("response", 9)),
        (None, {"device": None}, None),
    ],
)
def test_report_of(cached: int | None, details: dict[str, Any] | None, expected: ServerReport | None) -> None:
    one = msgspec.structs.replace(RECORDS[0], cached_tokens=cached, cached_tokens_details=details)
    assert report_of(one) == expected
    assert reports_by_rid([one]) == ({} if expected is None else {one.rid: expected})


def test_rows_follow_the_client_and_miss_nobody() -> None:
    from .runs import EventRef, verdict_of

    ref = EventRef("i", 1, "Queued")
    verdicts = [verdict_of(rid, "i", 100, 0, ref, None) for rid in ("stranger", "two", "one")]
    records = [record("two", "B", 2), record("one", "A", 1), record("lost", "C", 3)]
    rows = rows_of(verdicts, records)
    assert [(row.request, row.series) for row in rows] == [("one", "A"), ("two", "B"), ("lost", "C"), ("stranger", "")]
    assert rows[2].grade is Grade.UNKNOWN
    assert rows[2].l1 is None
    assert "not in the journals" in rows[2].sentence


def test_without_journals_the_servers_word_is_reported_and_not_confirmed() -> None:
    details = {"device": 32, "host": 64}
    known = msgspec.structs.replace(record("c", "C", 1), prompt_tokens=100, cached_tokens=96)
    (row,) = rows_of([], [msgspec.structs.replace(known, cached_tokens_details=details)])
    assert (row.grade, row.l1, row.l2, row.unknown) == (Grade.REPORTED, 32, 64, 4)
    assert row.sentence.startswith("L2 read reported by the server, not confirmed: not in the journals")
    assert "kvwitness attach" in row.sentence
    # Without a tier, or of a failed request, it says nothing.
    for quiet in (known, msgspec.structs.replace(known, cached_tokens_details=details, error="cut off")):
        assert rows_of([], [quiet])[0].grade is Grade.UNKNOWN


def test_first_difference_is_none_for_equal_lists() -> None:
    assert first_difference([], []) is None


def test_settings_are_flat_and_bounded() -> None:
    environment = {"a": {"b": {"c": 1}}, "gpu": None, "many": {str(n): n for n in range(100)}}
    settings = dict(settings_of({**environment, "unknown": ["x", "y"], "raw": {"z": 1}, "processes": [{}]}))
    assert settings["a.b.c"] == "1"
    assert settings["gpu"] == "unknown"
    assert settings["many"] == "40 more in environment.json"
    assert settings["unknown"] == "x; y"
    assert not settings.keys() & {"raw", "raw.z", "processes"}


@pytest.mark.parametrize("moment", ["", "../x", "a/b", "a.b", "a b"])
def test_a_moment_is_one_plain_word(moment: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        metrics_path(moment)


REAL_JUDGE: Callable[..., Any] = judgement.judge


def test_round_trip_with_the_real_judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, inputs: Any) -> None:
    from kvwitness.tracer.bundle import verify_bundle, write_bundle

    try:
        REAL_JUDGE([], {})
    except NotImplementedError:
        pytest.skip("judge() is not written yet")
    monkeypatch.setattr("kvwitness.tracer.judgement.judge", REAL_JUDGE)
    info = write_bundle(tmp_path / "bundle", inputs)
    report = verify_bundle(info.path)
    assert report.problems == ()
