"""Runs recorded on two H200 of one host (SGLang 0.5.17, both tree classes), judged again on every run.

``tp2``: A, B, four fills, C, C again, four fills, then two requests at once that share A's prefix.
``dp2``: A and B on rank 0, A's prefix on rank 1; F on rank 0, fills there, C on rank 0, F's prefix on rank 1; fills
and C on rank 1; then one prefix three times, by round robin. Prompts of 12,000 tokens, L1 of 32,768 a rank, page 64.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from functools import cache
from pathlib import Path

import msgspec
import pytest

from kvwitness.collectors.journal import Gap, Journal, parse_journal
from kvwitness.collectors.metrics import EVICTED_TOKENS, LOAD_BACK_TOKENS, parse_metrics
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import SCHEDULER_ROLE, Judgement, judge
from kvwitness.tracer.model import Grade, Reason, RequestVerdict, ServerReport, Tier
from kvwitness.tracer.verdicts.counters import EVICTED, LOADED, CounterWindow, check_counters

FOLDER = Path(__file__).parent.parent / "fixtures" / "gpu2"
TP, DP = ("tp2-hiradix", "tp2-unified"), ("dp2-hiradix", "dp2-unified")
REUSED = 11_968
"""12,000 shared tokens in whole pages of 64."""


@cache
def journals(run: str) -> tuple[Journal, ...]:
    found = sorted((FOLDER / run).glob("*.kvwj.xz"))
    return tuple(parse_journal(lzma.decompress(path.read_bytes()), path.name.removesuffix(".xz")) for path in found)


def rank(run: str, number: int) -> Journal:
    """The journal of one scheduler: of tensor-parallel or data-parallel rank ``number``."""
    return [journal for journal in journals(run) if journal.role == SCHEDULER_ROLE][number]


def reports(run: str) -> dict[str, ServerReport]:
    found = {}
    for line in (FOLDER / run / "responses.jsonl").read_text().splitlines():
        row = json.loads(line)
        details = row["details"] or {}
        report = ServerReport("response", row["cached"], details.get("device"), details.get("host"))
        found[f"gpu-{row['name']}"] = report
    return found


@cache
def judged(run: str) -> Judgement:
    return judge(journals(run), reports(run))


def about(judgement: Judgement, name: str) -> RequestVerdict:
    verdict = judgement.verdict(f"gpu-{name}")
    assert verdict is not None
    return verdict


@pytest.mark.parametrize("run", TP)
def test_a_b_and_c_are_judged_for_both_tensor_parallel_ranks(run: str) -> None:
    a, b, c, again = (about(judged(run), name) for name in ("A", "B", "C", "C2"))
    assert (a.tier, a.grade) == (Tier.RECOMPUTED, Grade.RECOMPUTED)
    assert (b.sentence, b.tokens.l1) == ("L1 read confirmed", REUSED)
    assert (c.sentence, c.tokens.l2) == ("L2 read confirmed", REUSED)
    assert (again.sentence, again.tokens.l1) == ("L1 read confirmed", REUSED)
    assert all(check.agrees for verdict in (a, b, c, again) for check in verdict.checks)


@pytest.mark.parametrize("run", TP)
@pytest.mark.parametrize("left", [0, 1])
def test_a_tensor_parallel_rank_that_was_not_recorded_lowers_every_claim_and_is_missed(run: str, left: int) -> None:
    one = judge([rank(run, left)], reports(run))
    for name in ("B", "C", "C2"):
        verdict = about(one, name)
        assert verdict.grade is Grade.REPORTED
        assert verdict.sentence == (
            f"{verdict.tier} read reported by the server, not confirmed: missing link record_complete "
            f"(the request ran on 2 ranks, 1 of them were recorded, not tp {1 - left})"
        )


@pytest.mark.parametrize("left", [0, 1])
def test_ranks_of_two_servers_are_no_group(left: int) -> None:
    """Both runs were sent the same prompts under the same ids."""
    one, other = (rank(run, number) for run, number in zip(TP, (left, 1 - left), strict=True))
    other = msgspec.structs.replace(other, instance="another", wall_ns=one.wall_ns)
    found = [verdict for verdict in judge([one, other]).verdicts if verdict.rid == "gpu-C"]
    assert [verdict.grade for verdict in found] == [Grade.REPORTED] * 2
    assert {verdict.reason for verdict in found} == {Reason.INCONCLUSIVE}


@pytest.mark.parametrize("run", TP)
def test_the_ranks_of_a_server_and_of_the_one_before_are_two_groups(run: str) -> None:
    ranks = [rank(run, number) for number in (0, 1)]
    day = 24 * 3600 * 10**9
    before = [msgspec.structs.replace(j, instance=f"{j.instance}-before", wall_ns=j.wall_ns - day) for j in ranks]
    found = [verdict for verdict in judge([*before, *ranks]).verdicts if verdict.rid == "gpu-C"]
    assert [verdict.sentence for verdict in found] == ["L2 read confirmed"] * 2
    mixed = judge([before[0], ranks[1]]).verdicts
    assert not {verdict.grade for verdict in mixed} & {Grade.CONFIRMED, Grade.RECOMPUTED}


@pytest.mark.parametrize("run", TP)
def test_two_requests_at_once_that_share_a_prefix_of_l2_load_it_once(run: str) -> None:
    first, second = (about(judged(run), name) for name in ("D1", "D2"))
    assert (first.sentence, first.tokens.l2) == ("L2 read confirmed", REUSED)
    assert (second.tokens.l2, second.tokens.l1, second.load_backs) == (0, REUSED, ())
    assert second.sentence == "L1 read confirmed"


@pytest.mark.parametrize("run", [*TP, *DP])
def test_the_servers_counters_are_sums_over_the_ranks(run: str) -> None:
    snapshot = parse_metrics((FOLDER / run / "metrics.prom").read_text(), 0)
    tokens = {LOADED: snapshot.value(LOAD_BACK_TOKENS), EVICTED: snapshot.value(EVICTED_TOKENS)}
    window = CounterWindow(-(2**62), 2**62, {name: int(value) for name, value in tokens.items() if value is not None})
    checks = check_counters(judged(run).instances, window)
    assert [check.agrees for check in checks] == [True, True], checks
    loads = 2 if run in TP else 1
    assert tokens[LOADED] == 2 * loads * REUSED


@pytest.mark.parametrize("run", DP)
def test_c_is_judged_on_each_data_parallel_rank(run: str) -> None:
    for name in ("C", "C1"):
        verdict = about(judged(run), name)
        assert (verdict.sentence, verdict.tokens.l2) == ("L2 read confirmed", REUSED)
    assert about(judged(run), "C").instance == rank(run, 0).instance
    assert about(judged(run), "C1").instance == rank(run, 1).instance


@pytest.mark.parametrize("run", DP)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("E", "in L1 of dp rank 0, this request ran on dp rank 1"),
        ("G", "in L2 of dp rank 0, this request ran on dp rank 1"),
        ("R1", "in L1 of dp rank 1, this request ran on dp rank 0"),
    ],
)
def test_a_repeat_that_went_to_the_other_rank_says_where_its_prefix_was(run: str, name: str, where: str) -> None:
    verdict = about(judged(run), name)
    assert verdict.sentence == f"recomputed: resident elsewhere ({where})"
    assert (verdict.grade, verdict.reason) == (Grade.RECOMPUTED, Reason.RESIDENT_ELSEWHERE)
    assert [(r.start, r.end, r.reason) for r in verdict.ranges] == [
        (0, REUSED, Reason.RESIDENT_ELSEWHERE),
        (REUSED, verdict.prompt_tokens, Reason.RECOMPUTED),
    ]
    assert verdict.tokens.recomputed == verdict.prompt_tokens


@pytest.mark.parametrize("run", DP)
def test_what_was_new_to_both_ranks_is_not_elsewhere(run: str) -> None:
    for name in ("A", "F", "fill0", "other0", "R0", "warm1"):
        assert about(judged(run), name).sentence == "recomputed"


def _bent(run: str, other: Journal) -> RequestVerdict:
    """E, which ran on rank 1, with another journal of rank 0."""
    return about(judge([other, rank(run, 1)]), "E")


@pytest.mark.parametrize("run", DP)
def test_nothing_is_elsewhere_without_the_other_ranks_word(run: str) -> None:
    zero = rank(run, 0)
    hour = 3600 * 10**9
    keyed = msgspec.structs.replace(
        zero,
        events=[
            dataclasses.replace(event, json=json.dumps(json.loads(event.json) | {"key": "another"}))
            if isinstance(event, ev.Facts) and event.kind == ev.FactKind.PROCESS
            else event
            for event in zero.events
        ],
    )
    stuck = msgspec.structs.replace(zero, gaps=(Gap(zero.events[-1].seq, zero.events[-1].seq, "lost"),))
    for other in (
        msgspec.structs.replace(zero, events=zero.events[:40]),
        msgspec.structs.replace(zero, wall_ns=zero.wall_ns + hour),
        msgspec.structs.replace(zero, wall_ns=zero.wall_ns - hour, closed=True),
        stuck,
        keyed,
    ):
        verdict = _bent(run, other)
        assert (verdict.tier, verdict.reason) == (Tier.RECOMPUTED, Reason.RECOMPUTED)
    assert about(judge([rank(run, 1)]), "E").sentence == "recomputed"
    assert _bent(run, zero).reason is Reason.RESIDENT_ELSEWHERE
