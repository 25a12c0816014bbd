"""For every guard a record that breaks it, made from a healthy one by a single change: ``python tests/rules/cases.py``.

The changes are looked for once and kept in cases.json; the test makes each of them again.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import random
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.progress import track
from soundness.compare import journal_as_read
from soundness.fields import single_field_mutants
from soundness.mutate import renumber
from soundness.simulate import LIVELY, PLAIN, simulated

from kvwitness.collectors.journal import parse_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.rules.declare import Rules
from kvwitness.tracer.rules.model import MODEL

TESTS = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "cases.json"
RECORDED = (
    "adapters/data/0.4.6.post5-hiradix.kvwj.xz",
    "adapters/data/0.4.10.post2-write_back-hiradix.kvwj.xz",
    "adapters/data/0.5.8-hiradix.kvwj.xz",
    "adapters/data/0.5.12.post1-unified_obj.kvwj.xz",
    "adapters/data/0.5.17-unified.kvwj.xz",
    "adapters/data/hybrid-states/0.5.12.post1-himamba.kvwj.xz",
    "fixtures/abc-0.5.23-rust.kvwj",
    "fixtures/attach-0.5.17.kvwj",
    "fixtures/attach-0.5.23-rust.kvwj",
    "soundness/data/storage/mix-0.5.23-rust.kvwj.xz",
    "soundness/data/storage/timeout-0.5.17-hiradix.kvwj.xz",
    "soundness/data/storage/admin-0.5.23-rust.kvwj.xz",
    "soundness/data/weights/disk-0.5.23-rust.kvwj.xz",
    "fixtures/gpu-digest/unified/scheduler-1-1.kvwj.xz",
    "outside/data/0.5.10.post1.kvwj.xz",
    "rules/data/live-attached-0.5.17.kvwj.xz",
)
"""One record of every generation, and of every way in."""
SIMULATED: dict[str, dict[str, Any]] = {
    "plain": {},
    "attached": {"attached": True},
    "digested": {"digested": 0.5},
    "stored": {"stored": True},
    "lively": {"habits": LIVELY},
    "lively-stored": {"habits": PLAIN, "stored": True},
}
SEEDS = range(12)
Events = list[ev.Event]


@cache
def record(name: str) -> tuple[ev.Event, ...]:
    """A healthy record by its name: a recorded journal, or what the simulator makes of ``kind/seed``."""
    kind, _, seed = name.partition("/")
    if kind in SIMULATED:
        return tuple(simulated(int(seed), **SIMULATED[kind]).events)
    path = TESTS / name
    raw = path.read_bytes()
    return parse_journal(lzma.decompress(raw) if path.suffix == ".xz" else raw, "scheduler-1-1.kvwj").events


def records() -> list[str]:
    """All of them, the recorded ones first."""
    return [*RECORDED, *(f"{kind}/{seed}" for seed in SEEDS for kind in SIMULATED)]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is done to which event of a record."""

    record: str
    do: str
    """``field``, ``set``, ``drop``, ``repeat`` or ``move``."""
    index: int
    what: str = ""
    """The field and the mutator, the field that becomes -7, or by how many events it is moved."""

    def made(self) -> Events:
        """The record with the change."""
        base = record(self.record)
        if self.do == "field":
            for events, change in single_field_mutants(base, elements=3, only=(self.index,)):
                if f"{change.path} {change.mutator}" == self.what:
                    return events
            raise LookupError(self)
        events = list(base)
        if self.do == "set":
            events[self.index] = dataclasses.replace(events[self.index], **{self.what: -7})
            return events
        if self.do == "drop":
            del events[self.index]
        elif self.do == "repeat":
            events.insert(self.index + int(self.what), events[self.index])
        else:
            moved = events.pop(self.index)
            events.insert(max(self.index + int(self.what), 0), moved)
        renumber(events)
        return _steady(events)


def _steady(events: Events) -> Events:
    clock, found = 0, []
    for event in events:
        clock = max(clock, event.t_ns)
        found.append(dataclasses.replace(event, t_ns=clock))
    return found


def broken(events: Sequence[ev.Event], rules: Rules = MODEL) -> set[str]:
    """The guards that a record breaks."""
    return {one.rule for one in derive(journal_as_read(events), rules=rules).contradictions}


def _mutants(name: str, indexes: Sequence[int], rng: random.Random, share: float) -> Iterator[tuple[Case, Events]]:
    base = record(name)
    for events, change in single_field_mutants(base, elements=3, only=indexes):
        if change.field not in ("seq", "t_ns") and rng.random() < share:
            yield Case(name, "field", change.index, f"{change.path} {change.mutator}"), events
    for index in indexes:
        todo = [Case(name, "drop", index)]
        numbers = [field.name for field in dataclasses.fields(base[index]) if field.type == "int"][2:]
        todo += [Case(name, "set", index, field) for field in numbers]
        todo += [Case(name, "repeat", index, str(by)) for by in (1, 4, 15)]
        todo += [Case(name, "move", index, str(by)) for by in (-20, -6, -1, 1, 3, 10, 40)]
        for case in todo:
            if rng.random() < share:
                yield case, case.made()


def search() -> dict[str, Case]:
    """A case for each guard, as far as one is found: of those that were tried the one that breaks the fewest others.

    First a share of all changes, then for what is left every change of the events that the guard is about.
    """
    rng = random.Random(1)
    found: dict[str, tuple[int, Case]] = {}
    wanted = {rule.name for rule in MODEL.guards}

    def look(name: str, indexes: Sequence[int], share: float) -> None:
        for case, events in _mutants(name, indexes, rng, share):
            names = broken(events)
            for guard in names & wanted:
                if guard not in found or found[guard][0] > len(names):
                    found[guard] = len(names), case

    for name in track(records(), "Looking for cases", console=Console(stderr=True)):
        look(name, range(len(record(name))), 0.02)
    for name in track(records(), "Looking closer", console=Console(stderr=True)):
        kinds = {guard.partition(":")[0] for guard in wanted - found.keys()}
        look(name, [at for at, event in enumerate(record(name)) if type(event).__name__ in kinds][:40], 1.0)
    return {guard: case for guard, (_, case) in sorted(found.items())}


def keep(cases: dict[str, Case]) -> None:
    """Write the cases down."""
    KEPT.write_text(json.dumps({guard: dataclasses.asdict(case) for guard, case in cases.items()}, indent=1), "utf-8")


def kept() -> dict[str, Case]:
    """The cases that were found."""
    return {guard: Case(**case) for guard, case in json.loads(KEPT.read_text("utf-8")).items()}


if __name__ == "__main__":
    cases = search()
    keep(cases)
    print(*(rule.name for rule in MODEL.guards if rule.name not in cases), sep="\n")
