"""Requests side by side: their order, and what is kept when the user breaks off."""

from __future__ import annotations

import _thread
import threading

import pytest

from kvwitness.tracer.protocol.client import GenerateCall, RequestInterrupted, interrupted_record
from kvwitness.tracer.protocol.parallel import ManyInterrupted, generate_all
from kvwitness.tracer.protocol.prompts import Prompt
from kvwitness.tracer.protocol.record import RequestRecord


def calls(count: int) -> list[GenerateCall]:
    return [GenerateCall(f"r{n}", "A", n, Prompt((n, n)), 1) for n in range(count)]


def answered(call: GenerateCall) -> RequestRecord:
    record = interrupted_record(call, 1, 0.0)
    return type(record)(**{**{f: getattr(record, f) for f in record.__struct_fields__}, "error": None})


@pytest.mark.parametrize("clients", [1, 3, 9])
def test_records_come_in_the_order_of_the_calls(clients: int) -> None:
    assert [record.rid for record in generate_all(calls(5), clients, answered)] == ["r0", "r1", "r2", "r3", "r4"]


def test_no_more_than_the_clients_are_under_way() -> None:
    lock, under_way, most = threading.Lock(), 0, 0

    def generate(call: GenerateCall) -> RequestRecord:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        with lock:
            under_way -= 1
        return answered(call)

    generate_all(calls(40), 4, generate)
    assert 1 <= most <= 4


def test_an_interruption_keeps_what_was_answered_and_what_was_under_way() -> None:
    release, waiting = threading.Event(), threading.Barrier(2)

    def generate(call: GenerateCall) -> RequestRecord:
        if call.order < 2:
            return answered(call)
        if waiting.wait(30) == 0:
            _thread.interrupt_main()
        release.wait(30)
        return answered(call)

    with pytest.raises(ManyInterrupted) as caught:
        generate_all(calls(6), 2, generate)
    release.set()
    errors = [record.error for record in caught.value.records]
    assert errors == [None, None, "interrupted by the user", "interrupted by the user"]


def test_a_single_client_keeps_the_request_that_was_cut_short() -> None:
    def generate(call: GenerateCall) -> RequestRecord:
        if call.order == 1:
            raise RequestInterrupted(interrupted_record(call, 1, 0.0))
        return answered(call)

    with pytest.raises(ManyInterrupted) as caught:
        generate_all(calls(3), 1, generate)
    assert [record.rid for record in caught.value.records] == ["r0", "r1"]


def test_what_goes_wrong_in_a_thread_is_not_waited_for() -> None:
    def generate(call: GenerateCall) -> RequestRecord:
        if call.order == 1:
            raise RuntimeError("a mistake")
        return answered(call)

    with pytest.raises(RuntimeError, match="a mistake"):
        generate_all(calls(4), 2, generate)
