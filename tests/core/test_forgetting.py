"""What the recorder keeps of requests does not grow with their number: a server runs for months."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.config import Config, Faults
from kvwitness.patches.hooks.scheduler import HOOKS
from kvwitness.patches.schema.events import AbortedInQueue, Prefill, PrefillDone, Released, Text
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


BY_FUNCTION = {hook.attribute: hook for hook in HOOKS}
"""The scheduler's hooks, here called as SGLang's calls would."""


def compute(w: Witness, rid: str, *, done_first: bool, processed: bool = True) -> None:
    """A request that ends with its first token: SGLang gives it back while it processes the pass (``done_first``: after
    it). ``processed``: not, when the scheduler drops the pass's result."""
    names = ("run_batch", "process_batch_result_prefill", "on_release")
    enter, results, release = (BY_FUNCTION[name] for name in names)
    plain = {"rid": rid, "origin_input_ids": [1, 2, 3], "output_ids": [4], "cached_tokens": 0}
    req = SimpleNamespace(**plain, finished=lambda: True, finished_reason=None)
    w.digest(req, req.origin_input_ids, (3,))
    mode = SimpleNamespace(is_extend=lambda: True)
    batch = SimpleNamespace(forward_mode=mode, reqs=[req], prefix_lens=[0], extend_lens=[3])
    assert enter.enter and results.seen and release.seen
    enter.enter(w, (None, batch), {})
    if not done_first:
        release.seen(w, None, None, (None, req), {})
    if processed:
        results.seen(w, None, None, (None, batch), {})
    if done_first:
        release.seen(w, None, None, (None, req), {})


WAYS: dict[str, Callable[[Witness, str], None]] = {
    "aborted in the queue": serve,
    "done before its end": partial(compute, done_first=True),
    "ended by its first token": partial(compute, done_first=False),
    "its result was dropped": partial(compute, done_first=False, processed=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_requests_that_are_over_leave_nothing(witness: Witness, way: str) -> None:
    for number in range(3000):
        WAYS[way](witness, f"before-{number:032}")
    tracemalloc.start()
    try:
        for number in range(20_000):
            WAYS[way](witness, f"request-{number:032}")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 600_000, f"{held} bytes after 20,000 requests"


def test_the_pass_of_a_request_that_ended_by_its_first_token_is_done(witness: Witness, tmp_path: Path) -> None:
    compute(witness, "r", done_first=False)
    witness.stop()
    (path,) = find_journals(tmp_path)
    kinds = [type(event) for event in read_journal(path).events]
    assert kinds[-3:] == [Prefill, Released, PrefillDone]


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
