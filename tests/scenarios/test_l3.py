"""What users met with storage (L3): the sequence of events, and the sentence that has to be given.

S21 to S24 are also run on a real server: tests/live/test_storage.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from journal_tools import described, renumbered
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


def test_s21_a_request_that_waits_for_ever_for_a_failed_transfer_says_so() -> None:
    """SGLang 0.5.17 with wait_complete: the transfer's thread is gone, and nobody ends the prefetch."""
    story = Story()
    server = story.server
    server.serve([(FIRST, A)])
    server.emit(ev.Queued, story.text(REPEAT), len(A), 0)
    for step in (asked(story), looked_up(story, 64), failed(story, ev.StorageWork.READ, "OSError: gone")):
        server.emit(*step)
    verdict = judge([journal_as_read(renumbered(server.events))]).verdicts[-1]
    assert (verdict.rid, verdict.grade) == (REPEAT, Grade.UNKNOWN)
    assert any("not admitted: it waits for its prefetch" in n and "OSError: gone" in n for n in verdict.notes)


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
    assert verdict.sentence.startswith("recomputed: never backed up to L3 (")


def test_s24_a_prefetch_that_the_policy_cut_short() -> None:
    story = Story()
    why = story.text("cut short by the prefetch policy best_effort")
    verdict = story.play(asked(story), (ev.PrefetchRevoked, story.text(REPEAT), why))
    nothing_read(verdict)
    assert "cut short by the prefetch policy best_effort before anything was in L2" in verdict.sentence
    (remedy,) = {link.remedy for r in verdict.ranges for link in r.missing if link.link is Link.PREFETCHED}
    assert "wait_complete or timeout" in remedy


@pytest.mark.parametrize(("policy", "remedy"), [("best_effort", "wait_complete or timeout"), ("timeout", "a longer")])
def test_s24_when_nothing_had_been_read_of_what_was_found(policy: str, remedy: str) -> None:
    story = Story()
    steps = [
        asked(story),
        looked_up(story, 64),
        (ev.PrefetchStopped, story.text(REPEAT), story.text(policy), 64, 0),
        (ev.PrefetchDone, story.text(REPEAT), 0, 0, 0, 0, 0, ()),
    ]
    verdict = story.play(*steps)
    nothing_read(verdict)
    assert f"cut short by the prefetch policy {policy} before anything was in L2" in verdict.sentence
    assert "the look-up had found 64 tokens" in verdict.sentence and "promised" not in verdict.sentence
    assert any(remedy in link.remedy for r in verdict.ranges for link in r.missing)


def test_s24_is_not_said_where_the_storage_thread_failed_first() -> None:
    story = Story()
    broken = failed(story, ev.StorageWork.READ, "OSError: gone")
    stopped = (ev.PrefetchStopped, story.text(REPEAT), story.text("timeout"), 64, 0)
    done = (ev.PrefetchDone, story.text(REPEAT), 0, 0, 0, 0, 0, ())
    verdict = story.play(asked(story), looked_up(story, 64), broken, stopped, done)
    assert "the page transfer in storage (L3) failed: OSError: gone" in verdict.sentence
    assert "cut short" not in verdict.sentence


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


def read_from_storage(
    stored: int = 64,
    drop: type[ev.Event] | None = None,
    found: int | None = None,
    then: tuple[Any, ...] | None = None,
    bend: Callable[[list[ev.Event]], list[ev.Event]] = list,
    **changed: Any,
) -> RequestVerdict:
    """A, a flush, and A again: a prefetch brings ``stored`` tokens of it. ``changed``: fields of its end.

    ``then``: happens before it. ``bend``: what becomes of all events.
    """
    server = Server(0, page=16, l1=400, l2=800, quiet=True)
    server.emit(*TIER)
    server.serve([(FIRST, A)])
    server.flush()
    match = server.match

    def after_the_prefetch(rid: str, tokens: tuple[int, ...]) -> list[Node]:
        number, slots = server.req(rid), server._pages(stored)
        server.free = [slot for slot in server.free if slot not in slots]
        if then is not None:
            server.emit(*then)
        server.emit(ev.PrefetchAsked, number, 1, 0, 64, 1)
        server.emit(ev.StorageLookedUp, number, stored if found is None else found)
        server.emit(ev.HostAlloc, 0, 0, len(server.free), server.runs(slots))
        node = Node(server.new_node(), 0, A[:stored], server.root, device=False, slots=slots)
        server.root.children.append(node)
        done = {"start": 0, "completed": stored, "existing": 0, "loaded": stored, "deadline": 0}
        server.emit(ev.PrefetchDone, number, *(done | changed).values(), server.runs(slots))
        return match(rid, tokens)

    server.match = after_the_prefetch  # type: ignore[method-assign]
    server.serve([(REPEAT, A)])
    events = [event for event in server.events if drop is None or not isinstance(event, drop)]
    return judge([journal_as_read(renumbered(bend(events)))]).verdicts[-1]


def test_what_storage_brought_for_the_request_is_an_l3_read() -> None:
    verdict = read_from_storage()
    assert (verdict.sentence, verdict.reason, verdict.tokens.l3) == ("L3 read confirmed", Reason.L3_READ, 64)


@pytest.mark.parametrize("event", [ev.PrefetchAsked, ev.PrefetchDone, ev.LoadDone, ev.HostAlloc, ev.PrefillDone])
def test_without_any_of_its_events_an_l3_read_is_not_confirmed(event: type[ev.Event]) -> None:
    verdict = read_from_storage(drop=event)
    assert verdict.grade not in (Grade.CONFIRMED, Grade.VERIFIED, Grade.RECOMPUTED), verdict.sentence


@pytest.mark.parametrize(
    "changed", [{"start": 16}, {"completed": 80, "loaded": 80}, {"loaded": 48, "existing": 16}, {"completed": 48}]
)
def test_a_prefetch_of_other_tokens_confirms_nothing(changed: dict[str, int]) -> None:
    assert read_from_storage(**changed).grade is not Grade.CONFIRMED


def test_a_prefetch_that_brought_more_than_the_look_up_found_confirms_nothing() -> None:
    verdict = read_from_storage(found=48)
    assert verdict.grade is not Grade.CONFIRMED
    assert "the prefetch brought 64 tokens, the look-up had found 48" in verdict.sentence


def test_without_a_backend_by_the_events_an_l3_read_is_not_confirmed() -> None:
    verdict = read_from_storage(then=(ev.StorageChanged, 0, 1, "detached"))
    assert verdict.grade is not Grade.CONFIRMED
    assert "no storage backend was attached when the prefetch was asked for" in verdict.sentence


def last(events: Sequence[ev.Event], kind: type[ev.Event]) -> int:
    return max(i for i, event in enumerate(events) if isinstance(event, kind))


def test_what_the_tree_says_is_in_l1_was_not_read_from_storage() -> None:
    def in_l1(events: list[ev.Event]) -> list[ev.Event]:
        at = last(events, ev.Matched)
        path = tuple(step._replace(on_device=1) for step in events[at].path)
        return [*events[:at], dataclasses.replace(events[at], path=path), *events[at + 1 :]]

    assert read_from_storage(bend=in_l1).grade is not Grade.CONFIRMED


def test_a_prefetch_that_was_asked_for_before_the_request_came_is_not_its_own() -> None:
    def too_early(events: list[ev.Event]) -> list[ev.Event]:
        asked_at, queued = last(events, ev.PrefetchAsked), last(events, ev.Queued)
        early = dataclasses.replace(events[asked_at], t_ns=events[queued].t_ns)
        return [*events[:queued], early, *events[queued:asked_at], *events[asked_at + 1 :]]

    verdict = read_from_storage(bend=too_early)
    assert verdict.grade is not Grade.CONFIRMED and "not seen to be asked for" in verdict.sentence


def test_a_prefetch_over_a_reset_confirms_nothing() -> None:
    def reset(events: list[ev.Event]) -> list[ev.Event]:
        at = last(events, ev.StorageLookedUp)
        return [*events[:at], ev.Reset(0, events[at].t_ns, 1), *events[at:]]

    verdict = read_from_storage(bend=reset)
    assert verdict.grade is not Grade.CONFIRMED and "reset after the prefetch was asked for" in verdict.sentence


def test_a_node_number_that_was_seen_for_something_else_confirms_nothing() -> None:
    def twice(events: list[ev.Event]) -> list[ev.Event]:
        at = last(events, ev.Matched)
        path = (events[at].path[0]._replace(end=48),)
        return [*events[:at], dataclasses.replace(events[at], req=0, purpose=2, path=path), *events[at:]]

    verdict = read_from_storage(bend=twice)
    assert verdict.grade is not Grade.CONFIRMED and "seen for something else, too" in verdict.sentence


def test_a_policy_that_is_changed_is_no_new_attaching() -> None:
    """Attaching the same backend again: what is older than that may well be in storage."""
    story = Story()
    again = (ev.StorageChanged, 1, 1, "HiCache storage backend already enabled with same backend; policies updated.")
    verdict = story.play(asked(story), looked_up(story, 0), after_first=[again])
    nothing_read(verdict)
    assert "older than its attaching" not in verdict.sentence and "missing in storage (L3)" in verdict.sentence


def other_s_prefetch(drop: type[ev.Event] | None = None) -> tuple[RequestVerdict, RequestVerdict]:
    """What storage brought for one request is read by two later ones: from L2, then from L1."""
    server = Server(0, page=16, l1=160, l2=800, stored=True, quiet=True)
    server.backend.random = lambda: 0.99  # type: ignore[method-assign]
    server.serve([(FIRST, A)])
    server.flush()
    server.serve([("brought", A)])
    server.serve([("fill", tuple(range(1000, 1160)))])
    for rid in ("from L2", "from L1"):
        server.serve([(rid, A)])
    gone = {id(e) for e in server.events if drop is not None and isinstance(e, drop)}
    verdicts = judge([journal_as_read(renumbered([e for e in server.events if id(e) not in gone]))]).verdicts
    return verdicts[-2], verdicts[-1]


def test_what_another_request_s_prefetch_brought_is_an_l2_read() -> None:
    from_l2, from_l1 = other_s_prefetch()
    assert (from_l2.sentence, from_l1.sentence) == ("L2 read confirmed", "L1 read confirmed")
    born = next(link for r in from_l2.ranges for link in r.links if link.link is Link.BORN)
    assert "read from storage into L2 for request brought" in born.detail
    assert [event.kind for event in born.events] == ["PrefetchAsked", "StorageLookedUp", "PrefetchDone"]


@pytest.mark.parametrize("event", [ev.PrefetchAsked, ev.PrefetchDone])
def test_and_not_without_its_events(event: type[ev.Event]) -> None:
    assert all(verdict.grade is not Grade.CONFIRMED for verdict in other_s_prefetch(drop=event))


def test_a_part_of_it_from_storage_is_read_and_the_rest_is_computed() -> None:
    verdict = read_from_storage(stored=32)
    assert verdict.sentence == "L3 read confirmed"
    assert (verdict.tokens.l3, verdict.tokens.recomputed) == (32, 33)


ON, OFF = "file (prefetch policy timeout): attached", "Reject attach: scheduler is not idle."


def rank(number: int, *changes: tuple[int, int, str] | None, start: str = "of both ranks") -> InstanceFacts:
    """None: not recorded."""
    server = Server(number, page=16, l1=96, l2=96, quiet=True, start=start)
    for turn, change in enumerate(changes, 1):
        server._time = 10_000 * turn
        if change is not None:
            server.emit(ev.StorageChanged, *change)
    facts = derive(journal_as_read(server.events))
    ranks = {"dp_rank": number, "dp_size": 2, "tp_size": 1, "pp_size": 1}
    said = described({**facts.facts.shown, "ranks": ranks})
    return msgspec.structs.replace(facts, instance=f"scheduler-{number}", facts=said)


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


def test_a_rank_whose_answer_was_not_recorded_is_not_given_the_next_one() -> None:
    """Rank 1's journal does not have the attaching: its refusal to detach answers the second request, not the first."""
    busy = (0, 0, "Reject detach: scheduler is not idle.")
    lines = storage_changes([rank(0, (1, 1, ON), (0, 1, "Detached.")), rank(1, None, busy)])
    assert lines[0].startswith("storage attach took effect on rank dp 0 and was not recorded on rank dp 1")
    assert lines[1].startswith("storage detach took effect on rank dp 0 and was refused on rank dp 1")


def test_ranks_that_say_different_things_are_told_apart() -> None:
    again = "HiCache storage backend already enabled with same backend; policies updated."
    lines = storage_changes([rank(0, (1, 1, again)), rank(1, (1, 1, ON))])
    assert lines == [f"storage attached: on rank dp 0 {again}; on rank dp 1 {ON}"]


def test_a_refused_attaching_is_told_of_the_requests_of_that_rank() -> None:
    story = Story(attached=False)
    verdict = story.play(after_first=[(ev.StorageChanged, 1, 0, "dynamic: connection refused")])
    nothing_read(verdict)
    assert "no storage (L3) is attached on this rank: attaching was refused (dynamic: connection" in verdict.sentence


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


def test_what_another_server_said_is_no_answer_to_a_change() -> None:
    """Started at another time: its storage is its own."""
    first, second = rank(0, (1, 1, ON)), rank(1, (1, 1, ON), start="another one")
    assert storage_changes([first, second]) == [f"storage attached: {ON}"] * 2
    assert storage_changes([first, rank(1, None)]) != [f"storage attached: {ON}"]
