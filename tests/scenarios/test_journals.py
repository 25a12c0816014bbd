"""Situations that users of HiCache reported, as journals: the product's sentence for each.

The ids are those of docs/scenarios.md, which names the sources and says where each one is reproduced.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from journal_tools import ABC, journal_of, renumbered
from soundness.compare import compare
from soundness.simulate import Server

from kvwitness.collectors.journal import Journal, read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Reason, RequestVerdict, ServerReport, Tier
from kvwitness.tracer.verdicts.counters import EVICTED, LOADED, CounterWindow, check_counters

A = tuple(range(65))
"""64 tokens in four pages, and one that is always computed."""
FILL = tuple(range(1000, 1097))
FOREVER = (-(2**62), 2**62)


def server(l1: int = 96, l2: int = 800) -> Server:
    return Server(0, page=16, l1=l1, l2=l2, quiet=True)


def with_facts(events: Sequence[ev.Event], **facts: Any) -> list[ev.Event]:
    """The events of an instance of which this is true, too."""
    changed = []
    for event in events:
        if isinstance(event, ev.Facts) and event.kind == ev.FactKind.INSTANCE:
            event = dataclasses.replace(event, json=json.dumps({**json.loads(event.json), **facts}))
        changed.append(event)
    return changed


def verdict_of(events: Sequence[ev.Event], rid: str) -> RequestVerdict:
    """The product's verdict; the oracle has nothing against what is confirmed in the journal."""
    assert compare(events).false == ()
    verdict = judge([journal_of(events)]).verdict(rid)
    assert verdict is not None
    return verdict


def test_s04_s18_a_prompt_that_the_chunk_rule_kept_from_being_backed_up() -> None:
    """Seen on hybrid and on plain models: nothing of a chunked prompt is backed up on first sight, later it is."""
    s = server()
    s.serve([("first", A)], chunked=True)
    # What SGLang does instead of these: nothing.
    kept = [e for e in s.events if not isinstance(e, ev.HostAlloc | ev.BackupQueued | ev.BackupAcked)]
    kept = [e for e in kept if not (isinstance(e, ev.TransferStarted) and e.direction == ev.Direction.D2H)]
    s.events[:] = with_facts(renumbered(kept), write_policy="write_through")
    for node in s.nodes():
        node.slots = None
    s.free = list(range(s.host_total))
    s.serve([("fill", FILL)])
    s.serve([("again", A)])
    s.serve([("fill2", tuple(range(2000, 2097)))])
    s.serve([("third", A)])
    again, third = verdict_of(s.events, "again"), verdict_of(s.events, "third")
    assert again.sentence == (
        "recomputed: never backed up to L2 (no backup of this prefix of request first to L2 was acknowledged "
        "(write policy write_through); dropped without a backup from L1 for request fill)"
    )
    assert again.ranges[0].reason is Reason.NEVER_BACKED_UP
    assert third.sentence == "L2 read confirmed"


def _ranks(rank: int, events: Sequence[ev.Event]) -> Journal:
    facts = {"tp_rank": rank, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_tp_size": 2}
    return journal_of(with_facts(events, ranks=facts), name=f"scheduler-{rank}-{rank}.kvwj")


def test_s07_one_rank_loads_a_page_more_than_the_other() -> None:
    both = []
    for rank in range(2):
        s = server()
        s.serve([("a", A)])
        s.serve([("other", (*A[:48], *range(500, 517)))])
        s.serve([("fill", FILL)])
        if rank == 1:
            # The last page has left its L2.
            last = next(n for n in s.nodes() if n.start == 48 and n.tokens == A[48:64])
            s._drop(last)
        s.serve([("c", A)])
        both.append(_ranks(rank, s.events))
    verdict = judge(both).verdict("c")
    assert verdict is not None
    assert verdict.reason is Reason.RANKS_DIVERGE
    assert verdict.grade not in (Grade.CONFIRMED, Grade.VERIFIED)
    assert verdict.sentence == (
        "L2 read reported by the server, not confirmed: missing link record_complete "
        "(scheduler-0-0 says L1 0, L2 64, L3 0, recomputed 1, scheduler-1-1 says L1 0, L2 48, L3 0, recomputed 17)"
    )


def _with_a_draft_model(release: str, *, comes_back: bool) -> RequestVerdict:
    """The draft model's pool takes as many bytes a token as the target's."""
    s = server()
    for rid, tokens in (("a", A), ("fill", FILL), ("c", A)):
        s.serve([(rid, tokens)])
    events = [
        dataclasses.replace(e, json=json.dumps({"sglang": release}))
        if isinstance(e, ev.Facts) and e.kind == ev.FactKind.PROCESS
        else e
        for e in s.events
    ]
    if comes_back:
        loads = {e.transfer for e in events if isinstance(e, ev.LoadDone)}
        events = [
            dataclasses.replace(e, bytes=2 * e.bytes)
            if isinstance(e, ev.TransferStarted | ev.LoadDone) and e.transfer in loads
            else e
            for e in events
        ]
    pools = [{"pool": 0, "name": "kv", "hooked": True}, {"pool": 1, "name": "draft", "hooked": True}]
    return verdict_of(with_facts(renumbered(events), pools=pools), "c")


def test_s12_the_draft_model_s_state_did_not_come_back() -> None:
    verdict = _with_a_draft_model("0.5.23", comes_back=False)
    assert verdict.sentence == "L2 read confirmed (full-attention KV only, not draft; state_incomplete: draft)"
    assert (verdict.grade, verdict.reason) == (Grade.CONFIRMED, Reason.STATE_INCOMPLETE)
    assert verdict.ranges[0].reason is Reason.L2_READ
    assert verdict.notes[-1].startswith("state_incomplete: draft did not come back: ")


@pytest.mark.parametrize(("release", "comes_back"), [("0.5.23", True), ("0.5.17", False), ("", False)])
def test_s12_where_its_bytes_came_or_are_not_counted_the_draft_is_not_judged(release: str, comes_back: bool) -> None:
    verdict = _with_a_draft_model(release, comes_back=comes_back)
    assert verdict.sentence == "L2 read confirmed (full-attention KV only, not draft)"
    assert verdict.reason is Reason.L2_READ
    assert any("whether the state in draft was reused is not judged" in note for note in verdict.notes)


def _changed_at(page: int, position: int) -> RequestVerdict:
    s = Server(0, page=page, l1=160, l2=800, quiet=True)
    s.serve([("a", A)])
    s.serve([("fill", tuple(range(3000, 3160)))])
    s.serve([("c", (*A[:position], 999, *A[position + 1 :]))])
    return verdict_of(s.events, "c")


def test_s13_a_prefix_that_differs_in_one_token_is_claimed_up_to_its_page_alone() -> None:
    verdict = _changed_at(16, 40)
    assert [(r.tier, r.start, r.end) for r in verdict.ranges] == [(Tier.L2, 0, 32), (Tier.RECOMPUTED, 32, 65)]
    assert verdict.ranges[-1].reason is Reason.PREFIX_CHANGED
    where = "it differs from request a first in one of the tokens 32 to 47 (page 2)"
    assert verdict.ranges[-1].detail == where
    assert verdict.notes == (f"prefix changed: {where}",)


@pytest.mark.parametrize(
    ("page", "position", "where"),
    [
        (1, 40, "token 40"),
        # The match ends where the digests' cell begins.
        (1, 32, "token 32"),
        (4, 41, "one of the tokens 40 to 43 (page 10)"),
        (16, 63, "one of the tokens 48 to 63 (page 3)"),
        # The last token of the prompt, behind the last whole cell: only the whole prompts differ. No page is lost.
        (16, 64, "token 64 (page 4)"),
    ],
)
def test_s13_the_position_is_as_fine_as_the_record(page: int, position: int, where: str) -> None:
    verdict = _changed_at(page, position)
    assert verdict.ranges[-1].detail == f"it differs from request a first in {where}"


def test_s13_a_longer_prompt_and_another_answer_are_no_change() -> None:
    s = server(l1=320)
    s.serve([("a", A)])
    s.serve([("longer", (*A, *range(700, 733)))])
    s.serve([("again", A)])
    for rid in ("longer", "again"):
        verdict = verdict_of(s.events, rid)
        assert verdict.ranges[-1].reason is Reason.RECOMPUTED and not verdict.notes


def test_s13_a_repeat_is_not_held_against_a_later_branch() -> None:
    """Both share whole cells with the branch, which was put into the cache last; neither leaves its own prefix."""
    s = server(l1=320)
    s.serve([("a", A)])
    s.serve([("b", (*A[:64], 7, 8))])
    s.serve([("a again", A)])
    s.serve([("b2", (*A[:64], 9, 9))])
    s.serve([("longer", (*A, *range(700, 733)))])
    judged = {rid: verdict_of(s.events, rid).notes for rid in ("a again", "longer")}
    assert judged == {"a again": (), "longer": ()}


def test_s13_a_flush_is_the_reason_and_not_the_change() -> None:
    s = server()
    s.serve([("a", A)])
    s.flush()
    s.serve([("c", (*A[:40], 999, *A[41:]))])
    verdict = verdict_of(s.events, "c")
    assert verdict.sentence == "recomputed: the cache was reset after request a had this prefix in it"
    assert verdict.reason is Reason.RECOMPUTED
    assert [r.reason for r in verdict.ranges] == [Reason.RECOMPUTED, Reason.PREFIX_CHANGED]


def test_s14_events_lost_between_b_and_c() -> None:
    events = list(read_journal(ABC).events)
    c = next(e for e in events if isinstance(e, ev.Text) and e.text.startswith("a30c069e"))
    lost = [e for e in events if not c.seq - 40 <= e.seq < c.seq - 10]
    verdict = judge([journal_of(lost)]).verdict(c.text)
    assert verdict is not None and verdict.grade not in (Grade.CONFIRMED, Grade.VERIFIED)
    missing = [link.detail for r in verdict.ranges for link in r.missing if link.link.value == "record_complete"]
    assert missing and str(c.seq - 40) in missing[0]


def test_s15_a_clock_that_runs_backwards() -> None:
    """What was recorded in one order with another order of times: nothing rests on either."""
    s = server()
    for rid, tokens in (("a", A), ("fill", FILL), ("c", A)):
        s.serve([(rid, tokens)])
    at = next(i for i, e in enumerate(s.events) if isinstance(e, ev.LoadQueued))
    early = dataclasses.replace(s.events[at], t_ns=s.events[at - 5].t_ns - 1)
    events = [*s.events[:at], early, *s.events[at + 1 :]]
    assert verdict_of(s.events, "c").grade is Grade.CONFIRMED
    assert verdict_of(events, "c").grade is not Grade.CONFIRMED


def test_s15_records_of_two_processes_keep_their_own_order() -> None:
    """Another scheduler's clock says nothing about this one's: the one verdict stands whatever the other's time."""
    s, other = server(), server()
    for rid, tokens in (("a", A), ("fill", FILL), ("c", A)):
        s.serve([(rid, tokens)])
        other.serve([(f"other-{rid}", tokens)])
    late = [dataclasses.replace(e, t_ns=e.t_ns + 10**15) for e in other.events]
    ranks = [{"dp_rank": rank, "dp_size": 2, "tp_size": 1, "pp_size": 1, "attn_tp_size": 1} for rank in range(2)]
    journals = [
        journal_of(with_facts(events, ranks=facts), name=f"scheduler-{i}-{i}.kvwj")
        for i, (events, facts) in enumerate(zip((s.events, late), ranks, strict=True))
    ]
    told = {v.rid: v.sentence for v in judge(journals).verdicts}
    assert told["c"] == told["other-c"] == "L2 read confirmed"
    assert judge(journals[::-1]).verdict("c") == judge(journals).verdict("c")


def test_s16_a_host_hit_that_was_declined_is_refuted() -> None:
    """The server reports 16 tokens of L2 that it never loaded. On a real 0.5.17: tests/live/test_releases.py."""
    s = server(l1=160)
    long = A[:48]
    s.serve([("x", (*long, 900))])
    s.serve([("xy", (*A[:64], 901))])
    s.serve([("fill", tuple(range(3000, 3160)))])
    s.serve([("reload", (*long, 902))])
    s.serve([("probe", (*A[:64], 903))], refuse=True)
    report = ServerReport("response", 48, 32, 16)
    verdict = judge([journal_of(s.events)], {"probe": report}).verdict("probe")
    assert verdict is not None and compare(s.events).false == ()
    assert verdict.grade is Grade.REFUTED
    assert verdict.sentence.startswith("refuted: ") and "L1 read of 48 tokens confirmed" in verdict.sentence
    declined = [r for r in verdict.ranges if r.reason is Reason.PROMISED_NOT_LOADED]
    assert [(r.start, r.end) for r in declined] == [(48, 64)]


HYBRID = [{"pool": 0, "name": "kv", "hooked": True}, {"pool": 1, "name": "swa", "hooked": True}]
NOT_MATCHED = "recomputed: resident in L2, not matched (by the ledger L2 held this prefix of request a, the match did "
NOT_MATCHED += "not find it; "


def _not_matched(pools: list[dict[str, Any]] | None, copied: bool = False, gone: bool = False) -> RequestVerdict:
    """The KV of A is in L2, and C matches nothing. ``copied``: its other state was, too; ``gone``: until then."""
    s = server()
    s.serve([("a", A)])
    state = (ev.Run(0, 64),)
    if copied:
        s.emit(ev.HostAlloc, 1, s.req("a"), 436, state)
    s.serve([("fill", FILL)])
    if gone:
        s.emit(ev.HostFree, 1, 0, 500, state)
    for node in s.nodes():
        if node.tokens == A[:64]:
            # The tree does not find it: another component's state is missing at its end.
            s.root.children.remove(node)
    s.serve([("c", A)])
    verdict = judge([journal_of(with_facts(s.events, pools=pools) if pools else s.events)]).verdict("c")
    assert verdict is not None
    assert verdict.ranges[0].reason is Reason.RESIDENT_NOT_MATCHED
    assert verdict.sentence.startswith(NOT_MATCHED)
    return verdict


def test_s17_resident_in_l2_and_not_matched_for_want_of_another_component() -> None:
    verdict = _not_matched(HYBRID, copied=True, gone=True)
    assert verdict.sentence == f"{NOT_MATCHED}component swa missing: its swa state had left L2)"
    # The event is named: the release of that pool's slots.
    assert [event.kind for event in verdict.ranges[0].missing[0].events] == ["HostFree", "Matched"]
    never = _not_matched(HYBRID)
    assert never.sentence == f"{NOT_MATCHED}component swa missing: no copy of its swa state to L2 was recorded)"


def test_s17_no_component_is_blamed_without_evidence() -> None:
    assert _not_matched(HYBRID, copied=True).sentence == f"{NOT_MATCHED}its swa state was in L2 as well)"
    unseen = [HYBRID[0], {"pool": 1, "name": "mamba", "hooked": False}]
    words = "whether its mamba state was in L2 is not recorded (that pool is not hooked)"
    assert _not_matched(unseen).sentence == f"{NOT_MATCHED}{words})"
    words = "this instance keeps no state beside full-attention KV, so no component explains it"
    assert _not_matched(None).sentence == f"{NOT_MATCHED}{words})"


def test_s26_without_the_server_s_word_on_tiers_the_chain_alone_carries_the_claim() -> None:
    """SGLang 0.5.6 to 0.5.8 say how much was cached, and not where."""
    s = server()
    for rid, tokens in (("a", A), ("fill", FILL), ("c", A)):
        s.serve([(rid, tokens)])
    silent = [
        dataclasses.replace(e, cached_device=-1, cached_host=-1, cached_storage=-1) if isinstance(e, ev.Released) else e
        for e in s.events
    ]
    verdict = verdict_of(silent, "c")
    assert verdict.sentence == "L2 read confirmed"
    # Who spoke, and what of: nobody about a tier.
    assert [check.witness for check in verdict.checks] == ["cached tokens by the scheduler"]


def test_s28_counters_that_are_summed_over_the_ranks() -> None:
    journals = []
    for rank in range(2):
        s = server()
        for rid, tokens in (("a", A), ("fill", FILL), ("c", A)):
            s.serve([(rid, tokens)])
        journals.append(_ranks(rank, s.events))
    judgement = judge(journals)
    loaded = sum(load.tokens for load in judgement.instances[0].loads)
    evicted = sum(call.freed or 0 for call in judgement.instances[0].evictions)
    counters = {LOADED: 2 * loaded, EVICTED: 2 * evicted}
    checks = check_counters(judgement.instances, CounterWindow(*FOREVER, counters))
    assert [check.agrees for check in checks] == [True, True]
    assert {check.explanation for check in checks} == {"the counter is summed over 2 ranks and carries no rank label"}
    wrong = check_counters(judgement.instances, CounterWindow(*FOREVER, {LOADED: 2 * loaded + 1}))
    assert [check.agrees for check in wrong] == [False]
