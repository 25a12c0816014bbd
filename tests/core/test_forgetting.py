"""What the recorder keeps of requests does not grow with their number: a server runs for months."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.config import Config, Faults
from kvwitness.patches.schema.events import AbortedInQueue, Text
from kvwitness.patches.witness import Witness


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    w = Witness(Config(tmp_path, 8 << 20, Faults()))
    w.open("scheduler")
    yield w
    w.stop()


def serve(w: Witness, rid: str) -> None:
    req = SimpleNamespace(rid=rid, origin_input_ids=[1, 2, 3], output_ids=[])
    w.digest(req, req.origin_input_ids, (3,))
    w.emit(AbortedInQueue, w.req_id(req))
    w.forget(req)


def test_requests_that_are_over_leave_nothing(witness: Witness) -> None:
    for number in range(3000):
        serve(witness, f"before-{number:032}")
    tracemalloc.start()
    try:
        for number in range(20_000):
            serve(witness, f"request-{number:032}")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 600_000, f"{held} bytes after 20,000 requests"


def test_an_id_that_comes_again_much_later_gets_its_name_again(witness: Witness, tmp_path: Path) -> None:
    serve(witness, "again")
    for number in range(3000):
        serve(witness, str(number))
    serve(witness, "again")
    witness.stop()
    (path,) = find_journals(tmp_path)
    events = read_journal(path).events
    names = {event.id: event.text for event in events if isinstance(event, Text)}
    ended = [event.req for event in events if isinstance(event, AbortedInQueue)]
    assert names[ended[0]] == names[ended[-1]] == "again" and ended[0] != ended[-1]


def test_a_request_whose_id_is_in_use_keeps_its_number(witness: Witness) -> None:
    serve(witness, "again")
    req = SimpleNamespace(rid="again", origin_input_ids=[1, 2, 3], output_ids=[])
    witness.digest(req, req.origin_input_ids)
    number = witness.req_id(req)
    for other in range(3000):
        serve(witness, str(other))
    assert witness.req_id(req) == number
