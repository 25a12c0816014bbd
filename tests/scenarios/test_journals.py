"""Situations that users of HiCache reported, as journals: the product's sentence for each.

The ids are those of docs/scenarios.md, which names the sources and says where each one is reproduced.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

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


def test_s12_the_draft_model_s_pool_is_not_what_the_claim_is_about() -> None:
    s = server()
    for rid, tokens in (("a", A), ("fill", FILL), ("c", A)):
        s.serve([(rid, tokens)])
    pools = [{"pool": 0, "name": "kv", "hooked": True}, {"pool": 1, "name": "draft", "hooked": True}]
    verdict = verdict_of(with_facts(s.events, pools=pools), "c")
    assert verdict.sentence == "L2 read confirmed (full-attention KV only, not draft)"
    assert any("whether the state in draft was reused is not judged" in note for note in verdict.notes)


def test_s13_a_prefix_that_differs_in_one_token_is_claimed_up_to_its_page_alone() -> None:
    s = server(l1=160)
    s.serve([("a", A)])
    s.serve([("fill", tuple(range(3000, 3160)))])
    s.serve([("c", (*A[:40], 999, *A[41:]))])
    verdict = verdict_of(s.events, "c")
    assert [(r.tier, r.start, r.end) for r in verdict.ranges] == [(Tier.L2, 0, 32), (Tier.RECOMPUTED, 32, 65)]


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


def test_s17_resident_in_l2_and_not_matched() -> None:
    s = server()
    s.serve([("a", A)])
    s.serve([("fill", FILL)])
    for node in s.nodes():
        if node.tokens == A[:64]:
            # The tree does not find it: another component's state is missing at its end.
            s.root.children.remove(node)
    s.serve([("c", A)])
    verdict = judge([journal_of(s.events)]).verdict("c")
    assert verdict is not None
    assert verdict.sentence.startswith("recomputed: resident in L2, not matched (by the ledger L2 held this prefix")
    assert verdict.ranges[0].reason is Reason.RESIDENT_NOT_MATCHED


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
