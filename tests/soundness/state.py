"""What a search keeps in its folder: what it was asked, every finished chunk, and the sum of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from soundness.search import Tally, read_tally

CHUNK = 100
"""Random mutants in a chunk."""
EVENTS = 6
"""Events of a record in a chunk, where every field is tried."""


@dataclass(frozen=True)
class Task:
    """What a search was asked: the same task is the same mutants."""

    seeds: tuple[int, ...]
    mutants: int
    first: int = 0
    only_storage: bool = False
    records: tuple[tuple[str, int], ...] = ()
    """For every field of every event: small records by name, and how many events each has."""
    elements: int | None = None

    def chunks(self) -> Iterator[Chunk]:
        """All of it, in parts."""
        for seed in self.seeds:
            for at in range(self.first, self.first + self.mutants, CHUNK):
                yield Chunk(f"{seed}/{at}", seed, at, min(CHUNK, self.first + self.mutants - at))
        for name, count in self.records:
            for at in range(0, count, EVENTS):
                yield Chunk(f"{name}/{at}", 0, at, min(EVENTS, count - at), name)


@dataclass(frozen=True)
class Chunk:
    """Random mutants of a seed, or some events of a small record."""

    id: str
    seed: int
    first: int
    count: int
    record: str = ""


class State:
    """The folder of one search."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found = folder / "found"
        """Mutants of which something was found."""

    def begin(self, task: Task) -> None:
        """Forget an earlier search."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self._chunks, self.summary, *self.found.glob("*.json")):
            path.unlink(missing_ok=True)
        self._task.write_text(json.dumps(asdict(task)), "utf-8")

    def task(self) -> Task | None:
        """What the search in this folder was asked; None: there is none."""
        try:
            told = json.loads(self._task.read_text("utf-8"))
        except FileNotFoundError:
            return None
        records = tuple((name, count) for name, count in told.pop("records"))
        return Task(**{**told, "seeds": tuple(told["seeds"]), "records": records})

    def finished(self) -> dict[str, Tally]:
        """The chunks that are done. A line that was cut off when the search was killed is one that is not."""
        done: dict[str, Tally] = {}
        if not self._chunks.exists():
            return done
        for line in self._chunks.read_text("utf-8").splitlines():
            try:
                told = json.loads(line)
            except ValueError:
                continue
            done[told["chunk"]] = read_tally(told["tally"])
        return done

    def finish(self, chunk: Chunk, tally: Tally) -> None:
        """Keep what a chunk came to."""
        # A newline first: what a killed search left of a line must not swallow this one.
        line = "\n" + json.dumps({"chunk": chunk.id, "tally": tally.plain()}) + "\n"
        with self._chunks.open("a", encoding="utf-8") as out:
            out.write(line)

    def sum_up(self, task: Task, tally: Tally, interrupted: bool) -> None:
        """Keep the sum, with what never changed any outcome."""
        told = {**asdict(task), "interrupted": interrupted, **tally.plain(), "unchanging": tally.unchanging()}
        draft = self.summary.with_suffix(".part")
        draft.write_text(json.dumps(told, indent=1), "utf-8")
        draft.replace(self.summary)

    @property
    def summary(self) -> Path:
        """The sum as JSON."""
        return self.folder / "summary.json"

    @property
    def _task(self) -> Path:
        return self.folder / "task.json"

    @property
    def _chunks(self) -> Path:
        return self.folder / "chunks.jsonl"
