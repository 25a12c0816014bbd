"""What a mutator is, and what all of them need: one step of a recipe, and records that look whole again afterwards."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvwitness.patches.schema import events as ev

Events = list[ev.Event]


@dataclass(frozen=True)
class Step:
    """One change of a record: of which event, of which of its fields (``-``: none in particular), how, and in words."""

    event: str
    field: str
    mutator: str
    told: str

    def __str__(self) -> str:
        return self.told

    @property
    def key(self) -> tuple[str, str, str]:
        """What statistics are kept of."""
        return self.event, self.field, self.mutator


Mutation = Callable[[random.Random, Events], "Step | None"]
"""Changes the list in place. None: there was nothing to change."""


def told(event: ev.Event) -> str:
    """An event in few words."""
    values = [f"{f.name}={getattr(event, f.name)}" for f in dataclasses.fields(event)[2:]]
    return f"{type(event).__name__}#{event.seq}({', '.join(values)})"[:140]


def of(event: ev.Event, mutator: str, words: str, field: str = "-") -> Step:
    """A step about one event."""
    return Step(type(event).__name__, field, mutator, words[:260])


def renumber(events: Events) -> None:
    """Sequence numbers without a hole, in the order written."""
    for index, event in enumerate(events):
        if event.seq != index + 1:
            events[index] = dataclasses.replace(event, seq=index + 1)


def steady(events: Events) -> None:
    """Clocks that do not run backwards."""
    clock = 0
    for index, event in enumerate(events):
        clock = max(clock, event.t_ns)
        if event.t_ns != clock:
            events[index] = dataclasses.replace(event, t_ns=clock)


def retimed(events: Events, times: Sequence[int]) -> None:
    """The clock readings of the record before it was reordered, in the new order: a move leaves no trace in them."""
    for index, (event, time) in enumerate(zip(events, sorted(times), strict=True)):
        if event.t_ns != time:
            events[index] = dataclasses.replace(event, t_ns=time)


def free_slots(events: Iterable[ev.Event]) -> list[int | None]:
    """Behind every event: how many slots of the anchor pool are free, counted from the first event that says so."""
    free: int | None = None
    found: list[int | None] = []
    for event in events:
        if isinstance(event, ev.HostAlloc | ev.HostFree) and event.pool == 0:
            size = sum(run.length for run in event.slots)
            free = event.available if free is None else free + (size if isinstance(event, ev.HostFree) else -size)
        elif isinstance(event, ev.SnapshotBegin) or (isinstance(event, ev.HostClear) and event.pool == 0):
            free = event.available
        found.append(free)
    return found


def first_free(events: Iterable[ev.Event]) -> int | None:
    """Free slots before the first event that changes them."""
    for event in events:
        if isinstance(event, ev.HostAlloc | ev.HostFree) and event.pool == 0:
            size = sum(run.length for run in event.slots)
            return event.available + (size if isinstance(event, ev.HostAlloc) else -size)
        if isinstance(event, ev.SnapshotBegin | ev.HostClear):
            return event.available
    return None


def recount(events: Events, free: int | None) -> None:
    """The pool's own count in the order that the events have now; ``free`` slots there are before the first one."""
    if free is None:
        return
    for index, event in enumerate(events):
        if isinstance(event, ev.HostAlloc | ev.HostFree) and event.pool == 0:
            size = sum(run.length for run in event.slots)
            free += size if isinstance(event, ev.HostFree) else -size
        elif isinstance(event, ev.SnapshotBegin) or (isinstance(event, ev.HostClear) and event.pool == 0):
            free = event.available
        elif not isinstance(event, ev.BackupRejected | ev.EvictHostBegin):
            continue
        if event.available != free:
            events[index] = dataclasses.replace(event, available=max(0, free))


def requests_of(events: Iterable[ev.Event]) -> list[int]:
    """The numbers of the requests that were queued, in that order."""
    return list(dict.fromkeys(e.req for e in events if isinstance(e, ev.Queued | ev.WaitingAtAttach)))
