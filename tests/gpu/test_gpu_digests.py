"""A run with page digests recorded on an H200 (SGLang 0.5.17, UnifiedRadixCache, ``KVWITNESS_DIGEST=sample``).

Three rounds of A, B, an eviction and C with prefixes of 12,000 tokens, page size 64: the digests were computed on
the GPU, in the streams of the copies.
"""

from __future__ import annotations

import dataclasses
import lzma
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest

from kvwitness.collectors.journal import Journal, parse_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Reason, RequestVerdict

RECORDED = Path(__file__).parent.parent / "fixtures" / "gpu-digest" / "unified" / "scheduler-1-1.kvwj.xz"


@cache
def journal() -> Journal:
    return parse_journal(lzma.decompress(RECORDED.read_bytes()), RECORDED.name.removesuffix(".xz"))


def of_c(journal: Journal) -> list[RequestVerdict]:
    return [verdict for verdict in judge([journal]).verdicts if verdict.rid.endswith("-C")]


def changed(change: Callable[[ev.LoadDigested], ev.LoadDigested]) -> Journal:
    events = tuple(change(event) if isinstance(event, ev.LoadDigested) else event for event in journal().events)
    return msgspec.structs.replace(journal(), events=events)


def test_every_c_is_verified_by_the_pages_that_were_sampled() -> None:
    found = of_c(journal())
    assert [verdict.sentence for verdict in found] == ["L2 read verified (12 of 187 pages sampled)"] * 3
    assert {verdict.grade for verdict in found} == {Grade.VERIFIED}


def test_other_bytes_after_the_load_refute_the_read() -> None:
    flipped = changed(lambda event: dataclasses.replace(event, digests=_flipped(event.digests)))
    for verdict in of_c(flipped):
        assert verdict.grade is Grade.REFUTED
        assert verdict.reason is Reason.CORRUPTION_SUSPECTED
        assert verdict.sentence.startswith("L2 read corrupted")


def _flipped(digests: tuple[bytes, ...]) -> tuple[bytes, ...]:
    first = digests[0]
    return (bytes([first[0] ^ 1]) + first[1:], *digests[1:])


@pytest.mark.parametrize("kind", [ev.BackupDigested, ev.LoadDigested])
def test_without_the_digests_of_one_side_nothing_is_verified(kind: type[ev.Event]) -> None:
    kept = tuple(event for event in journal().events if not isinstance(event, kind))
    renumbered = tuple(dataclasses.replace(event, seq=seq) for seq, event in enumerate(kept, start=1))
    for verdict in of_c(msgspec.structs.replace(journal(), events=renumbered, gaps=())):
        assert verdict.grade is not Grade.VERIFIED
