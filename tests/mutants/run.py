"""Change the code that decides, one place at a time, and count which changes the tests notice.

``python tests/mutants/run.py --count 300 --seed 7``. Run it again and it goes on; Ctrl-C keeps what is known. Files are
changed in copies of the checkout alone. Exit 1 if more survive than may, 2 if the tests fail on unchanged code.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants import suite, tree
from mutants.changes import Change, Made, changes_of, make
from mutants.known import Judged, Known, Place, judged, read_explained
from mutants.settings import Settings, read_settings

HERE = Path(__file__).parent
MOST = 0.03
"""Share of the judged changes that may survive without an explanation."""
CLEAN_LIMIT = 900.0
LONGER = 4
LEAST = 60.0
"""A run against changed code is given up after this many times the clean run, and after this many seconds at least."""
PAUSE = 0.05
NOT_JUDGED = ("Makefile", "docs/", "tests/mutants/")
"""Neither code nor tests of it: changing them leaves what was judged as it is."""


class Unfit(Exception):
    """Nothing can be judged; the argument says why."""


@dataclass(frozen=True)
class Work:
    """A drawn change with its text."""

    change: Change
    made: Made


def draw(settings: Settings, count: int, seed: int) -> tuple[list[Change], int]:
    """``count`` of all changes, and how many there are. A larger count with the same seed begins with the same ones."""
    every = [
        change for file in settings.files() for change in changes_of(file, (settings.root / file).read_text("utf-8"))
    ]
    random.Random(seed).shuffle(every)
    return every[:count], len(every)


def clean(settings: Settings, copy: Path) -> tuple[suite.Habits, float]:
    """Run the tests on unchanged code: seconds of each, and of all. Loads what they load, for the runs to come."""
    began = time.monotonic()
    running = suite.Running(settings, copy, suite.Habits(), CLEAN_LIMIT)
    try:
        while (ran := running.poll()) is None:
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        running.stop()
        raise
    if not ran.passed:
        raise Unfit(f"The tests fail on unchanged code: {ran.by}\n{running.said()}")
    inside = {os.path.realpath(file) for file in ran.files}
    strange = [file for file in settings.files() if (settings.root / file).resolve().as_posix() in inside]
    if strange:
        raise Unfit(f"The tests import {strange[0]} from the checkout and not from its copy (python-path)")
    suite.load(ran.modules)
    return suite.Habits(seconds=ran.seconds), time.monotonic() - began


def judge(
    settings: Settings, work: Sequence[Work], copies: Sequence[Path], habits: suite.Habits, limit: float, known: Known
) -> Iterator[Judged]:
    """Each change as soon as it is judged, one copy of the checkout for each that runs."""
    waiting = list(reversed(work))
    free = list(copies)
    running: dict[Path, tuple[Work, suite.Running, ExitStack]] = {}
    try:
        while waiting or running:
            while waiting and free:
                next_one, copy, stack = waiting.pop(), free.pop(), ExitStack()
                stack.enter_context(tree.changed(copy / next_one.change.file, next_one.made.text))
                habits = replace(habits, kills=known.kills())
                running[copy] = next_one, suite.Running(settings, copy, habits, limit), stack
            for copy, (one, run, stack) in list(running.items()):
                if (ran := run.poll()) is not None:
                    del running[copy]
                    stack.close()
                    free.append(copy)
                    yield judged(one.change, one.made, ran.by, ran.timed_out)
            time.sleep(PAUSE)
    finally:
        for _, run, stack in running.values():
            run.stop()
            stack.close()


def shown(each: Judged) -> str:
    """A survivor as a difference of one line."""
    where = f"{each.place.file}:{each.row} {each.place.function}".rstrip()
    return f"{where}\n  - {each.place.line}\n  + {each.place.becomes}"


def summary(found: Sequence[Judged], explained: Mapping[Place, str]) -> tuple[str, bool]:
    """The result in words, and whether few enough survive without an explanation."""
    survivors = sorted((each for each in found if each.survived), key=lambda each: (each.place.file, each.row))
    open_ones = [each for each in survivors if each.place not in explained]
    timeouts = sum(each.timed_out for each in found)
    share = len(open_ones) / len(found) if found else 0.0
    lines = [shown(each) for each in open_ones]
    lines += [
        f"{shown(each)}\n  changes nothing: {explained[each.place]}" for each in survivors if each not in open_ones
    ]
    lines += [
        f"{shown(each)}\n  explained as changing nothing, and noticed by {each.by}"
        for each in found
        if not each.survived and each.place in explained
    ]
    lines.append(
        f"{len(found)} changes judged: {len(found) - len(survivors)} noticed ({timeouts} by a timeout), "
        f"{len(survivors)} not, {len(survivors) - len(open_ones)} of them explained. "
        f"Not noticed and not explained: {share:.1%}, at most {MOST:.0%} may be."
    )
    return "\n".join(lines), share <= MOST


def outdated(settings: Settings, explained: Mapping[Place, str]) -> Iterator[Place]:
    """Explanations of lines that are no longer there."""
    for place in explained:
        file = settings.root / place.file
        text = " ".join(file.read_text("utf-8").split()) if file.exists() else ""
        if " ".join(place.line.split()) not in text:
            yield place


def run(options: argparse.Namespace, settings: Settings, build: Path) -> int:
    """The whole job: draw, copy, judge, say."""
    explained = read_explained(options.explain)
    for place in outdated(settings, explained):
        print(f"Explained, and no longer there: {place.file} {place.function}: {place.line}")
    copies = [build / f"tree-{number}" for number in range(options.jobs)]
    print(f"Copying the checkout to {build}", flush=True)
    for copy in copies:
        tree.copy(settings, copy)
    known = Known(build / "judged.jsonl", tree.digest(copies[0], NOT_JUDGED), options.seed)
    drawn, of = draw(settings, options.count, known.seed)
    print(f"Seed {known.seed}: {len(drawn)} of {of} changes, {sum(c.id in known.judged for c in drawn)} judged before")
    work = [
        Work(change, make(change, (settings.root / change.file).read_text("utf-8")))
        for change in drawn
        if change.id not in known.judged
    ]
    stopped = False
    try:
        if work:
            habits, seconds = clean(settings, copies[0])
            print(f"The tests pass on unchanged code in {seconds:.0f} s", flush=True)
            limit = max(LEAST, LONGER * seconds)
            for number, each in enumerate(judge(settings, work, copies, habits, limit, known), 1):
                known.add(each)
                print(f"[{number}/{len(work)}] {outcome(each)}", flush=True)
    except KeyboardInterrupt:
        stopped = True
    words, few = summary([known.judged[change.id] for change in drawn if change.id in known.judged], explained)
    print(words)
    if stopped:
        print("Interrupted: run it again and it goes on", file=sys.stderr)
        return 130
    return 0 if few else 1


def outcome(each: Judged) -> str:
    """One line about a change that was judged just now."""
    place = f"{each.place.file}:{each.row}"
    return f"{place} noticed by {each.by}" if each.by else f"{place} NOT noticed: {each.place.becomes}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="how many changes to draw (default 300)")
    parser.add_argument("--seed", type=int, help="which ones (default: as last time; at first a random one)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--explain", type=Path, default=HERE / "explained.toml", help="changes that change nothing")
    parser.add_argument("--settings", type=Path, default=HERE / "settings.toml", help="what is changed and what is run")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the checkout")
    parser.add_argument("--build", type=Path, help="for copies and results (default build/mutants in the checkout)")
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        # SIGINT, too: behind `&` in a script the shell has it ignored.
        signal.signal(number, signal.default_int_handler)
    root = options.root.resolve()
    try:
        return run(options, read_settings(options.settings, root), options.build or root / "build" / "mutants")
    except (Unfit, FileNotFoundError) as why:
        print(why, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
