"""Facts: a leaf that says something else, a later fact that changes or takes back an earlier one, facts told again."""

from __future__ import annotations

import dataclasses
import json
import random

from kvwitness.patches.schema import events as ev
from soundness import fields
from soundness.extras import place
from soundness.steps import Events, Mutation, Step, of

HOOK_STATES = ("missing", "unknown_signature", "failed", "pending")
INSTANCE = {
    "page_size": (1, 32, 64),
    "bytes_per_token": (512, 2048, 0),
    "host_memory_mode": ("buffer_only",),
    "tree_class": ("HiRadixCache", "UnifiedRadixCache"),
    "family": ("hiradix", "unified", "himamba"),
    "layers": (1, 64),
    "storage": (True, False),
    "copy_threads": (True,),
    "digest_every": (0, 4),
    "write_policy": ("write_back", "write_through"),
    "write_through_threshold": (1, 2),
    "load_back_threshold": (0, 1000),
    "device_tokens": (16, 1 << 20),
    "host_tokens": (16, 1 << 20),
}
RANKS = ("tp_size", "pp_size", "dp_size", "attn_tp_size", "tp_rank", "pp_rank", "attn_tp_rank")


def _facts(events: Events) -> list[int]:
    return [i for i, e in enumerate(events) if isinstance(e, ev.Facts)]


def leaf(rng: random.Random, events: Events) -> Step | None:
    """Any leaf of any fact."""
    known = _facts(events)
    return fields.bend_at(rng, events, rng.choice(known)) if known else None


def telling(rng: random.Random, events: Events) -> Step | None:
    """A leaf that conclusions are drawn from, with a value that could be true of another server."""
    known = _facts(events)
    if not known:
        return None
    at = rng.choice(known)
    event = events[at]
    assert isinstance(event, ev.Facts)
    other = otherwise(rng, event)
    if other is None:
        return None
    text, name, words = other
    events[at] = dataclasses.replace(event, json=text)
    return of(event, "a value of another server", f"fact {event.kind} #{event.seq}: {words}", name)


def otherwise(rng: random.Random, event: ev.Facts) -> tuple[str, str, str] | None:
    """The JSON of a fact with one telling change, the name of what was changed, and that in words."""
    try:
        facts = json.loads(event.json)
        if event.kind == ev.FactKind.COVERAGE:
            return _other_coverage(rng, facts)
        if event.kind == ev.FactKind.INSTANCE:
            return _other_instance(rng, facts)
        if event.kind == ev.FactKind.PROCESS:
            return _other_process(rng, facts)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError):
        return None  # An earlier step of the recipe left nothing of that shape.
    return None


def _other_coverage(rng: random.Random, facts: dict[str, list[dict[str, object]]]) -> tuple[str, str, str]:
    serving = [hook for hook in facts["hooks"] if hook["links"]]
    hook = rng.choice(serving or facts["hooks"])
    match rng.randrange(4):
        case 0:
            hook["status"] = rng.choice(HOOK_STATES)
            words = f"{hook['name']} is {hook['status']}"
        case 1:
            facts["hooks"].remove(hook)
            words = f"{hook['name']} is not there"
        case 2:
            hook["links"] = []
            words = f"{hook['name']} serves no link"
        case _:
            for each in facts["hooks"]:
                each["status"] = "pending"
            words = "all are pending"
    return json.dumps(facts), "json.hooks[].status", words


def _other_instance(rng: random.Random, facts: dict[str, object]) -> tuple[str, str, str]:
    if rng.random() < 0.3 and isinstance(facts.get("ranks"), dict):
        name = rng.choice(RANKS)
        facts["ranks"] = {**facts["ranks"], name: rng.choice((0, 1, 2))}  # type: ignore[dict-item]
        return json.dumps(facts), f"json.ranks.{name}", f"{name} is {facts['ranks'][name]}"
    if rng.random() < 0.15:
        facts["pools"] = rng.choice(
            (
                [],
                [{"pool": 0, "hooked": False}],
                [{"pool": 0, "hooked": True}, {"pool": 1, "name": "swa", "hooked": True}],
            )
        )
        return json.dumps(facts), "json.pools", f"pools are {facts['pools']}"
    name = rng.choice(sorted(INSTANCE))
    facts[name] = rng.choice(INSTANCE[name])
    return json.dumps(facts), f"json.{name}", f"{name} is {facts[name]}"


def _other_process(rng: random.Random, facts: dict[str, object]) -> tuple[str, str, str]:
    name = rng.choice(("role", "sglang", "start", "host", "key", "arguments"))
    if name == "arguments":
        facts["arguments"] = {"model_path": "models/another", "kv_cache_dtype": "fp8_e5m2"}
    else:
        facts[name] = rng.choice(("another", "", None))
    return json.dumps(facts), f"json.{name}", f"{name} is {facts[name]}"


def later(rng: random.Random, events: Events) -> Step | None:
    """A second fact, later, that says something else; sometimes a third that takes it back."""
    known = _facts(events)
    if not known:
        return None
    event = events[rng.choice(known)]
    assert isinstance(event, ev.Facts)
    other = otherwise(rng, event)
    if other is None:
        return None
    text, name, words = other
    at = rng.randrange(known[0] + 1, len(events) + 1)
    place(events, at, (dataclasses.replace(event, json=text),))
    back = rng.random() < 0.4
    if back:
        place(events, rng.randrange(at + 1, len(events) + 1), (event,))
    how = "changed later and taken back" if back else "changed later"
    return of(
        event, how, f"fact {event.kind} again before #{at + 1}: {words}{', then as before' if back else ''}", name
    )


def only_later(rng: random.Random, events: Events) -> Step | None:
    """What the record says at first is another thing, and the fact itself comes only later."""
    known = _facts(events)
    if not known:
        return None
    first = rng.choice(known)
    event = events[first]
    assert isinstance(event, ev.Facts)
    other = otherwise(rng, event)
    if other is None:
        return None
    text, name, words = other
    events[first] = dataclasses.replace(event, json=text)
    at = rng.randrange(first + 1, len(events) + 1)
    place(events, at, (event,))
    return of(event, "true only later", f"fact {event.kind} #{event.seq}: {words}, as before from #{at + 1} on", name)


def again(rng: random.Random, events: Events) -> Step | None:
    """A fact is told once more, unchanged."""
    known = _facts(events)
    if not known:
        return None
    event, at = events[rng.choice(known)], rng.randrange(known[0] + 1, len(events) + 1)
    place(events, at, (event,))
    return of(event, "told again", f"fact #{event.seq} again before #{at + 1}")


CHANGES: list[Mutation] = [leaf, telling, later, only_later, again]
