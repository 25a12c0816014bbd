"""``--hicache-host-memory-mode buffer_only``: host memory is a way through to storage, and no tier.

The run of a real 0.5.23 with the file backend: a, again, prompts that push it out of L1, c and c2, a flush, d; then
other prompts, storage emptied, e. All with one prompt.
"""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

from kvwitness.collectors.journal import parse_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import Judgement, judge
from kvwitness.tracer.model import Grade, Link, Reason, RequestVerdict, Tier

RUN = Path(__file__).parents[1] / "soundness" / "data" / "storage" / "buffer-only-0.5.23-rust.kvwj.xz"


@cache
def judged() -> Judgement:
    return judge([parse_journal(lzma.decompress(RUN.read_bytes()), "scheduler-1-1.kvwj")])


def about(name: str) -> RequestVerdict:
    verdict = judged().verdict(name)
    assert verdict is not None
    return verdict


def test_the_record_is_whole() -> None:
    """What is staged on its way to storage is no backup, and its copies are no sign of missing events."""
    (facts,) = judged().instances
    assert facts.facts.instance.host_memory_mode == "buffer_only"
    assert facts.gaps == () and facts.hook_failures == {} and facts.backups == ()


def test_l1_is_a_tier_as_everywhere() -> None:
    assert (about("a").sentence, about("again").sentence) == ("recomputed", "L1 read confirmed")


def test_what_came_through_host_memory_is_no_l2_read() -> None:
    for name in ("c", "d"):
        verdict = about(name)
        assert (verdict.tier, verdict.grade, verdict.reason) == (Tier.L3, Grade.REPORTED, Reason.INVALID_MODE)
        assert verdict.tokens.l3 == 1600 and verdict.tokens.l2 == 0
        assert all(check.agrees for check in verdict.checks)
        missing = {link.link: link.detail for r in verdict.ranges for link in r.missing}
        assert "buffer_only: host memory is transit here, not a tier" in missing[Link.RESIDENT_L2]


def test_what_storage_lost_is_computed_again_and_the_mode_is_the_reason() -> None:
    e = about("e")
    assert (e.tier, e.grade, e.reason) == (Tier.RECOMPUTED, Grade.RECOMPUTED, Reason.INVALID_MODE)
    assert e.sentence.startswith(
        "recomputed: L2 is no tier here (host memory mode buffer_only: below L1 only storage (L3)"
    )
    assert "the look-up found nothing from token 0 on" in e.sentence


def test_nothing_is_said_of_l2_anywhere() -> None:
    assert not [v for v in judged().verdicts if v.tokens.l2]
    (facts,) = judged().instances
    queued = [e for e in parse_journal(lzma.decompress(RUN.read_bytes()), "x").events if isinstance(e, ev.BackupQueued)]
    assert not queued and {r.tier for r in facts.residencies} == {"L1"}
