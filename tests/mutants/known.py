"""What is known already: judged changes in a file that a later run goes on from, and explained ones."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from mutants.changes import Change, Made


class Place(NamedTuple):
    """A change by its words alone: line numbers move."""

    file: str
    function: str
    line: str
    becomes: str


@dataclass(frozen=True)
class Judged:
    """A change and what became of it. ``by``: the test that noticed it, or nothing."""

    id: str
    place: Place
    row: int
    by: str
    timed_out: bool

    @property
    def survived(self) -> bool:
        return not self.by


def judged(change: Change, made: Made, by: str, timed_out: bool) -> Judged:
    """A change that was judged just now."""
    return Judged(change.id, Place(change.file, change.function, made.line, made.becomes), change.row, by, timed_out)


class Known:
    """The file of judged changes. It is begun anew when code or tests are others than it was written for.

    Its first line says for which, and the seed: without another one, a later run draws the same changes.
    """

    def __init__(self, path: Path, digest: str, seed: int | None) -> None:
        self._path = path
        self.judged: dict[str, Judged] = {}
        self._before: tuple[str, ...] = ()
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        head = json.loads(lines[0]) if lines else {}
        found = [Judged(**{**raw, "place": Place(*raw["place"])}) for raw in map(json.loads, lines[1:])]
        drawn = head.get("seed", random.randrange(1_000_000))
        self.seed = drawn if seed is None else seed
        if head.get("digest") == digest and self.seed == drawn:
            self.judged = {each.id: each for each in found}
            return
        # The same changes of the same code keep what became of them whatever the seed.
        kept = found if head.get("digest") == digest else []
        self.judged = {each.id: each for each in kept}
        self._before = () if kept else tuple(each.by for each in found if each.by)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"digest": digest, "seed": self.seed}) + "\n", "utf-8")
        for each in kept:
            self.add(each)

    def add(self, each: Judged) -> None:
        """On disk at once: Ctrl-C loses nothing."""
        self.judged[each.id] = each
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(each)) + "\n")

    def kills(self) -> dict[str, int]:
        """How many changes each test was the first to notice, here and in the file that this one took the place of."""
        counted: dict[str, int] = {}
        for by in (*self._before, *(each.by for each in self.judged.values() if each.by)):
            counted[by] = counted.get(by, 0) + 1
        return counted


def read_explained(path: Path) -> Mapping[Place, str]:
    """Changes that change nothing, and why each does not."""
    found: dict[Place, str] = {}
    for raw in tomllib.loads(path.read_text("utf-8")).get("change", ()):
        if not raw["why"].strip():
            raise ValueError(f"{path}: no reason is given for {raw['line']!r} in {raw['file']}")
        found[Place(raw["file"], raw["function"], raw["line"].strip(), raw["becomes"].strip())] = raw["why"]
    return found
