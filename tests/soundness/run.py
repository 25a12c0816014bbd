"""Look for false confirmations: ``python tests/soundness/run.py --mutants 10000``.

Mutates recorded and simulated journals and compares the product with the oracle on every mutant. The seed is drawn
anew for every run and printed first. Exit 1: something was confirmed that is not so, or a mutant could not be judged;
130: interrupted (``--resume`` goes on).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import secrets
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event as Flag
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from soundness import judged, sources
from soundness.search import Conditions, Found, Tally, differences_of, exhaust, search
from soundness.state import Chunk, State, Task
from soundness.written import read

ROOT = Path(__file__).parents[2]
ELEMENTS = 12
"""Of a longer tail or list so many elements are bent, unless every one is asked for."""
MEMORY = 4 << 30
"""A worker that needs more raises; the machine goes on."""
TOLD_EVERY_S = 15.0
INTERRUPTED = 130


class Interrupts:
    """Ctrl-C, once or more often: what runs is ended, what is known is told."""

    def __init__(self) -> None:
        self.count = 0
        signal.signal(signal.SIGINT, self._count)

    def _count(self, *_: object) -> None:
        self.count += 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.replay is not None:
        return replay(options.replay)
    interrupts = Interrupts()
    state = State(options.state)
    if options.resume:
        known = state.task()
        if known is None:
            print(f"nothing to go on with in {state.folder}", file=sys.stderr)
            return 2
        task = known
    else:
        task = _task(options)
        state.begin(task)
    out = sys.stderr if options.json else sys.stdout
    if task.seeds:
        print(f"seed {' '.join(map(str, task.seeds))}: {task.mutants} mutants each", file=out, flush=True)
    began = time.monotonic()
    tally, died = _work(task, state, options.jobs, interrupts)
    interrupted = bool(interrupts.count)
    state.sum_up(task, tally, interrupted)
    if options.json:
        print(state.summary.read_text("utf-8"))
    else:
        _print(tally, time.monotonic() - began, options.show)
    if died:
        print("a worker was killed (out of memory?): --resume goes on with the rest", file=sys.stderr)
        return 2
    if interrupted:
        print(f"interrupted: --resume --state {state.folder} goes on", file=sys.stderr)
        return INTERRUPTED
    return 1 if tally.false or tally.broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=10_000, help="so many of every seed")
    parser.add_argument("--seed", type=int, action="append", default=[], help="this one (again: several)")
    parser.add_argument("--seeds", type=int, default=1, help="draw so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--only-storage", action="store_true", help="journals with a storage (L3) alone")
    parser.add_argument("--exhaustive", action="store_true", help="every field of every event of small records instead")
    parser.add_argument("--record", default="", help="with --exhaustive: only records with this in their name")
    parser.add_argument("--every-element", action="store_true", help="with --exhaustive: also of long tails and lists")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "soundness", help="folder for what is known")
    parser.add_argument("--resume", action="store_true", help="go on with the search in that folder")
    parser.add_argument("--replay", type=Path, help="judge one mutant that was kept, and nothing else")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", type=int, default=20, help="print so many of what was found")
    parser.add_argument("--json", action="store_true", help="print the sum as JSON")
    return parser


def _task(options: argparse.Namespace) -> Task:
    if options.exhaustive:
        records = [(name, len(events)) for name, events in sources.small().items() if options.record in name]
        return Task((), 0, records=tuple(records), elements=None if options.every_element else ELEMENTS)
    seeds = tuple(options.seed) or tuple(secrets.randbelow(10**9) for _ in range(options.seeds))
    return Task(seeds, options.mutants, options.first, options.only_storage)


# --- work --------------------------------------------------------------------------------------------


def _work(task: Task, state: State, jobs: int, interrupts: Interrupts) -> tuple[Tally, bool]:
    """All chunks that are not done yet; the sum of all, and whether a worker died."""
    tally, done = Tally(), state.finished()
    for each in done.values():
        tally.add(each)
    chunks = list(task.chunks())
    left = iter([chunk for chunk in chunks if chunk.id not in done])
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    told = 0.0
    with ProcessPoolExecutor(jobs, context, _prepare, (stop, state.found)) as pool:
        running: dict[Future[Tally], Chunk] = {}
        try:
            while _fill(pool, running, left, task, jobs, interrupts) or running:
                if interrupts.count:
                    stop.set()
                for future in wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    chunk, part = running.pop(future), future.result()
                    if part.whole:
                        state.finish(chunk, part)
                    tally.add(part)
                    done[chunk.id] = part
                    if time.monotonic() - told > TOLD_EVERY_S:
                        told = time.monotonic()
                        words = f"{len(done)} of {len(chunks)} parts, {tally.mutants} mutants"
                        print(f"{words}, {len(tally.false)} false confirmations", file=sys.stderr, flush=True)
        except BrokenProcessPool:
            return tally, True
    return tally, False


def _fill(
    pool: ProcessPoolExecutor,
    running: dict[Future[Tally], Chunk],
    left: Iterator[Chunk],
    task: Task,
    jobs: int,
    interrupts: Interrupts,
) -> bool:
    """Give the workers something to do; False: there is nothing left."""
    while not interrupts.count and len(running) < 2 * jobs:
        chunk = next(left, None)
        if chunk is None:
            return False
        running[pool.submit(_chunk, chunk, task)] = chunk
    return not interrupts.count


class _Worker:
    """What a worker was given when it began."""

    conditions = Conditions()


def _prepare(stop: Flag, keep: Path) -> None:
    """Ctrl-C is for the process that sums up; memory is bounded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _Worker.conditions = Conditions(keep, stop.is_set, judged.limited)


def _chunk(chunk: Chunk, task: Task) -> Tally:
    numbers = range(chunk.first, chunk.first + chunk.count)
    if chunk.record:
        return exhaust(chunk.record, numbers, task.elements, _Worker.conditions)
    return search(numbers, chunk.seed, task.only_storage, _Worker.conditions)


# --- words -------------------------------------------------------------------------------------------


def replay(path: Path) -> int:
    """Judge one mutant that was kept."""
    made = read(path)
    print(made.name)
    for step in made.recipe:
        print(f"    {step}")
    print(f"it was kept for: {made.claim}")
    false, outcome = differences_of(made)
    if outcome is not None:
        print(f"{outcome.agreed} ranges confirmed by both, {len(outcome.missed)} by the oracle alone")
    elif not made.nothing:
        print("not judged: the comparison takes one journal")
    for claim in false:
        print(f"FALSE CONFIRMATION: {claim}")
    return 1 if false else 0


def _print(tally: Tally, seconds: float, show: int) -> None:
    for what, all_found in (("FALSE CONFIRMATION", tally.false), ("NOT JUDGED", tally.broken)):
        for found in _smallest(all_found)[:show]:
            print(f"{what} in {found.mutant}: {found.claim}")
            for step in found.recipe:
                print(f"    {step}")
            if found.file:
                print(f"    --replay {found.file}")
    print(f"{tally.mutants} mutants, {tally.mutants / max(seconds, 0.001):.0f}/s in this run")
    if tally.unjudged:
        print(f"{tally.unjudged} of several journals were not compared with the oracle: it takes one")
    print(f"{tally.agreed} ranges confirmed by both, {sum(tally.missed.values())} by the oracle alone:")
    for cause, count in tally.missed.most_common(15):
        print(f"    {count:6d} {cause}")
    _print_fields(tally, show)
    for words, all_found in (("false confirmations", tally.false), ("mutants were not judged", tally.broken)):
        print(f"{len(all_found)} {words}")
        for why, count in Counter(found.kind for found in all_found).most_common(40):
            print(f"    {count:6d} {why}")


def _print_fields(tally: Tally, show: int) -> None:
    never = tally.unchanging()
    print(f"{len(tally.tried)} changes of a field tried, {len(tally.alone)} by themselves")
    print(f"{len(never)} of these never changed any outcome:")
    by_field: dict[str, list[str]] = defaultdict(list)
    for event, name, mutator in never:
        by_field[f"{event}.{name}"].append(f"{mutator} ({tally.alone[(event, name, mutator)]})")
    for place, mutators in list(by_field.items())[: 2 * show]:
        print(f"    {place}: {', '.join(mutators)}")
    if len(by_field) > 2 * show:
        print(f"    and {len(by_field) - 2 * show} more fields (summary.json has them all)")


def _smallest(all_found: Sequence[Found]) -> list[Found]:
    """Of every kind first the one with the shortest recipe."""
    ordered = sorted(all_found, key=lambda found: (len(found.recipe), len("".join(found.recipe)), found.mutant))
    first: dict[str, Found] = {}
    for found in ordered:
        first.setdefault(found.kind, found)
    return [*first.values(), *(found for found in ordered if first[found.kind] is not found)]


if __name__ == "__main__":
    sys.exit(main())
