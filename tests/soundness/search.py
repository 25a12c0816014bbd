"""Judge mutants: of which are product and oracle of two minds, and which fields of which events made any difference?"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvwitness.patches.schema.events import Event
from soundness import judged, ranks, sources
from soundness.compare import Difference, Outcome
from soundness.fields import single_field_mutants
from soundness.mutate import mutant
from soundness.steps import Step
from soundness.written import Mutant, write

Key = tuple[str, str, str]
"""Event, field, mutator."""
KEPT = 300
"""Mutants of a run that are kept as files."""
STREAMS = ("any", "recorded", "stored", "attached", "digested", "lively", "ranks")
SHARES = (30, 8, 14, 14, 10, 16, 8)
"""How many of a hundred mutants are made of journals of each kind."""


@dataclass(frozen=True)
class Found:
    """A mutant of which something is claimed that is not so, or that could not be judged."""

    mutant: str
    recipe: tuple[str, ...]
    claim: str
    file: str = ""

    @property
    def kind(self) -> str:
        """The claim without what is particular to the journal."""
        return kind_of(self.claim)


@dataclass
class Tally:
    """What a run found."""

    mutants: int = 0
    agreed: int = 0
    unjudged: int = 0
    """Of several journals, where the comparison takes one."""
    missed: Counter[str] = field(default_factory=Counter)
    false: list[Found] = field(default_factory=list)
    broken: list[Found] = field(default_factory=list)
    """Product or oracle raised, or did not come to an end."""
    tried: Counter[Key] = field(default_factory=Counter)
    alone: Counter[Key] = field(default_factory=Counter)
    """Of these in a mutant of one step, of one journal: only they tell what a change does."""
    changed: Counter[Key] = field(default_factory=Counter)
    """Of these with another outcome than the journal without it: other verdicts, or another answer of the oracle."""
    whole: bool = True
    """Not interrupted."""

    def add(self, other: Tally) -> None:
        self.mutants += other.mutants
        self.agreed += other.agreed
        self.unjudged += other.unjudged
        self.missed.update(other.missed)
        self.false.extend(other.false)
        self.broken.extend(other.broken)
        self.tried.update(other.tried)
        self.alone.update(other.alone)
        self.changed.update(other.changed)
        self.whole = self.whole and other.whole

    def unchanging(self) -> list[Key]:
        """What was tried by itself and never changed any outcome."""
        return sorted(key for key in self.alone if not self.changed[key])

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "mutants": self.mutants,
            "agreed": self.agreed,
            "unjudged": self.unjudged,
            "missed": dict(self.missed.most_common()),
            "false": [_plain(found) for found in self.false],
            "broken": [_plain(found) for found in self.broken],
            "fields": [[*key, self.tried[key], self.alone[key], self.changed[key]] for key in sorted(self.tried)],
        }


def read_tally(plain: dict[str, Any]) -> Tally:
    """What :meth:`Tally.plain` gave."""
    tally = Tally(plain["mutants"], plain["agreed"], plain["unjudged"], Counter(plain["missed"]))
    tally.false = [_found(each) for each in plain["false"]]
    tally.broken = [_found(each) for each in plain["broken"]]
    for event, name, mutator, *counts in plain["fields"]:
        for counter, count in zip((tally.tried, tally.alone, tally.changed), counts, strict=True):
            if count:
                counter[(event, name, mutator)] = count
    return tally


def _plain(found: Found) -> dict[str, Any]:
    return {"mutant": found.mutant, "recipe": list(found.recipe), "claim": found.claim, "file": found.file}


def _found(plain: dict[str, Any]) -> Found:
    return Found(plain["mutant"], tuple(plain["recipe"]), plain["claim"], plain["file"])


@dataclass(frozen=True)
class Conditions:
    """How mutants are judged: where those are kept of which something was found, when to stop, what each may take."""

    keep: Path | None = None
    stopped: Callable[[], bool] = lambda: False
    limited: Callable[[], AbstractContextManager[None]] = nullcontext


HERE = Conditions()


def search(numbers: Sequence[int], seed: int, only_storage: bool = False, conditions: Conditions = HERE) -> Tally:
    """Judge these random mutants."""
    tally = Tally()
    for number in numbers:
        if conditions.stopped():
            tally.whole = False
            break
        rng = random.Random(f"{seed}/{number}")
        stream = "stored" if only_storage else rng.choices(STREAMS, SHARES)[0]
        if stream == "ranks":
            group = ranks.group(rng, rng.randrange(10**6), number)
            made = Mutant(f"ranks/{seed}/{number}", _words(group.recipe), group.journals, "", group.nothing)
            _judge(tally, made, group.recipe, None, conditions)
            continue
        name, base = rng.choice(_sources()[stream])
        events, recipe = one(name, base, seed, number)
        made = Mutant(f"{name}/{seed}/{number}", _words(recipe), (events,), "")
        _judge(tally, made, recipe, (stream, name), conditions)
    return tally


def exhaust(name: str, indices: Sequence[int], elements: int | None, conditions: Conditions = HERE) -> Tally:
    """Judge every single-field mutant of these events of one small record."""
    tally = Tally()
    for events, change in single_field_mutants(sources.small()[name], elements, frozenset(indices)):
        if conditions.stopped():
            tally.whole = False
            break
        made = Mutant(f"{name}/{change.index + 1}/{change.path}/{change.mutator}", (change.words,), (events,), "")
        _judge(tally, made, (change.step,), ("small", name), conditions)
    return tally


def one(name: str, base: Sequence[Event], seed: int, number: int) -> tuple[list[Event], tuple[Step, ...]]:
    """Mutant ``number`` of a journal: the same on every run."""
    return mutant(random.Random(f"{seed}/{number}/{name}"), base)


def _words(recipe: Sequence[Step]) -> tuple[str, ...]:
    return tuple(str(step) for step in recipe)


@cache
def _sources() -> dict[str, list[tuple[str, list[Event]]]]:
    """All journals by kind: once in a process."""
    found = sorted(sources.bases().items())
    return {
        "any": found,
        "recorded": [item for item in found if not item[0].startswith("simulated")],
        "stored": sorted(sources.stored_bases().items()),
        "attached": sorted(sources.attached_bases().items()),
        "digested": sorted(sources.digested_bases().items()),
        "lively": sorted(sources.lively_bases().items()),
    }


@cache
def _untouched(stream: str, name: str) -> tuple[Outcome, tuple[judged.Row, ...]]:
    """What is said of a journal that nothing was done to."""
    events = sources.small()[name] if stream == "small" else dict(_sources()[stream])[name]
    return judged.outcome([events]), judged.verdicts(events)


def _judge(
    tally: Tally, made: Mutant, recipe: Sequence[Step], base: tuple[str, str] | None, conditions: Conditions
) -> None:
    tally.mutants += 1
    tally.tried.update(step.key for step in recipe)
    alone = len(recipe) == 1 and base is not None
    before = _untouched(*base) if alone and base is not None else None
    changed = False
    try:
        with conditions.limited():
            differences, outcome = differences_of(made)
            if outcome is None:
                tally.unjudged += 1
            else:
                tally.agreed += outcome.agreed
                tally.missed.update(_cause(difference) for difference in outcome.missed)
            if before is not None:
                # The verdicts by themselves cost another judgement: only where the comparison shows no change.
                changed = outcome != before[0] or judged.verdicts(made.journals[0]) != before[1]
    except (Exception, judged.TooLong) as error:
        what = judged.broken(error)
        tally.broken.append(_keep(made, f"{what.why}: in {what.where}", conditions.keep))
        changed = True
    else:
        tally.false += [_keep(made, claim, conditions.keep) for claim in differences]
    if alone:
        tally.alone[recipe[0].key] += 1
        tally.changed[recipe[0].key] += changed


def differences_of(made: Mutant) -> tuple[list[str], Outcome]:
    """What is claimed of a mutant and is not so, and the whole comparison where there is one."""
    outcome = judged.outcome(made.journals)
    false = [str(difference) for difference in outcome.false]
    if made.nothing:
        why = f"no complete group of ranks ({'; '.join(made.recipe)})"
        false += [f"{claim}: {why}" for claim in judged.claims(made.journals)]
    by_kind: dict[str, list[str]] = {}
    for claim in false:
        by_kind.setdefault(kind_of(claim), []).append(claim)
    return [_with_more(claims) for claims in by_kind.values()], outcome


def kind_of(claim: str) -> str:
    """A claim without whom and which tokens it is about."""
    return claim.split(": ", 1)[-1]


def _with_more(claims: Sequence[str]) -> str:
    whose, why = claims[0].split(": ", 1)
    return f"{whose} and {len(claims) - 1} more: {why}" if len(claims) > 1 else claims[0]


def _keep(made: Mutant, claim: str, keep: Path | None) -> Found:
    """With the mutant's events as a file, as long as there are not too many."""
    file = ""
    if keep is not None:
        name = hashlib.sha256(made.name.encode()).hexdigest()[:16]
        path = keep / f"{name}.json"
        if path.exists() or not keep.exists() or len(list(keep.iterdir())) < KEPT:
            write(path, Mutant(made.name, made.recipe, made.journals, claim, made.nothing))
            file = str(path)
    return Found(made.name, made.recipe, claim, file)


def _cause(difference: Difference) -> str:
    return f"{difference.tier}: {difference.why[:150]}"
