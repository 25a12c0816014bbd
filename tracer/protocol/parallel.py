"""Several requests under way at once, one thread each, so that none waits for another's answer to be read."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvwitness.tracer.protocol.client import GenerateCall, RequestInterrupted, interrupted_record
from kvwitness.tracer.protocol.record import RequestRecord

_ASK_S: Final = 0.2

Generate = Callable[[GenerateCall], RequestRecord]


class ManyInterrupted(KeyboardInterrupt):
    """Ctrl-C while requests were under way; ``records`` has all that were sent, in the order sent."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        super().__init__()
        self.records = tuple(records)


def generate_all(calls: Sequence[GenerateCall], clients: int, generate: Generate) -> list[RequestRecord]:
    """Send ``calls`` by up to ``clients`` at once and return their records in the order of ``calls``.

    A single client's calls run on the calling thread. Raises :class:`ManyInterrupted` on Ctrl-C, and threads that still
    wait for an answer are then left to end by themselves; and whatever ``generate`` raises, once all calls have ended.
    """
    if clients == 1 or len(calls) == 1:
        return _one_by_one(calls, generate)
    waiting: queue.SimpleQueue[GenerateCall] = queue.SimpleQueue()
    for call in calls:
        waiting.put(call)
    started: dict[int, tuple[int, float]] = {}
    done: dict[int, RequestRecord] = {}
    failures: list[BaseException] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            try:
                call = waiting.get_nowait()
            except queue.Empty:
                return
            started[call.order] = time.time_ns(), time.monotonic()
            try:
                done[call.order] = generate(call)
            except BaseException as error:  # nobody else would see it, and the main thread would wait for ever
                failures.append(error)
            ended.put(call.order)

    try:
        for number in range(min(clients, len(calls))):
            threading.Thread(target=client, name=f"kvwitness-client-{number}", daemon=True).start()
        left = len(calls)
        while left:
            try:
                ended.get(timeout=_ASK_S)
                left -= 1
            except queue.Empty:
                continue
    except KeyboardInterrupt as error:
        stop.set()
        sent = [call for call in calls if call.order in started]
        records = [done.get(call.order) or interrupted_record(call, *started[call.order]) for call in sent]
        raise ManyInterrupted(records) from error
    if failures:
        raise failures[0]
    return [done[call.order] for call in calls]


def _one_by_one(calls: Sequence[GenerateCall], generate: Generate) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    try:
        for call in calls:
            records.append(generate(call))
    except RequestInterrupted as interrupt:
        raise ManyInterrupted([*records, interrupt.record]) from interrupt
    except KeyboardInterrupt as error:
        raise ManyInterrupted(records) from error
    return records
