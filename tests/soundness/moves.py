"""Coordinated moves: what belongs together is told earlier or later, and the record looks whole again.

A transfer with its queueing and its end, an allocation with the backup into it, an eviction, an insert, a prefetch, a
request: all of a group goes to another place, numbers and clock readings are made anew, and the pool's own count too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvwitness.patches.schema import events as ev
from soundness.steps import Events, Mutation, Step, first_free, recount, renumber, requests_of, retimed

LANDMARKS = (
    ev.Queued,
    ev.Matched,
    ev.LoadQueued,
    ev.Admission,
    ev.Prefill,
    ev.PrefillDone,
    ev.Inserted,
    ev.Released,
    ev.TransferStarted,
    ev.BackupAcked,
    ev.LoadDone,
    ev.EvictBegin,
    ev.EvictEnd,
    ev.PrefetchDone,
    ev.Reset,
)


@dataclass(frozen=True)
class Group:
    """Indices of events that belong together, which part of which story they are, and whose."""

    what: str
    indices: tuple[int, ...]
    req: int = 0
    node: int = 0


Finder = Callable[[Events], Iterator[Group]]


def shift(events: Events, indices: Sequence[int], to: int) -> None:
    """Take these events out and put them, in their order, before what is at index ``to`` now."""
    free, times = first_free(events), [event.t_ns for event in events]
    chosen = set(indices)
    taken = [events[i] for i in sorted(chosen)]
    before = [event for i, event in enumerate(events[:to]) if i not in chosen]
    behind = [event for i, event in enumerate(events[to:], start=to) if i not in chosen]
    events[:] = [*before, *taken, *behind]
    renumber(events)
    retimed(events, times)
    recount(events, free)


def moving(name: str, find: Finder) -> Mutation:
    """A mutation that moves one of the groups that ``find`` knows."""

    def move(rng: random.Random, events: Events) -> Step | None:
        groups = [group for group in find(events) if group.indices]
        if not groups:
            return None
        parts = sorted({group.what for group in groups})
        what = rng.choice(parts)
        group = rng.choice([each for each in groups if each.what == what])
        to = _target(rng, events, group)
        if to is None:
            return None
        way = "earlier" if to <= group.indices[0] else "later"
        first = events[group.indices[0]]
        kinds = ", ".join(type(events[i]).__name__ for i in group.indices[:6])
        words = f"move {what} {way}, from #{first.seq} to before #{to + 1}: {kinds}"
        shift(events, group.indices, to)
        return Step(type(first).__name__, "-", f"move {what} {way}", words)

    move.__name__ = f"move_{name}"
    return move


def _target(rng: random.Random, events: Events, group: Group) -> int | None:
    """Before or behind a landmark, often one of the same request or node."""
    marks = [i for i, e in enumerate(events) if isinstance(e, LANDMARKS) and i not in group.indices]
    near = [i for i in marks if _concerns(events[i], group)]
    if near and rng.random() < 0.65:
        marks = near
    if not marks:
        return None
    to = rng.choice(marks) + rng.choice((0, 1))
    inside = min(group.indices) <= to <= max(group.indices) + 1
    return None if inside and len(group.indices) == max(group.indices) - min(group.indices) + 1 else to


def _concerns(event: ev.Event, group: Group) -> bool:
    if group.req and getattr(event, "req", 0) == group.req:
        return True
    nodes = getattr(event, "nodes", ())
    path = [step.node for step in getattr(event, "path", ())]
    return bool(group.node) and (getattr(event, "node", 0) == group.node or group.node in (*nodes, *path))


# --- what belongs together ---------------------------------------------------------------------------


def backups(events: Events) -> Iterator[Group]:
    """An allocation with the backup into it; the backup's queueing, launch and end, or some of these."""
    for at, queued in enumerate(events):
        if not isinstance(queued, ev.BackupQueued):
            continue
        alloc = [i for i in range(at) if _took(events[i], queued.slots)][-1:]
        started = [i for i in range(at, len(events)) if _launched(events[i], ev.Direction.D2H, queued.node)][:1]
        acked = [i for i in range(at, len(events)) if _acked(events[i], queued.node)][:1]
        digested = _of_transfer(events, started, ev.BackupDigested)
        parts = {
            "an allocation with its backup": [*alloc, at],
            "an allocation and the whole backup": [*alloc, at, *started, *acked, *digested],
            "a whole backup": [at, *started, *acked, *digested],
            "a backup's launch and end": [*started, *acked, *digested],
            "a backup's end": acked,
        }
        for what, indices in parts.items():
            yield Group(what, tuple(sorted(indices)), queued.req, queued.node)


def loads(events: Events) -> Iterator[Group]:
    """A load-back: its launch and its end, its end, all of it; with the decision or without."""
    for at, queued in enumerate(events):
        if not isinstance(queued, ev.LoadQueued):
            continue
        decided = [
            i for i in range(at, len(events)) if isinstance(e := events[i], ev.LoadBackDecided) and e.req == queued.req
        ][:1]
        started = [i for i in range(at, len(events)) if _launched(events[i], ev.Direction.H2D, queued.node)][:1]
        ended = _of_transfer(events, started, ev.LoadDone)
        digested = _of_transfer(events, started, ev.LoadDigested)
        parts = {
            "a load-back's launch": started,
            "a load-back's launch and end": [*started, *ended, *digested],
            "a load-back's end": ended,
            "a load-back's queueing": [at],
            "a whole load-back": [at, *started, *ended, *digested],
            "a load-back with its decision": [at, *decided, *started, *ended, *digested],
        }
        for what, indices in parts.items():
            yield Group(what, tuple(sorted(indices)), queued.req, queued.node)


def evictions(events: Events) -> Iterator[Group]:
    """An eviction from its begin to its end, and its victims one by one."""
    for at, begin in enumerate(events):
        if isinstance(begin, ev.EvictBegin | ev.EvictHostBegin):
            closing = ev.EvictEnd if isinstance(begin, ev.EvictBegin) else ev.EvictHost
            ends = [i for i, e in enumerate(events) if i > at and isinstance(e, closing) and e.call == begin.call]
            if not ends:
                continue
            victim = next((e.node for e in events[at : ends[0]] if isinstance(e, ev.EvictedL1)), 0)
            yield Group("an eviction", tuple(range(at, ends[0] + 1)), next(iter(getattr(begin, "reqs", ())), 0), victim)
        elif isinstance(begin, ev.EvictedL1):
            yield Group("a victim", (at,), 0, begin.node)


def inserts(events: Events) -> Iterator[Group]:
    """An insert, alone and with the allocations and backups that it caused, before its pass or behind its release."""
    for at, insert in enumerate(events):
        if isinstance(insert, ev.Inserted):
            first = at
            while first and isinstance(
                events[first - 1], ev.HostAlloc | ev.BackupQueued | ev.BackupRejected | ev.HostFree
            ):
                first -= 1
            yield Group("an insert", (at,), insert.req, insert.node)
            yield Group("an insert with its backups", tuple(range(first, at + 1)), insert.req, insert.node)


def passes(events: Events) -> Iterator[Group]:
    """A prefill pass and its result."""
    for at, begun in enumerate(events):
        if isinstance(begun, ev.Prefill):
            done = [
                i
                for i in range(at, len(events))
                if isinstance(e := events[i], ev.PrefillDone) and (e.req, e.batch) == (begun.req, begun.batch)
            ][:1]
            yield Group("a pass with its result", (at, *done), begun.req)
            yield Group("a pass", (at,), begun.req)
            yield Group("a result", tuple(done), begun.req)


def prefetches(events: Events) -> Iterator[Group]:
    """A prefetch as a whole; its end with the host slots that it filled."""
    for at, asked in enumerate(events):
        if not isinstance(asked, ev.PrefetchAsked):
            continue
        mine = [
            i
            for i, e in enumerate(events)
            if isinstance(e, ev.PrefetchAsked | ev.StorageLookedUp | ev.PrefetchDone | ev.PrefetchRevoked)
            and e.req == asked.req
        ]
        mine += [i for i, e in enumerate(events) if isinstance(e, ev.PrefetchStopped) and e.req == asked.req]
        done = [i for i in mine if i > at and isinstance(events[i], ev.PrefetchDone)][:1]
        slots = [i for i in range(at, done[0]) if _took(events[i], events[done[0]].slots)][-1:] if done else []  # type: ignore[attr-defined]
        looked = [i for i in mine if isinstance(events[i], ev.StorageLookedUp)]
        yield Group("a prefetch", tuple(sorted({*mine, *slots})), asked.req, asked.node)
        yield Group("a prefetch's end", tuple(sorted({*done, *slots})), asked.req, asked.node)
        yield Group("a look-up", tuple(looked), asked.req, asked.node)


def requests(events: Events) -> Iterator[Group]:
    """A request as a whole, or from its match on, or its digests alone."""
    for req in requests_of(events):
        mine = [i for i, e in enumerate(events) if getattr(e, "req", 0) == req]
        match = next((n for n, i in enumerate(mine) if isinstance(events[i], ev.Matched)), len(mine))
        yield Group("a request", tuple(mine), 0)
        yield Group("a request from its match on", tuple(mine[match:]), req)
        digests = [i for i in mine if isinstance(events[i], ev.PrefixDigests | ev.PrefixPoint)]
        yield Group("the digests of a request", tuple(digests), req)


def told(events: Events) -> Iterator[Group]:
    """Facts: one of them, or all of them, behind what they describe."""
    facts = [i for i, e in enumerate(events) if isinstance(e, ev.Facts)]
    yield from (Group("a fact", (i,)) for i in facts)
    yield Group("all facts", tuple(facts))


def emptied(events: Events) -> Iterator[Group]:
    """A flush; a change of the storage or of the weights."""
    for at, event in enumerate(events):
        if isinstance(event, ev.StorageChanged | ev.WeightsUpdated | ev.Reset | ev.HostClear):
            yield Group("a change of the whole server", (at,))
        if isinstance(event, ev.HostClear) and at + 1 < len(events) and isinstance(events[at + 1], ev.Reset):
            yield Group("a flush", (at, at + 1))


def _took(event: ev.Event, slots: tuple[ev.Run, ...]) -> bool:
    return isinstance(event, ev.HostAlloc) and bool(slots) and event.slots == slots


def _launched(event: ev.Event, direction: int, node: int) -> bool:
    return isinstance(event, ev.TransferStarted) and event.direction == direction and node in event.nodes


def _acked(event: ev.Event, node: int) -> bool:
    return isinstance(event, ev.BackupAcked) and event.node == node


def _of_transfer(events: Events, started: Sequence[int], kind: type[ev.Event]) -> list[int]:
    numbers = [e.transfer for i in started if isinstance(e := events[i], ev.TransferStarted)]
    return [i for i, e in enumerate(events) if isinstance(e, kind) and getattr(e, "transfer", None) in numbers]


MOVES: list[Mutation] = [
    moving("backup", backups),
    moving("load", loads),
    moving("load", loads),
    moving("eviction", evictions),
    moving("insert", inserts),
    moving("pass", passes),
    moving("prefetch", prefetches),
    moving("request", requests),
    moving("facts", told),
    moving("flush", emptied),
]
