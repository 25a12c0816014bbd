"""Several journals at once: the ranks of one server, and what is not one server though it looks like one.

Two ranks do the same work, so the simulator makes the second one from the same seed. What a mutant is made of says for
most of them what may be claimed at all: nothing, where a rank is missing or is another server's.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvwitness.patches.schema import events as ev
from soundness import exchanges
from soundness.mutate import mutant
from soundness.simulate import LIVELY, NONE, PLAIN, simulated
from soundness.steps import Events, Step, renumber

Journals = tuple[Events, ...]


@dataclass(frozen=True)
class Group:
    """Journals that were found in one folder, what was done to them, and whether anything may be claimed from them."""

    journals: Journals
    recipe: tuple[Step, ...]
    nothing: bool = False


def pair(seed: int, start: str = "", number: int = 0) -> tuple[Events, Events]:
    """Both ranks of one server; ``number`` says which of its habits it has, and what its journals begin with."""
    habits = (NONE, LIVELY, PLAIN)[number % 3]
    attached, stored = number % 5 == 1, number % 4 == 2
    first, second = (
        simulated(seed, attached=attached, stored=stored and not attached, habits=habits, ranks=(rank, 2), start=start)
        for rank in (0, 1)
    )
    return first.events, second.events


def group(rng: random.Random, seed: int, number: int) -> Group:
    """Two ranks of one server, and one of the things that can be wrong with that."""
    change = rng.choice(CHANGES)
    return change(rng, seed, number)


def _of(journals: Sequence[Events], mutator: str, words: str, field: str = "-", nothing: bool = False) -> Group:
    return Group(tuple(journals), (Step("several journals", field, mutator, words),), nothing)


def untouched(rng: random.Random, seed: int, number: int) -> Group:
    """Two ranks of one server, in either order."""
    ranks = pair(seed, number=number)
    return _of(ranks[:: rng.choice((1, -1))], "nothing", "two ranks of one server")


def of_another_server(rng: random.Random, seed: int, number: int) -> Group:
    """Rank 1 is another server's: of another seed, or one that did the very same."""
    ours = pair(seed, number=number)[0]
    same = rng.random() < 0.5
    theirs = pair(seed if same else seed + 1000, start="another", number=number)[1]
    doing = "that did the same" if same else "that did something else"
    return _of(
        (ours, theirs), "rank of another server", f"rank 1 is of another server {doing}", "json.start", nothing=True
    )


def of_another_host(rng: random.Random, seed: int, number: int) -> Group:
    """Rank 1 says that it is of another start, key, release or model. (Another host is none: a group may span some.)"""
    first, second = pair(seed, number=number)
    name = rng.choice(("start", "key", "sglang", "arguments"))
    value: object = {"model_path": "models/another"} if name == "arguments" else "another"
    second = with_process(second, **{name: value})
    return _of((first, second), "rank says otherwise", f"rank 1 has another {name}", f"json.{name}", nothing=True)


def of_before_a_restart(rng: random.Random, seed: int, number: int) -> Group:
    """Rank 1 is of the same server, and of the start before."""
    first = pair(seed, number=number)[0]
    second = pair(seed + rng.choice((0, 1000)), start="before", number=number)[1]
    return _of((first, second), "rank of an earlier start", "rank 1 is of an earlier start", "json.start", nothing=True)


def missing(rng: random.Random, seed: int, number: int) -> Group:
    """One rank only."""
    ranks, which = pair(seed, number=number), rng.randrange(2)
    return _of((ranks[which],), "rank missing", f"rank {1 - which} is missing", nothing=True)


def twice(rng: random.Random, seed: int, number: int) -> Group:
    """One rank's journal twice, the other's not at all."""
    ranks, which = pair(seed, number=number), rng.randrange(2)
    return _of((ranks[which], list(ranks[which])), "rank twice", f"rank {which} twice", nothing=True)


def too_many(rng: random.Random, seed: int, number: int) -> Group:
    """Both ranks, and one of them once more."""
    ranks, which = pair(seed, number=number), rng.randrange(2)
    return _of((*ranks, list(ranks[which])), "one journal too many", f"both ranks, rank {which} twice")


def cut_short(rng: random.Random, seed: int, number: int) -> Group:
    """One rank's journal ends early, or begins late."""
    ranks, which = list(pair(seed, number=number)), rng.randrange(2)
    events = ranks[which]
    at = rng.randrange(len(events) // 4, len(events))
    if rng.random() < 0.6:
        ranks[which], words = events[:at], f"rank {which} ends at #{at}"
    else:
        ranks[which] = [e for e in events[:at] if isinstance(e, ev.Facts | ev.Text)] + events[at:]
        renumber(ranks[which])
        words = f"rank {which} begins at #{at + 1}"
    return _of(ranks, "rank cut short", words)


def uses_shifted(rng: random.Random, seed: int, number: int) -> Group:
    """An id is used several times, and one rank lacks one of the uses."""
    ranks, which = list(pair(seed, number=number)), rng.randrange(2)
    old = rng.choice(_used(ranks[0]))
    new = rng.choice([r for r in _used(ranks[0]) if r != old] or [old])
    ranks = [_one_id(events, old, new) for events in ranks]
    events = ranks[which]
    stay = [i for i, e in enumerate(events) if isinstance(e, ev.Queued) and e.req == old]
    if len(stay) < 2:
        return _of(ranks, "id used twice", f"request {new} has the id of request {old} on both ranks", "req")
    drop = rng.randrange(len(stay))
    until = stay[drop + 1] if drop + 1 < len(stay) else len(events)
    kept = [e for i, e in enumerate(events) if not (stay[drop] <= i < until and getattr(e, "req", 0) == old)]
    renumber(kept)
    ranks[which] = kept
    words = f"request {new} has the id of request {old}; rank {which} lacks use {drop + 1} of it"
    return _of(ranks, "a use of an id missing on one rank", words, "req")


def mutated(rng: random.Random, seed: int, number: int) -> Group:
    """What can go wrong with one journal goes wrong with one rank's."""
    ranks, which = list(pair(seed, number=number)), rng.randrange(2)
    ranks[which], recipe = mutant(rng, ranks[which])
    marked = tuple(
        dataclasses.replace(s, mutator=f"on one rank: {s.mutator}", told=f"rank {which}: {s}") for s in recipe
    )
    return Group(tuple(ranks), marked)


def mutated_alike(rng: random.Random, seed: int, number: int) -> Group:
    """The same goes wrong with both."""
    state = rng.getrandbits(64)
    both = [mutant(random.Random(state), events) for events in pair(seed, number=number)]
    marked = tuple(dataclasses.replace(s, mutator=f"on both ranks: {s.mutator}") for s in both[0][1])
    return Group(tuple(events for events, _ in both), marked)


def places(rng: random.Random, seed: int, number: int) -> Group:
    """What the ranks say of their places: exchanged (no harm), equal, out of range, or of another size."""
    first, second = pair(seed, number=number)
    match rng.randrange(4):
        case 0:
            first, second = with_ranks(first, tp_rank=1, attn_tp_rank=1), with_ranks(second, tp_rank=0, attn_tp_rank=0)
            return _of((first, second), "places exchanged", "the ranks' places are exchanged", "json.ranks.tp_rank")
        case 1:
            second = with_ranks(second, tp_rank=0, attn_tp_rank=0)
            words = "both ranks have the same place"
        case 2:
            second = with_ranks(second, tp_rank=2, attn_tp_rank=2)
            words = "rank 1 is rank 2 of 2"
        case _:
            size = rng.choice((1, 3, 4))
            second = with_ranks(second, tp_size=size, attn_tp_size=size)
            words = f"rank 1 is one of {size}"
    return _of((first, second), "places that do not fit", words, "json.ranks.tp_rank", nothing=True)


def without_start(rng: random.Random, seed: int, number: int) -> Group:
    """Recorded before starts had an id: all of them, or one."""
    first, second = pair(seed, number=number)
    second = with_process(second, start=None)
    if rng.random() < 0.5:
        first = with_process(first, start=None)
        return _of((first, second), "no start", "no rank says of which start it is", "json.start")
    return _of((first, second), "no start on one rank", "rank 1 does not say of which start it is", "json.start")


def facts_differ(rng: random.Random, seed: int, number: int) -> Group:
    """Page size, bytes, hooks: ranks of one server have them in common."""
    first, second = pair(seed, number=number)
    name, value = rng.choice(
        (("page_size", 64), ("bytes_per_token", 512), ("host_memory_mode", "buffer_only"), ("family", "hiradix"))
    )
    second = with_instance(second, **{name: value})
    return _of((first, second), "facts of the instance differ", f"rank 1 says {name} {value}", f"json.{name}")


def ids_exchanged(rng: random.Random, seed: int, number: int) -> Group:
    """On one rank two requests' ids change places: what one did the other rank says of the other."""
    ranks, which = list(pair(seed, number=number)), rng.randrange(2)
    step = exchanges.change_places(rng, ranks[which])
    words = f"rank {which}: {step}" if step is not None else "nothing"
    mutator = step.mutator if step is not None else "nothing"
    return _of(ranks, f"on one rank: {mutator}", words)


# --- changes -----------------------------------------------------------------------------------------


def with_facts(events: Sequence[ev.Event], kind: int, **facts: object) -> Events:
    """The events with other facts of that kind; None takes one out."""
    found: Events = []
    for event in events:
        if isinstance(event, ev.Facts) and event.kind == kind:
            told = {**json.loads(event.json), **facts}
            event = dataclasses.replace(event, json=json.dumps({k: v for k, v in told.items() if v is not None}))
        found.append(event)
    return found


def with_process(events: Sequence[ev.Event], **facts: object) -> Events:
    """With other facts of the process."""
    return with_facts(events, ev.FactKind.PROCESS, **facts)


def with_instance(events: Sequence[ev.Event], **facts: object) -> Events:
    """With other facts of the instance."""
    return with_facts(events, ev.FactKind.INSTANCE, **facts)


def with_ranks(events: Sequence[ev.Event], **ranks: int) -> Events:
    """With another place among the ranks."""
    found: Events = []
    for event in events:
        if isinstance(event, ev.Facts) and event.kind == ev.FactKind.INSTANCE:
            told = json.loads(event.json)
            event = dataclasses.replace(event, json=json.dumps({**told, "ranks": {**told["ranks"], **ranks}}))
        found.append(event)
    return found


def _used(events: Sequence[ev.Event]) -> list[int]:
    return sorted({e.req for e in events if isinstance(e, ev.Queued)})


def _one_id(events: Sequence[ev.Event], old: int, new: int) -> Events:
    """Request ``new`` has the id of request ``old``."""
    kept = [e for e in events if not (isinstance(e, ev.Text) and e.id == new != old)]
    kept = [exchanges.rename_requests(e, {new: old}) for e in kept]
    renumber(kept)
    return kept


Change = Callable[[random.Random, int, int], Group]
CHANGES: list[Change] = [
    untouched,
    of_another_server,
    of_another_host,
    of_before_a_restart,
    missing,
    twice,
    too_many,
    cut_short,
    uses_shifted,
    uses_shifted,
    mutated,
    mutated,
    mutated,
    mutated_alike,
    places,
    without_start,
    facts_differ,
    ids_exchanged,
]
