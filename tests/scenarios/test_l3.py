"""What users met with storage (L3): the sequence of events, and the sentence that has to be given.

S21 to S24 are also run on a real server: tests/live/test_storage.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from journal_tools import renumbered
from soundness.compare import journal_as_read
from soundness.simulate import Node, Server

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import Grade, Link, Reason, RequestVerdict, Tier
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.build import build_spans
from kvwitness.tracer.verdicts.l3 import storage_changes

A = tuple(range(65))
"""64 tokens in four pages, and one that is always computed."""
FIRST, REPEAT = "first", "repeat"
TIER = (ev.StorageChanged, 1, 1, "file (prefetch policy wait_complete): attached")


class Story:
    """A, a flush that empties L1 and L2, and A again, with what storage does in between."""

    def __init__(self, attached: bool = True) -> None:
        self.server = Server(0, page=16, l1=400, l2=800, quiet=True)
        if attached:
            self.server.emit(*TIER)

    def text(self, text: str) -> int:
        return self.server.req(text)

    def play(self, *steps: tuple[Any, ...], after_first: Sequence[tuple[Any, ...]] = ()) -> RequestVerdict:
        """``steps``: between the queueing of the repeat and its match."""
        server = self.server
        server.serve([(FIRST, A)])
        for step in after_first:
            server.emit(*step)
        server.flush()
        server.serve([(REPEAT, A)])
        events = server.events
        number = self.text(REPEAT)
        at = next(i for i, e in enumerate(events) if isinstance(e, ev.Matched) and e.req == number)
        stamp = events[at].t_ns
        added = [kind(0, stamp, *values) for kind, *values in steps]
        verdicts = judge([journal_as_read(renumbered([*events[:at], *added, *events[at:]]))]).verdicts
        return verdicts[-1]


def asked(story: Story, start: int = 0, issued: int = 1) -> tuple[Any, ...]:
    return (ev.PrefetchAsked, story.text(REPEAT), 1, start, 64 - start, issued)


def looked_up(story: Story, tokens: int) -> tuple[Any, ...]:
    return (ev.StorageLookedUp, story.text(REPEAT), tokens)


def failed(story: Story, work: int, error: str, rid: str = REPEAT) -> tuple[Any, ...]:
    return (ev.StorageFailed, work, story.text(rid) if rid else 0, error)


def nothing_read(verdict: RequestVerdict) -> None:
    assert verdict.tokens.l3 == verdict.tokens.l2 == 0
    assert (verdict.tier, verdict.grade) == (Tier.RECOMPUTED, Grade.RECOMPUTED)
    links = [link for r in verdict.ranges for link in r.missing if link.link is Link.PREFETCHED]
    assert links and all(link.remedy and link.events for link in links)


def test_s05_a_hit_that_is_counted_and_never_loaded() -> None:
    story = Story()
    verdict = story.play(asked(story), looked_up(story, 64))
    nothing_read(verdict)
    assert verdict.reason is Reason.PROMISED_NOT_LOADED
    assert "storage (L3) holds 64 tokens by the look-up, and none of them came into L2" in verdict.sentence


def test_s06_a_backup_thread_that_is_gone_raises_an_alarm() -> None:
    story = Story()
    gone = failed(story, ev.StorageWork.WRITE, "OSError: connection refused", rid="")
    queued = (ev.StorageBackupQueued, 2, 64)
    verdict = story.play(asked(story), looked_up(story, 0), after_first=[queued, gone, queued, queued])
    nothing_read(verdict)
    assert "a backup failed (OSError: connection refused), and none was written since" in verdict.sentence
    (note,) = verdict.notes
    assert "no backup was acknowledged since event" in note and "2 were handed over" in note


def test_s06_no_alarm_where_backups_go_on() -> None:
    story = Story()
    gone = failed(story, ev.StorageWork.WRITE, "OSError: connection refused", rid="")
    queued, written = (ev.StorageBackupQueued, 2, 64), (ev.StorageBackedUp, 64, 64)
    verdict = story.play(asked(story), looked_up(story, 0), after_first=[queued, gone, queued, written])
    assert not verdict.notes and "failed" not in verdict.sentence


def test_s09_the_tail_is_stored_and_the_head_is_lost() -> None:
    story = Story()
    revoked = (ev.PrefetchRevoked, story.text(REPEAT), story.text("the look-up found 0 tokens"))
    verdict = story.play(asked(story), looked_up(story, 0), revoked)
    nothing_read(verdict)
    assert "the prefix head is missing in storage (L3): the look-up found nothing from token 0 on" in verdict.sentence


def test_s21_a_page_transfer_that_raises_is_no_read() -> None:
    story = Story()
    done = (ev.PrefetchDone, story.text(REPEAT), 0, 0, 0, 0, 0, ())
    steps = (asked(story), looked_up(story, 64), failed(story, ev.StorageWork.READ, "RuntimeError: no driver"), done)
    verdict = story.play(*steps)
    nothing_read(verdict)
    assert "the page transfer in storage (L3) failed: RuntimeError: no driver" in verdict.sentence


def test_s22_failing_look_ups_are_counted_and_the_first_error_is_told() -> None:
    story = Story()
    error = "RuntimeError: Failed to load HiCache native hash extension"
    before = [failed(story, ev.StorageWork.LOOK_UP, error, rid=FIRST)] * 3
    verdict = story.play(asked(story), failed(story, ev.StorageWork.LOOK_UP, error), after_first=before)
    nothing_read(verdict)
    assert f"the look-up in storage (L3) failed: {error} (4 such failures so far)" in verdict.sentence


def test_s23_what_is_older_than_the_attaching_was_never_backed_up() -> None:
    story = Story(attached=False)
    verdict = story.play(asked(story), looked_up(story, 0), after_first=[TIER])
    nothing_read(verdict)
    assert verdict.reason is Reason.NEVER_BACKED_UP
    assert f"never backed up to storage (L3): request {FIRST} is older than its attaching" in verdict.sentence


def test_s24_a_prefetch_that_the_policy_cut_short() -> None:
    story = Story()
    why = story.text("cut short by the prefetch policy best_effort")
    verdict = story.play(asked(story), (ev.PrefetchRevoked, story.text(REPEAT), why))
    nothing_read(verdict)
    assert "cut short by the prefetch policy best_effort before anything was in L2" in verdict.sentence
    (remedy,) = {link.remedy for r in verdict.ranges for link in r.missing if link.link is Link.PREFETCHED}
    assert "wait_complete or timeout" in remedy


@pytest.mark.parametrize("change", [(ev.StorageChanged, 0, 1, "detached"), None])
def test_where_no_backend_is_attached_nothing_is_said_of_storage(change: tuple[Any, ...] | None) -> None:
    story = Story(attached=change is not None)
    verdict = story.play(looked_up(story, 64), after_first=[change] if change else [])
    assert "L3" not in verdict.sentence


def test_a_detaching_that_was_refused_leaves_the_backend_attached() -> None:
    story = Story()
    refused = (ev.StorageChanged, 0, 0, "Reject detach: scheduler is not idle.")
    verdict = story.play(asked(story), looked_up(story, 0), after_first=[refused])
    assert "missing in storage (L3)" in verdict.sentence


def read_from_storage(stored: int = 64, drop: type[ev.Event] | None = None, **changed: Any) -> RequestVerdict:
    """A, a flush, and A again: a prefetch brings ``stored`` tokens of it. ``changed``: fields of its end."""
    server = Server(0, page=16, l1=400, l2=800, quiet=True)
    server.emit(*TIER)
    server.serve([(FIRST, A)])
    server.flush()
    match = server.match

    def after_the_prefetch(rid: str, tokens: tuple[int, ...]) -> list[Node]:
        number, slots = server.req(rid), server._pages(stored)
        server.free = [slot for slot in server.free if slot not in slots]
        server.emit(ev.PrefetchAsked, number, 1, 0, 64, 1)
        server.emit(ev.StorageLookedUp, number, stored)
        server.emit(ev.HostAlloc, 0, 0, len(server.free), server.runs(slots))
        node = Node(server.new_node(), 0, A[:stored], server.root, device=False, slots=slots)
        server.root.children.append(node)
        done = {"start": 0, "completed": stored, "existing": 0, "loaded": stored, "deadline": 0}
        server.emit(ev.PrefetchDone, number, *(done | changed).values(), server.runs(slots))
        return match(rid, tokens)

    server.match = after_the_prefetch  # type: ignore[method-assign]
    server.serve([(REPEAT, A)])
    events = [event for event in server.events if drop is None or not isinstance(event, drop)]
    return judge([journal_as_read(renumbered(events))]).verdicts[-1]


def test_what_storage_brought_for_the_request_is_an_l3_read() -> None:
    verdict = read_from_storage()
    assert (verdict.sentence, verdict.reason, verdict.tokens.l3) == ("L3 read confirmed", Reason.L3_READ, 64)


@pytest.mark.parametrize("event", [ev.PrefetchAsked, ev.PrefetchDone, ev.LoadDone, ev.HostAlloc, ev.PrefillDone])
def test_without_any_of_its_events_an_l3_read_is_not_confirmed(event: type[ev.Event]) -> None:
    verdict = read_from_storage(drop=event)
    assert verdict.grade not in (Grade.CONFIRMED, Grade.VERIFIED, Grade.RECOMPUTED), verdict.sentence


@pytest.mark.parametrize("changed", [{"start": 16}, {"completed": 80, "loaded": 80}, {"loaded": 48, "existing": 16}])
def test_a_prefetch_of_other_tokens_confirms_nothing(changed: dict[str, int]) -> None:
    assert read_from_storage(**changed).grade is not Grade.CONFIRMED


def test_a_part_of_it_from_storage_is_read_and_the_rest_is_computed() -> None:
    verdict = read_from_storage(stored=32)
    assert verdict.sentence == "L3 read confirmed"
    assert (verdict.tokens.l3, verdict.tokens.recomputed) == (32, 33)


ON, OFF = "file (prefetch policy timeout): attached", "Reject attach: scheduler is not idle."


def rank(number: int, *changes: tuple[int, int, str]) -> InstanceFacts:
    server = Server(number, page=16, l1=96, l2=96, quiet=True)
    for change in changes:
        server.emit(ev.StorageChanged, *change)
    facts = derive(journal_as_read(server.events))
    ranks = {"dp_rank": number, "dp_size": 2, "tp_size": 1, "pp_size": 1}
    return msgspec.structs.replace(facts, instance=f"scheduler-{number}", facts={**facts.facts, "ranks": ranks})


def test_a_partial_detach_is_shown_as_what_it_is() -> None:
    """Two dp ranks: one detaches, the other is busy and refuses. The first one is not attached again."""
    busy = (0, 0, "Reject detach: scheduler is not idle.")
    lines = storage_changes([rank(0, (1, 1, ON), (0, 1, "Detached.")), rank(1, (1, 1, ON), busy)])
    assert lines == [
        f"storage attached: {ON}",
        "storage detach took effect on rank dp 0 and was refused on rank dp 1 (Reject detach: scheduler is not idle.): "
        "SGLang rolls nothing back, the ranks differ",
    ]


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ((1, 0, OFF), (1, 0, OFF), f"storage attach refused: {OFF}"),
        ((0, 1, "Detached."), (0, 1, "Detached."), "storage detached: Detached."),
        (
            (1, 1, ON),
            None,
            "storage attach took effect on rank dp 0 and was not recorded on rank dp 1: "
            "SGLang rolls nothing back, the ranks differ",
        ),
    ],
)
def test_every_rank_answers_for_itself(
    first: tuple[int, int, str], second: tuple[int, int, str] | None, line: str
) -> None:
    assert storage_changes([rank(0, first), rank(1, *([second] if second else []))]) == [line]


def test_attaching_and_detaching_are_events_of_the_epoch_s_span() -> None:
    server = Server(0, page=16, l1=400, l2=800, quiet=True)
    server.emit(*TIER)
    server.serve([(FIRST, A)])
    server.emit(ev.StorageChanged, 0, 0, "Reject detach: scheduler is not idle.")
    spans = build_spans(judge([journal_as_read(renumbered(server.events))]))
    changed = [e for span in spans if span.name == sc.EPOCH for e in span.events if e.name == sc.STORAGE_CHANGED]
    assert [(e.attributes[sc.STORAGE_ATTACH], e.attributes[sc.STORAGE_DONE]) for e in changed] == [
        (True, True),
        (False, False),
    ]
