"""Look for false confirmations: ``python tests/soundness/run.py --mutants 10000 --seed 1``.

Mutates recorded and simulated journals and compares the product with the oracle on every mutant.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from journal_tools import FIXTURES
from rich.console import Console
from rich.progress import track

from kvwitness.collectors.journal import parse_journal, read_journal
from kvwitness.patches.schema.events import Event
from soundness.compare import Difference, compare
from soundness.mutate import mutant
from soundness.simulate import simulated

RECORDED = Path(__file__).parents[1] / "adapters" / "data"
"""Runs of older releases."""
DIGESTED = Path(__file__).parent / "data"
"""Runs with digests of pages."""
STORED = DIGESTED / "storage"
"""Runs with a storage (L3)."""
EXTRA_EVERY = 3
"""After every third mutant comes one of a journal that begins with a snapshot, after the next one with digests, after
the one before with storage."""


@dataclass
class Tally:
    """What a run found."""

    mutants: int = 0
    agreed: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    false: list[tuple[str, tuple[str, ...], str]] = field(default_factory=list)
    """Name of the mutant, recipe, difference."""

    def add(self, other: Tally) -> None:
        self.mutants += other.mutants
        self.agreed += other.agreed
        self.missed.update(other.missed)
        self.false.extend(other.false)


def bases(simulations: int = 40) -> dict[str, list[Event]]:
    """Every journal to start from, by name."""
    found = {path.name: list(read_journal(path).events) for path in sorted(FIXTURES.glob("abc-*.kvwj"))}
    for path in sorted(RECORDED.glob("*.kvwj.xz")):
        raw = lzma.decompress(path.read_bytes())
        found[path.name] = list(parse_journal(raw, "scheduler-1-1.kvwj").events)
    for seed in range(simulations):
        found[f"simulated-{seed}"] = simulated(seed).events
    return found


def attached_bases(simulations: int = 24) -> dict[str, list[Event]]:
    """Journals that begin with a snapshot, by name."""
    found = {path.name: list(read_journal(path).events) for path in sorted(FIXTURES.glob("attach-*.kvwj"))}
    for seed in range(simulations):
        found[f"attached-{seed}"] = simulated(seed, attached=True).events
    return found


def digested_bases(simulations: int = 24) -> dict[str, list[Event]]:
    """Journals with digests of pages, by name."""
    found = {}
    for path in sorted(DIGESTED.glob("*.kvwj.xz")):
        found[path.name] = list(parse_journal(lzma.decompress(path.read_bytes()), "scheduler-1-1.kvwj").events)
    for seed in range(simulations):
        found[f"digested-{seed}"] = simulated(seed, digested=0.3 if seed % 3 else 1.0).events
    return found


def stored_bases(simulations: int = 30) -> dict[str, list[Event]]:
    """Journals with a storage (L3), by name."""
    found = {}
    for path in sorted(STORED.glob("*.kvwj.xz")):
        found[path.name] = list(parse_journal(lzma.decompress(path.read_bytes()), "scheduler-1-1.kvwj").events)
    for seed in range(simulations):
        found[f"stored-{seed}"] = simulated(seed, stored=True).events
    return found


def one(name: str, base: Sequence[Event], seed: int, number: int) -> tuple[list[Event], tuple[str, ...]]:
    """Mutant ``number`` of a journal: the same on every run."""
    return mutant(random.Random(f"{seed}/{number}/{name}"), base)


@cache
def _sources() -> tuple[list[tuple[str, list[Event]]], ...]:
    """All journals, those recorded, those that begin with a snapshot, with digests, with storage: once in a process."""
    found = sorted(bases().items())
    recorded = [item for item in found if not item[0].startswith("simulated")]
    extra = (attached_bases(), digested_bases(), stored_bases())
    return found, recorded, *(sorted(journals.items()) for journals in extra)


def search(numbers: Sequence[int], seed: int, only_storage: bool = False) -> Tally:
    """Compare product and oracle on these mutants."""
    tally = Tally()
    all_bases, recorded, attached, digested, stored = _sources()
    extra = (stored, attached, digested)
    for number in (n for each in numbers for n in ((each, -each) if each else (0,))):
        chosen = extra[-number % EXTRA_EVERY] if number < 0 else recorded if number % 8 == 0 else all_bases
        if only_storage:
            chosen = [base for base in stored if number % 3 or not base[0].startswith("stored-")]
        name, base = random.Random(f"{seed}/{number}").choice(chosen)
        events, recipe = one(name, base, seed, number)
        outcome = compare(events)
        tally.mutants += 1
        tally.agreed += outcome.agreed
        tally.missed.update(_cause(difference) for difference in outcome.missed)
        tally.false += [(f"{name}/{number}", recipe, str(difference)) for difference in outcome.false]
    return tally


def _cause(difference: Difference) -> str:
    return f"{difference.tier}: {difference.why[:150]}"


def _search(job: tuple[Sequence[int], int, bool]) -> Tally:
    return search(*job)


def _leave_interrupts() -> None:
    """Ctrl-C is for the process that sums up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="go on with this number, after a part that is done")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--only-storage", action="store_true", help="only journals with a storage (L3)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", type=int, default=20, help="false confirmations to print")
    options = parser.parse_args()
    began = time.monotonic()
    # Every number but the first has two mutants.
    numbers = list(range(options.first, options.first + -(-(options.mutants + (not options.first)) // 2)))
    jobs = [(numbers[at : at + 100], options.seed, options.only_storage) for at in range(0, len(numbers), 100)]
    tally = Tally()
    with multiprocessing.Pool(options.jobs, initializer=_leave_interrupts) as pool:
        try:
            for part in track(
                pool.imap_unordered(_search, jobs), "Judging mutants", len(jobs), console=Console(stderr=True)
            ):
                tally.add(part)
        except KeyboardInterrupt:
            pool.terminate()
            print("interrupted: what was found so far", file=sys.stderr)
    seconds = time.monotonic() - began
    if options.json:
        print(
            json.dumps(
                {
                    "mutants": tally.mutants,
                    "seconds": round(seconds, 1),
                    "agreed": tally.agreed,
                    "missed": dict(tally.missed.most_common()),
                    "false": [{"mutant": m, "recipe": r, "claim": c} for m, r, c in sorted(tally.false)],
                }
            )
        )
    else:
        _print(tally, seconds, options.show)
    return 1 if tally.false else 0


def _print(tally: Tally, seconds: float, show: int) -> None:
    for name, recipe, claim in sorted(tally.false, key=lambda found: len(found[1]))[:show]:
        print(f"FALSE CONFIRMATION in {name}: {claim}")
        for step in recipe:
            print(f"    {step}")
    print(f"{tally.mutants} mutants in {seconds:.0f} s ({tally.mutants / max(seconds, 0.001):.0f}/s)")
    print(f"{tally.agreed} ranges confirmed by both, {sum(tally.missed.values())} by the oracle alone:")
    for cause, count in tally.missed.most_common(25):
        print(f"    {count:6d} {cause}")
    kinds = Counter(claim.split(": ", 1)[1] for _, _, claim in tally.false)
    print(f"{len(tally.false)} false confirmations")
    for why, count in kinds.most_common(40):
        print(f"    {count:6d} the oracle says: {why}")


if __name__ == "__main__":
    sys.exit(main())
