"""Answers from facts: what the ledger knows of a request's prefix, and when it cannot tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from journal_tools import described

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.recorder import Recorder
from kvwitness.patches.schema.events import PathNode, Queued
from kvwitness.tracer.ledger.facts import (
    Backup,
    EpochFact,
    InstanceFacts,
    Load,
    MatchFact,
    Moment,
    RequestFacts,
    Residency,
)
from kvwitness.tracer.protocol.observer import (
    JournalObserver,
    all_settled,
    prefix_backed_up,
    prefix_in_l2,
    prefix_left_l1,
    read_written,
)

S = TypeVar("S", bound=msgspec.Struct)
PROMPT = 1503


def fact(cls: type[S], **given: Any) -> S:
    """A fact with the fields that matter here; the others are empty."""
    values = {}
    for field in msgspec.structs.fields(cls):
        if field.name in given or field.required:
            empty: Any = () if str(field.type).startswith("tuple") else None
            values[field.name] = given.get(field.name, empty)
    return cls(**values)


def at(seq: int) -> Moment:
    return Moment(seq, seq * 1000, "x")


def request(rid: str = "A", epoch: int = 0, released: int | None = 9, **more: Any) -> RequestFacts:
    moment = at(released) if released is not None else None
    return fact(RequestFacts, rid=rid, epoch=epoch, prompt_tokens=PROMPT, queued=at(1), released=moment, **more)


def holds(tier: str, start: int, end: int, until: int | None = None, owner: str = "A", **more: Any) -> Residency:
    values = {"epoch": 0, "node": 2, **more}
    ended = at(until) if until is not None else None
    return fact(Residency, tier=tier, start=start, end=end, owner=owner, since=at(5), until=ended, **values)


def backup(start: int, end: int, acked: int | None = 7, owner: str = "A", **more: Any) -> Backup:
    values = {"epoch": 0, "node": 2, "rid": owner, **more}
    return fact(Backup, start=start, end=end, owner=owner, acked=at(acked) if acked is not None else None, **values)


def rank(**facts: Any) -> InstanceFacts:
    values: dict[str, Any] = {
        "facts": described({"page_size": 16}),
        "epochs": (EpochFact(0, at(0)),),
        "requests": (request(),),
    }
    return fact(InstanceFacts, **{**values, **facts})


def test_the_prefix_has_left_l1_when_no_part_that_a_repeat_could_reuse_is_there() -> None:
    gone = rank(residencies=(holds("L1", 0, 1488, until=20), holds("L1", 1488, 1504, until=19)))
    half = rank(residencies=(holds("L1", 0, 800), holds("L1", 800, 1504, until=19)))
    assert prefix_left_l1([gone], "A") is True
    assert prefix_left_l1([half], "A") is False


def test_a_tail_that_no_repeat_can_reuse_does_not_count() -> None:
    # The last page holds the last prompt token, which is always computed anew.
    facts = rank(residencies=(holds("L1", 0, 1488, until=20), holds("L1", 1488, 1504)))
    assert prefix_left_l1([facts], "A") is True


def test_what_was_never_seen_in_l1_cannot_be_said_to_have_left_it() -> None:
    assert prefix_left_l1([rank()], "A") is None
    assert prefix_left_l1([rank(residencies=(holds("L1", 0, 1488, until=3),))], "unheard of") is None
    assert prefix_left_l1([], "A") is None


def test_missing_records_make_every_answer_unknown() -> None:
    facts = rank(residencies=(holds("L1", 0, 1488, until=20),), backups=(backup(0, 1504),), gaps=((3, 4, "lost"),))
    assert prefix_left_l1([facts], "A") is None
    assert prefix_backed_up([facts], "A") is None
    assert prefix_in_l2([facts], "A") is None
    assert all_settled([facts], ["A"]) is None


def test_every_rank_must_have_given_it_up() -> None:
    gone = rank(residencies=(holds("L1", 0, 1504, until=20),))
    held = rank(residencies=(holds("L1", 0, 1504),))
    elsewhere = rank(requests=())
    assert prefix_left_l1([gone, held], "A") is False
    assert prefix_left_l1([gone, gone, elsewhere], "A") is True


def test_a_prefix_that_another_request_brought_is_followed_under_that_name() -> None:
    path = (PathNode(2, 0, 1488, 1),)
    again = request("A2", match=fact(MatchFact, path=path))
    # After the match the node was split; both halves are still the first request's.
    held = rank(
        requests=(request(), again),
        residencies=(holds("L1", 0, 800, node=3), holds("L1", 800, 1488, until=20), holds("L1", 1488, 1504, until=9)),
    )
    assert prefix_left_l1([held], "A2") is False


def test_another_requests_question_is_not_part_of_the_prefix() -> None:
    b = request("B", match=fact(MatchFact, path=(PathNode(2, 0, 480, 1),)))
    facts = rank(requests=(request(), b), residencies=(holds("L1", 0, 480, until=20), holds("L1", 480, 1504, node=4)))
    assert prefix_left_l1([facts], "B") is True


def test_backed_up_needs_the_acknowledgement_and_the_whole_prefix() -> None:
    assert prefix_backed_up([rank(backups=(backup(0, 1488),))], "A") is True
    assert prefix_backed_up([rank(backups=(backup(0, 800), backup(800, 1504)))], "A") is True
    assert prefix_backed_up([rank(backups=(backup(0, 1488, acked=None),))], "A") is False
    assert prefix_backed_up([rank(backups=(backup(0, 800), backup(816, 1504)))], "A") is False
    assert prefix_backed_up([rank()], "A") is False


def test_in_l2_as_long_as_one_rank_holds_a_part() -> None:
    empty = rank(residencies=(holds("L2", 0, 1504, until=30),))
    part = rank(residencies=(holds("L2", 0, 16), holds("L2", 16, 1504, until=30)))
    assert prefix_in_l2([empty], "A") is False
    assert prefix_in_l2([empty, part], "A") is True


def test_after_a_reset_nothing_of_the_time_before_is_left() -> None:
    epochs = (EpochFact(0, at(0)), EpochFact(1, at(40)))
    facts = rank(
        epochs=epochs, residencies=(holds("L1", 0, 1504), holds("L2", 0, 1504)), backups=(backup(0, 1504, None),)
    )
    assert prefix_left_l1([facts], "A") is True
    assert prefix_in_l2([facts], "A") is False
    assert all_settled([facts], ["A"]) is True


def test_settled_needs_the_release_and_every_copy_in_both_directions() -> None:
    loading = fact(Load, rid="A", epoch=0, done=None)
    assert all_settled([rank(backups=(backup(0, 1504),))], ["A"]) is True
    assert all_settled([rank(requests=(request(released=None),))], ["A"]) is False
    assert all_settled([rank(backups=(backup(0, 1504, acked=None),))], ["A"]) is False
    assert all_settled([rank(loads=(loading,))], ["A"]) is False
    assert all_settled([rank()], ["A", "not yet seen"]) is False


def test_a_write_back_on_another_requests_account_is_waited_for_too() -> None:
    caused = backup(0, 1504, acked=None, owner="A", rid="F")
    facts = rank(requests=(request(), request("F")), backups=(caused,))
    assert all_settled([facts], ["F"]) is False


def test_a_live_journal_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="scheduler", quota_bytes=1 << 20, chunk_bytes=4096)
    try:
        # More than two chunks, so that full ones and one in use are there.
        for number in range(200):
            recorder.emit(Queued, number, PROMPT, 0)
        part, whole = read_written(recorder.path), read_journal(recorder.path)
    finally:
        recorder.close()
    assert part == whole
    assert len(part.events) >= 200 and not part.gaps
    closed = read_written(recorder.path)
    assert closed.closed and closed == read_journal(recorder.path)


def test_without_journals_nobody_can_tell(tmp_path: Path) -> None:
    (tmp_path / "scheduler-1-1.kvwj").write_bytes(b"not yet")
    observer = JournalObserver(tmp_path)
    assert observer.settled(["A"]) is None
    assert observer.left_l1("A") is None
