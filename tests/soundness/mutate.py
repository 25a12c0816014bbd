"""Seeded mutations of recorded journals: what could go wrong with a record, and what could look healthy and is not.

Each mutation changes a list of events in place and says what it did. The list is the order in which one thread wrote
the events. Here are those that change single events and what they say; moves.py, exchanges.py, told_facts.py, extras.py
and fields.py have the others.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Sequence

from journal_tools import encode_event

from kvwitness.patches.schema import events as ev
from soundness import exchanges, extras, fields, moves, told_facts
from soundness.steps import Events, Mutation, Step, of, renumber, steady, told

HEAVY: tuple[type[ev.Event], ...] = (ev.Facts, ev.Closed)
NUMBERS: dict[str, tuple[int, ...]] = {
    "start": (-16, 16, -1, 1, 64),
    "end": (-16, 16, -1, 1, 64),
    "tokens": (-16, 16, -1, 1),
    "bytes": (-1024, 1024, -16384, 1),
    "prompt_tokens": (-16, 16, -1, 1),
    "device": (-16, 16, -1, 1, 1488),
    "host": (-16, 16, -1, 1, -1488),
    "prefix": (-16, 16, -1, 1),
    "loaded": (-16, 16, -1, 1),
    "promised": (-16, 16),
    "key_tokens": (-16, 16, -1, 1),
    "existing": (-16, 16),
    "available": (-16, 16, 1488, -1488),
    "freed": (-16, 16),
    "first_cell": (-1, 1),
    "position": (-1, 1),
    "output_tokens": (-1, 1),
    "cached_total": (-16, 16),
    "cached_device": (-16, 16, 1488),
    "cached_host": (-16, 16, -1488),
    "kind": (1,),
    "batch": (-1, 1, 2),
    "transfer": (-1, 1, 2),
    "call": (-1, 1),
    "layers": (-1, 1),
    "pool": (1,),
    "completed": (-16, 16, 64),
}
IDS = ("req", "node", "best_node", "device_node", "id", "parent", "slot")
FLAGS = (
    "l1",
    "l2",
    "purpose",
    "how",
    "state",
    "last",
    "admitted",
    "direction",
    "retracted",
    "write_back",
    "reason",
    "cause",
    "early",
    "issued",
    "attach",
    "ok",
)


def mutant(rng: random.Random, base: Sequence[ev.Event]) -> tuple[Events, tuple[Step, ...]]:
    """One to four mutations of ``base``, and what they were."""
    events = list(base)
    recipe: list[Step] = []
    for _ in range(rng.choices((1, 2, 3, 4), (6, 3, 2, 1))[0]):
        if len(events) < 3:
            break
        before = list(events)
        step = rng.choices(MUTATIONS, WEIGHTS)[0](rng, events)
        if not writable(events, before):
            events = before
        elif step is not None:
            recipe.append(step)
    return events, tuple(recipe)


def writable(events: Events, before: Events) -> bool:
    """Whether a recorder could have written what is new: every number fits its field."""
    known = {id(event) for event in before}
    try:
        for event in events:
            if id(event) not in known:
                encode_event(event)
    except (struct.error, OverflowError):
        return False
    return True


def _pick(rng: random.Random, events: Events, heavy: bool = False) -> int:
    """An event, every kind about as often as every other."""
    kinds: dict[type[ev.Event], list[int]] = {}
    for index, event in enumerate(events):
        if heavy or not isinstance(event, HEAVY):
            kinds.setdefault(type(event), []).append(index)
    if not kinds or rng.random() < 0.3:
        return rng.randrange(len(events))
    return rng.choice(kinds[rng.choice(sorted(kinds, key=lambda kind: kind.__name__))])


# --- what happens to records -------------------------------------------------------------------------


def drop(rng: random.Random, events: Events) -> Step | None:
    gone = events.pop(_pick(rng, events))
    return of(gone, "drop", f"drop {told(gone)}")


def drop_unseen(rng: random.Random, events: Events) -> Step | None:
    gone = events.pop(_pick(rng, events))
    renumber(events)
    return of(gone, "drop without a hole", f"drop without a hole {told(gone)}")


def drop_some_unseen(rng: random.Random, events: Events) -> Step | None:
    at = rng.randrange(len(events))
    count = rng.randint(2, 12)
    gone = events[at : at + count]
    del events[at : at + count]
    renumber(events)
    return Step("several", "-", "drop without a hole", f"drop without a hole {len(gone)} events from #{gone[0].seq}")


def drop_kind(rng: random.Random, events: Events) -> Step | None:
    """All events of a kind: a dead hook."""
    kind = type(events[_pick(rng, events)])
    events[:] = [e for e in events if type(e) is not kind]
    renumber(events)
    return Step(kind.__name__, "-", "drop all without a hole", f"drop without a hole every {kind.__name__}")


def repeat(rng: random.Random, events: Events) -> Step | None:
    at = _pick(rng, events)
    to = at + 1 if rng.random() < 0.5 else rng.randrange(at, len(events)) + 1
    events.insert(to, events[at])
    return of(events[at], "repeat", f"repeat {told(events[at])} at {to}")


def repeat_unseen(rng: random.Random, events: Events) -> Step | None:
    at = _pick(rng, events)
    to = rng.randrange(at, len(events)) + 1
    step = of(events[at], "repeat with fresh numbers", f"repeat {told(events[at])} with fresh numbers before #{to + 1}")
    events.insert(to, dataclasses.replace(events[at], t_ns=events[to - 1].t_ns))
    renumber(events)
    return step


def swap(rng: random.Random, events: Events) -> Step | None:
    at = _pick(rng, events)
    to = min(at + rng.choice((1, 1, 2, 5)), len(events) - 1)
    events[at], events[to] = events[to], events[at]
    return of(events[to], "swap", f"swap {told(events[to])} and {told(events[at])}")


def move_unseen(rng: random.Random, events: Events) -> Step | None:
    at = _pick(rng, events)
    event = events.pop(at)
    to = max(0, min(len(events), at + rng.choice((-40, -10, -5, -2, -1, 1, 2, 5, 10, 40))))
    events.insert(to, event)
    renumber(events)
    steady(events)
    return of(event, "move with fresh numbers", f"move with fresh numbers {told(event)} to #{to + 1}")


def truncate(rng: random.Random, events: Events) -> Step | None:
    keep = rng.randrange(len(events) // 4, len(events))
    del events[keep:]
    return Step("several", "-", "cut short", f"keep the first {keep}")


def behead(rng: random.Random, events: Events) -> Step | None:
    """Started late: facts and texts are there, the rest is not."""
    at = rng.randrange(len(events) * 3 // 4)
    events[:at] = [e for e in events[:at] if isinstance(e, ev.Facts | ev.Text)]
    renumber(events)
    return Step("several", "-", "began late", f"began at {at}")


def retime(rng: random.Random, events: Events) -> Step | None:
    at = _pick(rng, events)
    delta = rng.choice((-(10**9), -1000, 1, 10**6, 10**9, 10**12))
    events[at] = dataclasses.replace(events[at], t_ns=max(1, events[at].t_ns + delta))
    return of(events[at], "other time", f"retime {told(events[at])} by {delta}", "t_ns")


# --- what records say --------------------------------------------------------------------------------


def namesake(rng: random.Random, events: Events) -> Step | None:
    """A request has the id of an earlier one that has ended: clients use ids again."""
    ended: list[int] = []
    pairs: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, ev.Released) and event.state != ev.ReleaseState.RETRACTED:
            ended.append(event.req)
        elif isinstance(event, ev.Queued) and not event.retracted:
            pairs += [(old, event.req) for old in ended if old != event.req]
    if not pairs:
        return None
    old, new = rng.choice(pairs)
    kept = [event for event in events if not (isinstance(event, ev.Text) and event.id == new)]
    for at, event in enumerate(kept):
        if getattr(event, "req", None) == new:
            kept[at] = dataclasses.replace(event, req=old)  # type: ignore[call-arg]
        elif isinstance(event, ev.EvictBegin) and new in event.reqs:
            kept[at] = dataclasses.replace(event, reqs=tuple(old if r == new else r for r in event.reqs))
    events[:] = kept
    renumber(events)
    return Step("Text", "id", "id used twice", f"request {new} has the id of request {old}")


def bend(rng: random.Random, events: Events) -> Step | None:
    """One field of one event, by what is telling in a field of that name."""
    for _ in range(20):
        at = _pick(rng, events)
        event = events[at]
        names = [f.name for f in dataclasses.fields(event)[2:]]
        name = rng.choice(names)
        value = _bent(rng, events, event, name)
        if value is not None and value != getattr(event, name):
            what = told(event)
            events[at] = dataclasses.replace(event, **{name: value})
            return of(event, "bend", f"{what}: {name} becomes {value}", name)
    return None


def bend_all_of(rng: random.Random, events: Events) -> Step | None:
    """The same shift in every event of a kind."""
    kind = type(events[_pick(rng, events)])
    names = [f.name for f in dataclasses.fields(kind)[2:] if f.name in NUMBERS and f.name != "pool"]
    if not names:
        return None
    name = rng.choice(names)
    delta = rng.choice(NUMBERS[name])
    for index, event in enumerate(events):
        if type(event) is kind:
            events[index] = dataclasses.replace(event, **{name: max(0, getattr(event, name) + delta)})
    return Step(kind.__name__, name, "bend all", f"every {kind.__name__}: {name} {delta:+d}")


def _bent(rng: random.Random, events: Events, event: ev.Event, name: str) -> object:
    value = getattr(event, name)
    if name in IDS:
        others = sorted({getattr(e, name) for e in events if hasattr(e, name)})
        return rng.choice([*others, value + 1, max(others) + 1])
    if name in FLAGS:
        return rng.choice((0, 1, 2, 3))
    if name in NUMBERS:
        return max(0, value + rng.choice(NUMBERS[name]))
    if name == "slots":
        return _bent_slots(rng, events, value)
    if name == "path":
        return _bent_path(rng, value)
    if name == "nodes" and isinstance(value, tuple):
        return tuple(n + rng.choice((0, 1)) for n in value) if rng.random() < 0.6 else (*value, *value[:1])
    if name == "digests":
        return _bent_digests(rng, events, value)
    if name == "text":
        return rng.choice([e.text for e in events if isinstance(e, ev.Text)])
    return None


def _bent_slots(rng: random.Random, events: Events, value: tuple[ev.Run, ...]) -> object:
    others = [
        e.slots
        for e in events
        if isinstance(e, ev.BackupQueued | ev.LoadQueued | ev.HostAlloc | ev.ResidentNode | ev.PrefetchDone)
    ]
    match rng.randrange(5):
        case 0:
            return tuple(ev.Run(r.start + 16, r.length) for r in value)
        case 1:
            return rng.choice(others) if others else None
        case 2:
            return tuple(ev.Run(r.start, max(0, r.length - 16)) for r in value)
        case 3 if value and value[0].length >= 48:
            first = value[0]
            return (
                ev.Run(first.start + 16, 16),
                ev.Run(first.start, 16),
                ev.Run(first.start + 32, first.length - 32),
                *value[1:],
            )
        case 4 if value and value[-1].length >= 32:
            last = value[-1]
            where = max((r.start + r.length for slots in others for r in slots), default=0) - 16
            return (*value[:-1], ev.Run(last.start, last.length - 16), ev.Run(max(0, where), 16))
    return None


def _bent_path(rng: random.Random, value: tuple[ev.PathNode, ...]) -> object:
    if not value:
        return None
    at = rng.randrange(len(value))
    step = value[at]
    match rng.randrange(6):
        case 0:
            step = step._replace(on_device=1 - step.on_device)
        case 1:
            step = step._replace(node=step.node + rng.choice((-1, 1, 100)))
        case 2:
            step = step._replace(end=step.end + rng.choice((-16, 16)))
        case 3:
            step = step._replace(start=max(0, step.start + rng.choice((-16, 16))))
        case 4:
            return value[:at] + value[at + 1 :]
        case 5 if step.end - step.start >= 32:
            middle = step.start + 16 * rng.randrange(1, (step.end - step.start) // 16)
            parts = (step._replace(node=step.node + 1000, end=middle), step._replace(start=middle))
            return (*value[:at], *parts, *value[at + 1 :])
    return (*value[:at], step, *value[at + 1 :])


def _bent_digests(rng: random.Random, events: Events, value: tuple[bytes, ...]) -> object:
    if not value:
        return None
    match rng.randrange(4):
        case 0:
            at = rng.randrange(len(value))
            return (*value[:at], *(rng.randbytes(8) for _ in value[at:]))
        case 1:
            return value[: rng.randrange(len(value))]
        case 2:
            others = [e.digests for e in events if hasattr(e, "digests")]
            return rng.choice(others)
    at = rng.randrange(len(value))
    return (*value[:at], rng.randbytes(8), *value[at + 1 :])


MUTATIONS: list[Mutation] = [
    drop,
    drop_unseen,
    drop_some_unseen,
    drop_kind,
    repeat,
    repeat_unseen,
    swap,
    move_unseen,
    truncate,
    behead,
    retime,
    bend,
    fields.random_field,
    bend_all_of,
    extras.insert,
    namesake,
    *moves.MOVES,
    *exchanges.EXCHANGES,
    *told_facts.CHANGES,
]
WEIGHTS = [2, 6, 2, 1, 1, 4, 2, 6, 1, 1, 2, 12, 14, 2, 12, 3]
WEIGHTS += [2] * len(moves.MOVES) + [2] * len(exchanges.EXCHANGES) + [2] * len(told_facts.CHANGES)
