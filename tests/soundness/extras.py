"""Put plausible events into a recorded journal: the mutant looks healthy, its meaning is another.

Numbers are consistent, and so is the host pool's own count of free slots from there on.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from kvwitness.patches.schema import events as ev
from soundness.steps import Events, Step

Part = Callable[[random.Random, Events, int], list[ev.Event]]


def insert(rng: random.Random, events: Events) -> Step | None:
    """One plausible story, somewhere, often shortly before a match or a load-back."""
    interesting = [
        i + rng.choice((0, 1))
        for i, e in enumerate(events)
        if isinstance(e, ev.Matched | ev.LoadQueued | ev.TransferStarted | ev.Prefill | ev.BackupQueued | ev.Admission)
    ]
    at = rng.choice(interesting) if interesting and rng.random() < 0.7 else rng.randrange(len(events))
    part = rng.choice(PARTS)
    if rng.random() < 0.5 and any(isinstance(e, ev.PrefetchAsked) for e in events):
        part = rng.choice(STORAGE_PARTS)
    extra = part(rng, events, at)
    if not extra:
        return None
    place(events, at, extra)
    what, names = part.__name__.strip("_"), ", ".join(type(e).__name__ for e in extra)
    return Step("several", "-", f"insert {what}", f"insert {what} before #{at + 1}: {names} {_slots(extra)}")


def place(events: Events, at: int, extra: Sequence[ev.Event]) -> None:
    """Put ``extra`` before index ``at``: fresh numbers, times in order, the pool's count adjusted behind it."""
    time = events[at - 1].t_ns if at else events[0].t_ns
    shift = 0
    for event in extra:
        size = sum(run.length for run in getattr(event, "slots", ()))
        shift += size if isinstance(event, ev.HostFree) else -size if isinstance(event, ev.HostAlloc) else 0
    events[at:at] = [dataclasses.replace(event, t_ns=time) for event in extra]
    for index in range(at, len(events)):
        event = events[index]
        if shift and index >= at + len(extra):
            if isinstance(event, ev.HostClear):
                shift = 0
            elif isinstance(event, ev.HostAlloc | ev.HostFree):
                event = dataclasses.replace(event, available=event.available + shift)
        events[index] = dataclasses.replace(event, seq=index + 1)


def _slots(extra: Sequence[ev.Event]) -> str:
    return " ".join(str([tuple(r) for r in e.slots]) for e in extra if isinstance(e, ev.HostFree | ev.LoadQueued))


def _available(events: Events, at: int) -> int:
    for event in reversed(events[:at]):
        if isinstance(event, ev.HostAlloc | ev.HostFree | ev.HostClear):
            return event.available
    return 100_000


def _some_slots(rng: random.Random, events: Events, at: int) -> tuple[ev.Run, ...]:
    written = [e.slots for e in events[:at] if isinstance(e, ev.BackupQueued) and e.slots]
    if not written:
        return (ev.Run(16, 16),)
    run = rng.choice(rng.choice(written))
    if rng.random() < 0.5 or run.length <= 16:
        return (run,)
    return (ev.Run(run.start + 16 * rng.randrange(run.length // 16), 16),)


def _numbers(events: Events) -> list[int]:
    return [e.id for e in events if isinstance(e, ev.Text)] or [1]


def _fresh(events: Events, name: str) -> int:
    return max((getattr(e, name) for e in events if hasattr(e, name)), default=0) + 1


def _node_of(rng: random.Random, events: Events, at: int) -> ev.PathNode:
    steps = [s for e in events[:at] if isinstance(e, ev.Inserted | ev.Matched) for s in e.path]
    return rng.choice(steps) if steps else ev.PathNode(3, 0, 16, 1)


def _reused(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    """Slots are given back and written again, for another prefix or the same."""
    slots = _some_slots(rng, events, at)
    size = sum(run.length for run in slots)
    free, node = _available(events, at), rng.choice((_fresh(events, "node"), _node_of(rng, events, at).node))
    transfer, req = _fresh(events, "transfer"), rng.choice(_numbers(events))
    start = rng.choice((0, 0, 16))
    written = [e for e in events[:at] if isinstance(e, ev.BackupQueued) and e.slots == slots]
    if written and rng.random() < 0.5:
        start, req = written[-1].start, rng.choice((req, written[-1].req))
        node = rng.choice((node, written[-1].node))
    story: list[ev.Event] = [
        ev.HostFree(0, 0, 0, 0, free + size, slots),
        ev.HostAlloc(0, 0, 0, req, free, slots),
        ev.BackupQueued(0, 0, req, node, start, start + size, size, 0, slots),
        ev.TransferStarted(0, 0, transfer, ev.Direction.D2H, size, size * 1024, 0, (node,)),
        ev.BackupAcked(0, 0, transfer, node, -1),
    ]
    # Any part of it may be what is seen.
    return story[: rng.choice((1, 2, 3, 4, 5, 5, 5))] if rng.random() < 0.7 else story[rng.choice((1, 2)) :]


def _freed(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    slots = _some_slots(rng, events, at)
    return [ev.HostFree(0, 0, 0, 0, _available(events, at) + sum(r.length for r in slots), slots)]


def _reset(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    return [ev.Reset(0, 0, rng.choice((1, 2)))]


def _flush(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    clear = ev.HostClear(0, 0, 0, _available(events, at))
    return [clear] if rng.random() < 0.3 else [clear, ev.Reset(0, 0, 1)]


def _evicted(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    step = _node_of(rng, events, at)
    node = step.node if rng.random() < 0.8 else _fresh(events, "node")
    size = step.end - step.start
    call, how = _fresh(events, "call"), rng.choice((1, 1, 2, 5))
    return [
        ev.EvictBegin(0, 0, call, rng.choice((0, 1, 2)), size, 0, 0, (rng.choice(_numbers(events)),)),
        ev.EvictedL1(0, 0, call, node, step.start, step.end, how, size, 0),
        ev.EvictEnd(0, 0, call, size),
    ]


def _inserted(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    known = [e for e in events if isinstance(e, ev.Inserted) and e.path]
    if not known:
        return []
    like = rng.choice(known)
    req = like.req if rng.random() < 0.5 else rng.choice(_numbers(events))
    return [dataclasses.replace(like, req=req)]


def _second_load(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    """Another load-back of the same or overlapping slots: of another request, or of the same."""
    known = [e for e in events if isinstance(e, ev.LoadQueued)]
    numbers = _numbers(events)
    if known and rng.random() < 0.7:
        load = dataclasses.replace(rng.choice(known))
        if rng.random() < 0.6:
            load = dataclasses.replace(load, req=rng.choice(numbers))
        if rng.random() < 0.3:
            load = dataclasses.replace(load, slots=_some_slots(rng, events, at))
    else:
        slots, step = _some_slots(rng, events, at), _node_of(rng, events, at)
        size = sum(run.length for run in slots)
        load = ev.LoadQueued(0, 0, rng.choice(numbers), step.node, step.start, step.start + size, size, slots)
    if rng.random() < 0.5:
        return [load]
    transfer, size = _fresh(events, "transfer"), load.tokens
    story: list[ev.Event] = [
        load,
        ev.TransferStarted(0, 0, transfer, ev.Direction.H2D, size, size * 1024, 0, (load.node,)),
        ev.LoadDone(0, 0, transfer, size, size * 1024, -1, (load.node,)),
    ]
    return story[: rng.choice((2, 3, 3))]


def _retracted(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    """A request is retracted and comes back: nothing more of it, or another match and admission."""
    queued = [e for e in events[:at] if isinstance(e, ev.Queued)]
    if not queued:
        return []
    last = queued[-1] if rng.random() < 0.6 else rng.choice(queued)
    again = dataclasses.replace(last, retracted=int(rng.random() < 0.7))
    story: list[ev.Event] = [again]
    if rng.random() < 0.5:
        story.insert(0, ev.Released(0, 0, last.req, ev.ReleaseState.RETRACTED, 1, 0, 0, 0, 0))
    matches = [e for e in events if isinstance(e, ev.Matched) and e.req == last.req]
    if matches and rng.random() < 0.7:
        match = dataclasses.replace(rng.choice(matches))
        reused = match.device
        story += [match, ev.Admission(0, 0, last.req, 1, reused, last.prompt_tokens, 0)]
        if rng.random() < 0.7:
            batch = _fresh(events, "batch")
            story += [
                ev.Prefill(0, 0, last.req, batch, reused, last.prompt_tokens, 1),
                ev.PrefillDone(0, 0, last.req, batch, 1),
            ]
    return story


def _matched_again(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    """Not admitted at the first try; matched again, perhaps with another answer."""
    matches = [e for e in events if isinstance(e, ev.Matched)]
    if not matches:
        return []
    match = rng.choice(matches)
    if rng.random() < 0.5:
        match = dataclasses.replace(match, req=rng.choice(_numbers(events)))
    if rng.random() < 0.5:
        both = match.device + match.host
        device = rng.choice((0, both))
        path = tuple(step._replace(on_device=int(device > 0)) for step in match.path)
        match = dataclasses.replace(match, device=device, host=both - device, path=path)
    return [match, ev.Admission(0, 0, match.req, 0, match.device, -1, 0)] if rng.random() < 0.6 else [match]


def _hook_failed(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    number = _fresh(events, "id")
    name = rng.choice(
        ("controller.write", "controller.load", "host_pool.free", "tree.evict", "tree.match_prefix", "tree.insert")
    )
    return [ev.Text(0, 0, number, name), ev.HookFailed(0, 0, number, 1, "x")]


def _renamed(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    """A text number is given a second meaning."""
    texts = [e for e in events if isinstance(e, ev.Text)]
    if not texts:
        return []
    return [ev.Text(0, 0, rng.choice(texts).id, rng.choice([*[t.text for t in texts], "other"]))]


def _backup_failed(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    step = _node_of(rng, events, at)
    return [ev.BackupRejected(0, 0, rng.choice(_numbers(events)), step.node, step.end - step.start, 0)]


def _fetched(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    """Slots are given back and filled from storage, for this request or another, where they are read or elsewhere."""
    slots = _some_slots(rng, events, at)
    fetches = [e for e in events if isinstance(e, ev.PrefetchDone) and e.slots]
    start, req = rng.choice((0, 0, 16)), rng.choice(_numbers(events))
    if fetches and rng.random() < 0.7:
        known = rng.choice(fetches)
        slots, start, req = known.slots, known.start, rng.choice((req, known.req, known.req))
    size, free = sum(run.length for run in slots), _available(events, at)
    story: list[ev.Event] = [
        ev.PrefetchAsked(0, 0, req, 1, start, size, 1),
        ev.HostFree(0, 0, 0, 0, free + size, slots),
        ev.HostAlloc(0, 0, 0, 0, free, slots),
        ev.StorageLookedUp(0, 0, req, size),
        ev.PrefetchDone(0, 0, req, start, size, 0, size, 0, slots),
    ]
    if rng.random() < 0.4:
        story.pop(rng.randrange(len(story)))
    return story[rng.choice((0, 0, 0, 1, 2, 3)) :]


def _backend_changed(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    return [ev.StorageChanged(0, 0, rng.choice((0, 0, 1)), rng.choice((1, 1, 0)), "told")]


def _storage_told(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    """One more step of some request's prefetch."""
    req = rng.choice([e.req for e in events if isinstance(e, ev.PrefetchAsked)] or _numbers(events))
    told: list[ev.Event] = [
        ev.PrefetchAsked(0, 0, req, 1, rng.choice((0, 16)), rng.choice((16, 64, 800)), rng.choice((0, 1))),
        ev.StorageLookedUp(0, 0, req, rng.choice((0, 16, 64, 800))),
        ev.PrefetchRevoked(0, 0, req, rng.choice(_numbers(events))),
        ev.PrefetchStopped(0, 0, req, rng.choice(_numbers(events)), 64, 16),
        ev.StorageFailed(0, 0, ev.StorageWork.READ, req, "OSError: told"),
        ev.PrefetchDone(0, 0, req, 0, 0, 0, 0, 0, ()),
    ]
    return [rng.choice(told)]


def _prefetch_hook_failed(rng: random.Random, events: Events, at: int) -> list[ev.Event]:
    number = _fresh(events, "id")
    return [ev.Text(0, 0, number, "storage.handle_prefetch_result"), ev.HookFailed(0, 0, number, 1, "x")]


STORAGE_PARTS: list[Part] = [_fetched, _fetched, _backend_changed, _storage_told, _prefetch_hook_failed]
"""Where something was asked for from storage."""
PARTS: list[Part] = [
    _reused,
    _reused,
    _freed,
    _reset,
    _flush,
    _evicted,
    _evicted,
    _inserted,
    _second_load,
    _second_load,
    _retracted,
    _retracted,
    _matched_again,
    _hook_failed,
    _renamed,
    _backup_failed,
]
