"""A record that grows without an end: read in portions, judged as if it were read whole, in bounded memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from journal_tools import FIXTURES, journal_of, to_bytes
from soundness.simulate import Server
from soundness.sources import attached_bases, bases, digested_bases, stored_bases

from kvwitness.collectors.journal import JournalUnreadable, read_journal
from kvwitness.collectors.tail import HOLE_S, Tail
from kvwitness.patches.recorder import Recorder
from kvwitness.patches.schema import events as ev
from kvwitness.patches.schema import format as fmt
from kvwitness.tracer.growing import Growing
from kvwitness.tracer.judgement import judge_instances
from kvwitness.tracer.ledger.derive import Ledger, derive
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.ledger.numbers import Numbers
from kvwitness.tracer.model import Grade, RequestVerdict, Tier
from kvwitness.tracer.outside.records import Line
from kvwitness.tracer.watch.loop import Source, Watcher
from kvwitness.tracer.watch.tallies import News

RECORDED = sorted(FIXTURES.glob("*.kvwj"))


def portions(tail: Tail, most: int) -> Iterator[list[ev.Event]]:
    now = 0.0
    while True:
        events = tail.read(most, now)
        if not events and not tail.behind and now > HOLE_S:
            return
        now = 0.0 if events else now + HOLE_S
        yield events


# --- reading on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_in_portions_a_journal_says_what_it_says_as_a_whole(path: Path) -> None:
    whole, tail = read_journal(path), Tail(path)
    assert [event for portion in portions(tail, 100) for event in portion] == list(whole.events)
    state = tail.state
    for name in state.__struct_fields__:
        assert getattr(state, name) == getattr(whole, name), name


def test_what_is_torn_ends_its_chunk_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "scheduler-1-1.kvwj"
    raw = bytearray(RECORDED[0].read_bytes())
    raw[fmt.HEADER_BYTES + 5000] ^= 0xFF
    path.write_bytes(raw)
    whole, tail = read_journal(path), Tail(path)
    assert [event for portion in portions(tail, 50) for event in portion] == list(whole.events)
    assert whole.anomalies and tail.state.anomalies == whole.anomalies
    assert tail.state.gaps == whole.gaps


def test_while_several_threads_write(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="scheduler", quota_bytes=8 << 20, chunk_bytes=1 << 14)
    tail = Tail(recorder.path)
    threads = [
        threading.Thread(target=lambda: [recorder.emit(ev.Released, 1, 1, i, 0, 0, 0, 0) for i in range(3000)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    seen: list[ev.Event] = []
    while any(thread.is_alive() for thread in threads):
        seen += tail.read(500, 0.0)
    recorder.close()
    while not tail.state.closed:
        seen += tail.read(500, 0.0)
    assert [event.seq for event in seen] == list(range(1, 9002))
    assert tail.state.gaps == () and tail.state.anomalies == ()


def test_a_number_that_does_not_come_is_waited_for_and_then_a_gap(tmp_path: Path) -> None:
    events = list(read_journal(RECORDED[0]).events)
    path = tmp_path / "scheduler-1-1.kvwj"
    path.write_bytes(to_bytes(events[:50] + events[53:]))
    tail = Tail(path)
    assert len(tail.read(1000, 10.0)) == 50 and tail.read(1000, 11.0) == []
    assert tail.read(1000, 10.0 + HOLE_S) == [] and tail.state.gaps == ()
    assert tail.read(1000, 11.0 + HOLE_S) == events[53:]
    assert [(gap.first, gap.last) for gap in tail.state.gaps] == [(51, 53)]
    at_once = Tail(path)
    assert len(at_once.read(1000, 10.0, last=True)) == 50
    assert at_once.read(1000, 10.0, last=True) == events[53:]


def test_what_is_no_journal_yet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scheduler-1-1.kvwj").write_bytes(b"")
    with pytest.raises(JournalUnreadable):
        Tail(tmp_path / "scheduler-1-1.kvwj")
    growing = Growing(tmp_path)
    assert not growing.refresh(0.0) and growing.states == []
    (tmp_path / "scheduler-1-1.kvwj").write_bytes(RECORDED[0].read_bytes())
    assert growing.refresh(1.0) and len(growing.instances()) == 1


# --- the ledger ----------------------------------------------------------------------------------

JOURNALS = {**bases(24), **attached_bases(16), **digested_bases(12), **stored_bases(12)}


@pytest.mark.parametrize("name", sorted(JOURNALS))
def test_a_ledger_that_goes_on_knows_what_one_pass_knows(name: str) -> None:
    events, chance = JOURNALS[name], random.Random(name)
    ledger, at = Ledger(), 0
    while at < len(events):
        step = chance.randint(1, 60)
        ledger.take(events[at : at + step])
        at += step
        if chance.random() < 0.2:
            so_far = journal_of(events[:at])
            assert ledger.facts(so_far) == derive(so_far)
    assert ledger.facts(journal_of(events)) == derive(journal_of(events))


def claims(verdict: RequestVerdict) -> set[tuple[int, Tier, Grade]]:
    """Every token for which reuse is claimed, and what."""
    return {
        (token, part.tier, part.grade)
        for part in verdict.ranges
        if part.grade in (Grade.CONFIRMED, Grade.VERIFIED)
        for token in range(part.start, part.end)
    }


def judged(facts: InstanceFacts) -> dict[tuple[str, int, int | None], RequestVerdict]:
    return {(v.rid, v.attempt, v.queued_ns): v for v in judge_instances((facts,)).verdicts}


@pytest.mark.parametrize("name", sorted(JOURNALS))
def test_what_is_forgotten_never_raises_a_claim(name: str) -> None:
    """Also with a memory that is far too short: fifteen events."""
    events = JOURNALS[name]
    ledger, claimed, forgot = Ledger(), 0, 0
    for at in range(0, len(events), max(len(events) // 9, 15)):
        ledger.take(events[at : at + max(len(events) // 9, 15)])
        so_far = journal_of(events[: ledger.last])
        whole = judged(derive(so_far))
        for key, verdict in judged(ledger.facts(so_far)).items():
            extra = claims(verdict) - claims(whole[key])
            assert not extra, f"{verdict.rid}: {sorted(extra)[:3]}, {verdict.sentence}; whole: {whole[key].sentence}"
            for reason in ("never backed up", "left L2", "not matched"):
                assert reason not in verdict.sentence or reason in whole[key].sentence, verdict.sentence
            claimed += len(claims(verdict))
        before = max(ledger.last - max(len(events) // 12, 15), 0)
        leaving = ledger.settled(before)
        forgot += len(leaving)
        ledger.forget(leaving, before)
    assert forgot


def test_a_number_below_the_last_ones_counts_as_given_away() -> None:
    numbers = Numbers()
    for number in range(5, 40_000):
        numbers.add(number)
    assert 3 not in numbers and 5 in numbers
    numbers.compact()
    assert 3 in numbers and 5 in numbers and 39_999 in numbers and 40_000 not in numbers


# --- watching ------------------------------------------------------------------------------------


class Seen:
    """A view that keeps everything."""

    def __init__(self) -> None:
        self.all: list[News] = []

    def news(self, news: News, now_s: float) -> None:
        self.all.append(news)

    def counted(self, line: Line) -> None: ...
    def server(self, line: Line) -> None: ...
    def unanswered(self, line: Line) -> None: ...
    def gap(self, text: str) -> None: ...

    @property
    def verdicts(self) -> list[RequestVerdict]:
        return [verdict for news in self.all for verdict in news.requests]


def long_record(turns: int) -> list[ev.Event]:
    """A server with a working set that moves on: most of what it served is never asked for again."""
    server, chance = Server(7, l1=128, l2=320), random.Random(7)
    pool: list[tuple[int, ...]] = []
    for turn in range(turns):
        pool = [*pool[-5:], tuple(chance.randrange(1000) for _ in range(chance.choice((24, 40, 56))))]
        base = chance.choice(pool)
        server.serve([(f"request-{turn}", (*base[: chance.choice((len(base), 17, 35))], chance.randrange(1000)))])
    server.emit(ev.Closed, 0, 0)
    return list(server.events)


def size(facts: InstanceFacts) -> int:
    lists: Sequence[Sequence[object]] = (
        facts.requests,
        facts.backups,
        facts.evictions,
        facts.host_evictions,
        facts.loads,
        facts.residencies,
        tuple(facts.chains),
    )
    return sum(map(len, lists))


def test_a_long_record_is_told_whole_and_remembered_in_part(tmp_path: Path) -> None:
    events = long_record(600)
    (tmp_path / "scheduler-1-1.kvwj").write_bytes(to_bytes(events))
    growing = Growing(tmp_path, remembered=400, portion=200)
    view = Seen()
    watcher = Watcher(Source(tmp_path, None), view, growing)
    watcher.begin()
    watcher.round(0.0)
    watcher.round(1.0, last=True)
    whole = {v.rid: v for v in judge_instances((derive(journal_of(events)),)).verdicts}
    told = {verdict.rid: verdict for verdict in view.verdicts}
    assert len(view.verdicts) == len(told) == len(whole) == 600
    different = [rid for rid, verdict in told.items() if claims(verdict) != claims(whole[rid])]
    assert not different, different[:5]
    assert sum(len(claims(verdict)) for verdict in told.values()) > 3000
    facts = derive(journal_of(events))
    assert sum(len(news.evictions) for news in view.all) == sum(
        len({v.how for v in call.victims}) for call in facts.evictions
    ) + len(facts.host_evictions)
    assert sum(one.tokens for news in view.all for one in news.loads) == sum(load.tokens for load in facts.loads)
    (left,) = growing.instances()
    assert size(left) < size(facts) / 4


def test_memory_does_not_grow_with_the_record() -> None:
    """Twice the record, no more to remember."""
    sizes = []
    for turns in (600, 1200):
        ledger = Ledger()
        events = long_record(turns)
        for at in range(0, len(events), 200):
            ledger.take(events[at : at + 200])
            before = max(ledger.last - 400, 0)
            ledger.forget(ledger.settled(before), before)
        sizes.append(size(ledger.facts(journal_of(events))))
    assert sizes[1] < 1.3 * sizes[0]


def test_a_request_of_two_ranks_is_told_once(tmp_path: Path) -> None:
    """One rank is far ahead: nothing is dropped that the other still tells of."""
    events = long_record(300)
    for rank in (0, 1):
        (tmp_path / f"scheduler-{rank + 1}-1.kvwj").write_bytes(to_bytes(events[: len(events) - 900 * rank]))
    growing = Growing(tmp_path, remembered=300, portion=150)
    view = Seen()
    watcher = Watcher(Source(tmp_path, None), view, growing)
    watcher.begin()
    watcher.round(0.0)
    watcher.round(100.0, last=True)
    rids = [verdict.rid for verdict in view.verdicts]
    assert len(rids) == len(set(rids)) == 300
