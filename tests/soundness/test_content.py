"""Grade "verified" and its opposite: what the digests of pages show, on recorded runs and on what is made of them."""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from journal_tools import renumbered

from kvwitness.collectors.journal import parse_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Link, Reason, RequestVerdict, Tier
from soundness.compare import compare, journal_as_read
from soundness.simulate import Server

DATA = Path(__file__).parent / "data"
Events = list[ev.Event]


@cache
def recorded(name: str) -> tuple[ev.Event, ...]:
    raw = lzma.decompress((DATA / f"{name}-0.5.23-rust.kvwj.xz").read_bytes())
    return tuple(parse_journal(raw, "scheduler-1-1.kvwj").events)


def about_c(events: Events) -> RequestVerdict:
    """The verdict about C; the oracle must agree with everything that is claimed."""
    assert compare(events).false == ()
    return judge([journal_as_read(events)]).verdicts[-1]


def digests(events: Events, kind: type[ev.Event]) -> list[int]:
    return [at for at, event in enumerate(events) if type(event) is kind]


def test_equal_digests_of_every_page_verify_the_read() -> None:
    c = about_c(list(recorded("digests")))
    assert (c.tier, c.grade, c.reason) == (Tier.L2, Grade.VERIFIED, Reason.L2_READ)
    assert c.sentence == "L2 read verified"
    (link,) = [link for r in c.ranges for link in r.links if link.link is Link.CONTENT]
    assert link.holds and "94 of 94 pages" in link.detail
    assert {event.kind for event in link.events} == {"BackupDigested", "LoadDigested"}


def test_a_byte_flip_is_called_corruption_with_page_layer_and_both_events() -> None:
    events = list(recorded("byte-flip"))
    c = about_c(events)
    assert (c.tier, c.grade, c.reason) == (Tier.L2, Grade.REFUTED, Reason.CORRUPTION_SUSPECTED)
    assert c.sentence.startswith("L2 read corrupted: the page of tokens 0 to 16 (host slots ")
    assert "in layer 2: event " in c.sentence
    (link,) = [link for r in c.ranges for link in r.missing]
    assert link.link is Link.CONTENT
    assert [event.kind for event in link.events] == ["BackupDigested", "LoadDigested"]
    assert all(event.seq in {e.seq for e in events} for event in link.events)


def test_a_sample_says_how_many_pages_it_is() -> None:
    events = list(recorded("digests"))
    kept = set(digests(events, ev.LoadDigested)[::16])
    sampled = [e for at, e in enumerate(events) if not isinstance(e, ev.LoadDigested) or at in kept]
    assert about_c(renumbered(sampled)).sentence == "L2 read verified (6 of 94 pages sampled)"


def without(kind: type[ev.Event]) -> Callable[[Events], Events]:
    return lambda events: [event for event in events if not isinstance(event, kind)]


def twice(events: Events) -> Events:
    at = digests(events, ev.LoadDigested)[3]
    return [*events[: at + 1], events[at], *events[at + 1 :]]


def of_fewer_layers(events: Events) -> Events:
    at = digests(events, ev.LoadDigested)[3]
    event = events[at]
    assert isinstance(event, ev.LoadDigested)
    return [*events[:at], dataclasses.replace(event, digests=event.digests[:-1]), *events[at + 1 :]]


def after_it_had_left_l1(events: Events) -> Events:
    """One page is digested only after its node was evicted."""
    at = digests(events, ev.LoadDigested)[3]
    load = next(e for e in events if isinstance(e, ev.LoadQueued))
    gone = (
        ev.EvictBegin(0, 0, 900, ev.Cause.PREFILL, 1504, 0, 0, ()),
        ev.EvictedL1(0, 0, 900, load.node, load.start, load.end, ev.Eviction.DEMOTED, load.tokens, 0),
        ev.EvictEnd(0, 0, 900, load.tokens),
    )
    stamp = events[-2].t_ns
    moved = [dataclasses.replace(e, t_ns=stamp) for e in (*gone, events[at])]
    return [*events[:at], *events[at + 1 : -1], *moved, events[-1]]


def of_another_transfer(events: Events) -> Events:
    return [dataclasses.replace(e, transfer=e.transfer + 7) if isinstance(e, ev.LoadDigested) else e for e in events]


@pytest.mark.parametrize(
    "bend",
    [
        pytest.param(without(ev.BackupDigested), id="no digests from the backup"),
        pytest.param(without(ev.LoadDigested), id="no digests after the load"),
        twice,
        of_fewer_layers,
        after_it_had_left_l1,
        of_another_transfer,
    ],
)
@pytest.mark.parametrize("run", ["digests", "byte-flip"])
def test_what_does_not_show_equality_leaves_the_read_confirmed(bend: Callable[[Events], Events], run: str) -> None:
    c = about_c(renumbered(bend(list(recorded(run)))))
    assert (c.grade, c.sentence) == (Grade.CONFIRMED, "L2 read confirmed")


def test_a_hook_that_is_not_there_is_named_and_nothing_is_verified() -> None:
    events = list(recorded("digests"))
    for at, event in enumerate(events):
        if isinstance(event, ev.Facts) and event.kind == ev.FactKind.COVERAGE:
            facts = json.loads(event.json)
            for hook in facts["hooks"]:
                if hook["name"] == "copies.backup":
                    hook["status"] = "missing"
            events[at] = dataclasses.replace(event, json=json.dumps(facts))
    assert about_c(events).grade is Grade.CONFIRMED
    c = about_c(renumbered(without(ev.BackupDigested)(events)))
    assert any("copies.backup is not installed" in note for note in c.notes)


def test_without_digests_asked_for_nothing_is_said_about_content() -> None:
    server = Server(0, page=16, l1=96, l2=800, quiet=True)
    a, fill = tuple(range(65)), tuple(range(1000, 1097))
    for rid, tokens in (("a", a), ("fill", fill), ("c", a)):
        server.serve([(rid, tokens)])
    c = about_c(server.events)
    assert c.sentence == "L2 read confirmed" and not c.notes
    assert not [link for r in c.ranges for link in r.links if link.link is Link.CONTENT]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_split_after_the_backup_changes_nothing_about_the_bytes(wrong: bool) -> None:
    """The node is split between its backup and its load: pages are known by their host slots."""
    server = Server(0, page=16, l1=160, l2=800, quiet=True, digested=1.0)
    a = tuple(range(65))
    server.serve([("a", a)])
    server.serve([("other", (*a[:32], *range(2000, 2033)))])
    server.serve([("fill", tuple(range(3000, 3160)))])
    server.content.random = lambda: 0.5 if not wrong else 0.02  # type: ignore[method-assign]
    server.serve([("c", a)])
    c = about_c(server.events)
    assert c.sentence.startswith("L2 read corrupted" if wrong else "L2 read verified"), c.sentence
