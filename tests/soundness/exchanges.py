"""Exchanges and renames: two of a kind change places from some event on, one gets a second name.

Numbers stay consistent with one another, so that no event by itself looks wrong.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping

from kvwitness.patches.schema import events as ev
from soundness.steps import Events, Mutation, Step, first_free, of, recount, renumber, requests_of, told

OF_REQUESTS = (
    ev.PrefixDigests,
    ev.PrefixPoint,
    ev.Matched,
    ev.LoadBackDecided,
    ev.LoadQueued,
    ev.Admission,
    ev.Prefill,
    ev.PrefillDone,
    ev.Inserted,
    ev.Released,
    ev.BackupQueued,
    ev.PrefetchAsked,
    ev.StorageLookedUp,
    ev.PrefetchDone,
)
"""Kinds of which two requests have one each."""
MANY = 100_000
"""More slots than any pool here has: an earlier step of the recipe made them up."""
Rename = Callable[[ev.Event, Mapping[int, int]], ev.Event]


# --- names -------------------------------------------------------------------------------------------


def rename_requests(event: ev.Event, names: Mapping[int, int]) -> ev.Event:
    """The event with other numbers of requests."""
    if isinstance(event, ev.EvictBegin):
        return dataclasses.replace(event, reqs=tuple(names.get(r, r) for r in event.reqs))
    return _renamed(event, ("req",), names)


def rename_texts(event: ev.Event, names: Mapping[int, int]) -> ev.Event:
    """The event with other numbers of texts, wherever a text is named."""
    return _renamed(rename_requests(event, names), ("id", "hook", "policy"), names, ev.PrefetchRevoked, "reason")


def rename_nodes(event: ev.Event, names: Mapping[int, int]) -> ev.Event:
    """The event with other numbers of nodes."""
    event = _renamed(event, ("node", "best_node", "device_node", "parent"), names)
    if isinstance(event, ev.Matched | ev.Inserted):
        return dataclasses.replace(event, path=tuple(s._replace(node=names.get(s.node, s.node)) for s in event.path))
    if isinstance(event, ev.TransferStarted | ev.LoadDone | ev.InFlight):
        return dataclasses.replace(event, nodes=tuple(names.get(n, n) for n in event.nodes))
    return event


def rename_transfers(event: ev.Event, names: Mapping[int, int]) -> ev.Event:
    """The event with other numbers of transfers."""
    return _renamed(event, ("transfer",), names)


def rename_batches(event: ev.Event, names: Mapping[int, int]) -> ev.Event:
    """The event with other numbers of batches."""
    return _renamed(event, ("batch",), names)


def rename_calls(event: ev.Event, names: Mapping[int, int]) -> ev.Event:
    """The event with other numbers of evictions."""
    return _renamed(event, ("call",), names)


def _renamed(
    event: ev.Event,
    fields: tuple[str, ...],
    names: Mapping[int, int],
    kind: type[ev.Event] | None = None,
    further: str = "",
) -> ev.Event:
    wanted = (*fields, further) if kind is not None and isinstance(event, kind) else fields
    new = {name: names[value] for name in wanted if (value := getattr(event, name, None)) in names}
    return dataclasses.replace(event, **new) if new else event  # type: ignore[arg-type]


NAMED: dict[str, tuple[Rename, str]] = {
    "requests": (rename_requests, "req"),
    "nodes": (rename_nodes, "node"),
    "transfers": (rename_transfers, "transfer"),
    "batches": (rename_batches, "batch"),
    "evictions": (rename_calls, "call"),
}


def _numbers(events: Events, what: str) -> list[int]:
    if what == "requests":
        return requests_of(events)
    if what == "nodes":
        steps = [s.node for e in events if isinstance(e, ev.Matched | ev.Inserted) for s in e.path]
        return sorted({*steps, *(e.node for e in events if isinstance(e, ev.ResidentNode))})
    field = NAMED[what][1]
    return sorted({getattr(e, field) for e in events if hasattr(e, field)} - {0})


# --- mutations ---------------------------------------------------------------------------------------


def change_places(rng: random.Random, events: Events) -> Step | None:
    """Two requests, nodes, transfers, batches or evictions, in all events from one on (or up to one)."""
    what = rng.choice(sorted(NAMED))
    known = _numbers(events, what)
    if len(known) < 2:
        return None
    a, b = rng.sample(known, 2)
    rename, names = NAMED[what][0], {a: b, b: a}
    concerned = [i for i, e in enumerate(events) if rename(e, names) != e]
    if not concerned:
        return None
    since = rng.choice(concerned)
    until = rng.choice([i for i in concerned if i >= since]) + 1 if rng.random() < 0.3 else len(events)
    for index in range(since, until):
        events[index] = rename(events[index], names)
    words = f"{what} {a} and {b} change places from #{since + 1} to #{until}"
    return Step("several", NAMED[what][1], f"exchange of {what}", words)


def change_kind(rng: random.Random, events: Events) -> Step | None:
    """Two requests change places in all events of one kind, or in one event each."""
    kind = rng.choice([k for k in OF_REQUESTS if any(isinstance(e, k) for e in events)] or [ev.Matched])
    mine = [i for i, e in enumerate(events) if isinstance(e, kind) and e.req]
    numbers = sorted({events[i].req for i in mine})  # type: ignore[attr-defined]
    if len(numbers) < 2:
        return None
    a, b = rng.sample(numbers, 2)
    if rng.random() < 0.5:
        chosen = mine
    else:
        chosen = [rng.choice([i for i in mine if events[i].req == number]) for number in (a, b)]  # type: ignore[attr-defined]
    for index in chosen:
        events[index] = rename_requests(events[index], {a: b, b: a})
    many = "all" if chosen is mine else "one"
    words = f"requests {a} and {b} change places in {many} of {kind.__name__}"
    return Step(kind.__name__, "req", f"exchange in {many} of a kind", words)


def change_contents(rng: random.Random, events: Events) -> Step | None:
    """Two events of a kind change places, each as what it says, whoever it is about."""
    kinds = sorted({type(e) for e in events}, key=lambda k: k.__name__)
    kind = rng.choice(kinds)
    mine = [i for i, e in enumerate(events) if type(e) is kind]
    if len(mine) < 2:
        return None
    a, b = sorted(rng.sample(mine, 2))
    free, words = first_free(events), f"{told(events[a])} and #{events[b].seq} change places"
    step = of(events[a], "exchange of two of a kind", words)
    events[a], events[b] = (
        dataclasses.replace(events[b], seq=events[a].seq, t_ns=events[a].t_ns),
        dataclasses.replace(events[a], seq=events[b].seq, t_ns=events[b].t_ns),
    )
    recount(events, free)
    return step


def change_slots(rng: random.Random, events: Events) -> Step | None:
    """Two pages of host memory change places from some event on."""
    lengths = [run.length for e in events if isinstance(e, ev.BackupQueued | ev.PrefetchDone) for run in e.slots]
    runs = [run for e in events if isinstance(e, ev.BackupQueued | ev.PrefetchDone) for run in e.slots if run.length]
    if len(runs) < 2:
        return None
    first, second = rng.sample(runs, 2)
    size = min(first.length, second.length, rng.choice((4, 16, 16, max(lengths))))
    a, b = first.start, second.start
    if abs(a - b) < size:
        return None
    concerned = [i for i, e in enumerate(events) if _with_slots(e, a, b, size) != e]
    if not concerned:
        return None
    since = rng.choice(concerned)
    for index in range(since, len(events)):
        events[index] = _with_slots(events[index], a, b, size)
    words = f"host slots {a} and {b} ({size} each) change places from #{since + 1} on"
    return Step("several", "slots", "exchange of slots", words)


def _with_slots(event: ev.Event, a: int, b: int, size: int) -> ev.Event:
    slots = getattr(event, "slots", ())
    if not any(r.start < at + size and at < r.start + r.length for r in slots for at in (a, b)):
        return event
    if sum(run.length for run in slots) > MANY:
        return event
    flat = [_other_slot(slot, a, b, size) for run in slots for slot in range(run.start, run.start + run.length)]
    runs: list[ev.Run] = []
    for slot in flat:
        if runs and runs[-1].start + runs[-1].length == slot:
            runs[-1] = ev.Run(runs[-1].start, runs[-1].length + 1)
        else:
            runs.append(ev.Run(slot, 1))
    return dataclasses.replace(event, slots=tuple(runs))  # type: ignore[call-arg]


def _other_slot(slot: int, a: int, b: int, size: int) -> int:
    if a <= slot < a + size:
        return slot - a + b
    return slot - b + a if b <= slot < b + size else slot


def second_use(rng: random.Random, events: Events) -> Step | None:
    """One number for what were two requests, nodes, transfers, batches or evictions, from some event on."""
    what = rng.choice(sorted(NAMED))
    known = _numbers(events, what)
    if len(known) < 2:
        return None
    a, b = rng.sample(known, 2)
    rename = NAMED[what][0]
    concerned = [i for i, e in enumerate(events) if rename(e, {a: b}) != e]
    if not concerned:
        return None
    since = rng.choice(concerned) if rng.random() < 0.5 else concerned[0]
    for index in range(since, len(events)):
        events[index] = rename(events[index], {a: b})
    words = f"{what} {a} is {b} from #{since + 1} on"
    return Step("several", NAMED[what][1], f"one name for two {what}", words)


def another_number(rng: random.Random, events: Events) -> Step | None:
    """A node, transfer, batch or eviction has another number, never used before, for part of the record."""
    what = rng.choice([each for each in sorted(NAMED) if each != "requests"])
    known = _numbers(events, what)
    if not known:
        return None
    rename, old = NAMED[what][0], rng.choice(known)
    names = {old: max(known) + 1000}
    concerned = [i for i, e in enumerate(events) if rename(e, names) != e]
    if not concerned:
        return None
    since = rng.choice(concerned)
    until = rng.choice([i for i in concerned if i >= since]) + 1 if rng.random() < 0.5 else len(events)
    for index in range(since, until):
        events[index] = rename(events[index], names)
    words = f"{what} {old} is {names[old]} from #{since + 1} to #{until}"
    return Step("several", NAMED[what][1], f"another number for one of the {what}", words)


def another_text(rng: random.Random, events: Events) -> Step | None:
    """A text is told a second time under another number, which stands for it from then on."""
    texts = [i for i, e in enumerate(events) if isinstance(e, ev.Text)]
    if not texts:
        return None
    at = rng.choice(texts)
    text = events[at]
    assert isinstance(text, ev.Text)
    new = max(e.id for e in events if isinstance(e, ev.Text)) + 1
    since = rng.choice([i for i, e in enumerate(events) if i > at and rename_texts(e, {text.id: new}) != e] or [0])
    if not since:
        return None
    for index in range(since, len(events)):
        events[index] = rename_texts(events[index], {text.id: new})
    events.insert(since, ev.Text(0, events[since].t_ns, new, text.text))
    renumber(events)
    return of(text, "another number for a text", f"text {text.id} is {new} as well from #{since + 1} on", "id")


def all_texts_again(rng: random.Random, events: Events) -> Step | None:
    """The numbers of all texts are dealt out anew, consistently: nothing of what is said changes."""
    numbers = [e.id for e in events if isinstance(e, ev.Text)]
    if len(set(numbers)) != len(numbers) or len(numbers) < 2:
        return None
    others = rng.sample(numbers, len(numbers))
    names = dict(zip(numbers, others, strict=True))
    events[:] = [rename_texts(e, names) for e in events]
    return Step("Text", "id", "numbers of texts dealt out anew", f"texts {numbers[:5]} are {others[:5]}")


EXCHANGES: list[Mutation] = [
    change_places,
    change_places,
    change_kind,
    change_kind,
    change_contents,
    change_slots,
    second_use,
    another_number,
    another_text,
    all_texts_again,
]
