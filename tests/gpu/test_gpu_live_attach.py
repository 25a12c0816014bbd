"""The journal of a server on an H200 (SGLang 0.5.17) that was gone into live, with cuda-gdb, under four clients."""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

from kvwitness.collectors.journal import Journal, parse_journal
from kvwitness.tracer.judgement import Judgement, judge
from kvwitness.tracer.model import Grade

RECORDED = Path(__file__).parent.parent / "fixtures" / "gpu-live" / "scheduler-1-1.kvwj.xz"


@cache
def journal() -> Journal:
    return parse_journal(lzma.decompress(RECORDED.read_bytes()), RECORDED.name.removesuffix(".xz"))


@cache
def judged() -> Judgement:
    return judge([journal()])


def test_what_was_resident_before_is_confirmed() -> None:
    verdict = judged().verdict("c")
    assert verdict is not None
    assert verdict.sentence == "L2 read confirmed (resident at attach)"
    assert verdict.tokens.l2 == 11_968


def test_nothing_is_missing_and_every_finished_request_is_judged() -> None:
    assert journal().closed and not journal().gaps and not journal().anomalies
    grades = {verdict.grade for verdict in judged().verdicts if verdict.finished}
    assert grades <= {Grade.CONFIRMED, Grade.RECOMPUTED}


def test_the_pause_is_in_the_record() -> None:
    attached = judged().instances[0].facts.attach
    assert attached is not None and attached.way == "live" and 0 < (attached.stopped_us or 0) < 1_000_000
