"""The verdicts about every recorded journal as one table: ``python tests/soundness/verdicts.py --out before.json``.

``--against before.json`` prints what differs, recording by recording. ``--folder`` adds the journals below a folder.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.progress import track

from kvwitness.collectors.journal import Journal, parse_journal
from kvwitness.tracer.judgement import judge

TESTS = Path(__file__).parents[1]
Row = list[str | int]
"""Request, attempt, start, end, tier, grade, reason."""


def recordings(folders: list[Path]) -> Iterator[tuple[str, list[Path]]]:
    """Journals by what they are judged as: all of a folder where they are the ranks of one server, else one by one."""
    for folder in folders:
        paths = sorted(p for p in folder.rglob("*.kvwj*") if p.name.endswith((".kvwj", ".kvwj.xz")))
        for parent in sorted({path.parent for path in paths}):
            own = [path for path in paths if path.parent == parent]
            schedulers = [path for path in own if path.name.startswith("scheduler")]
            if schedulers:
                yield str(parent.relative_to(folder)), own
            else:
                yield from ((str(path.relative_to(folder)), [path]) for path in own)


def read(path: Path) -> Journal:
    """A journal, packed or not."""
    raw = path.read_bytes()
    return parse_journal(lzma.decompress(raw) if path.suffix == ".xz" else raw, path.name.removesuffix(".xz"))


def table(folders: list[Path]) -> dict[str, list[Row]]:
    """All ranges of all requests, by recording."""
    found: dict[str, list[Row]] = {}
    named = list(recordings(folders))
    for name, paths in track(named, "Judging recordings", console=Console(stderr=True)):
        verdicts = judge([read(path) for path in paths]).verdicts
        found[name] = [
            [verdict.rid, verdict.attempt, r.start, r.end, r.tier.value, r.grade.value, r.reason.value]
            for verdict in verdicts
            for r in verdict.ranges
        ]
    return found


def differences(before: dict[str, list[Row]], after: dict[str, list[Row]]) -> Iterator[str]:
    """One line for each range that one table has and the other has not."""
    for name in sorted({*before, *after}):
        old, new = ({tuple(row) for row in each.get(name, [])} for each in (before, after))
        for row in sorted(old ^ new, key=str):
            yield f"{name}: {'-' if row in old else '+'} {' '.join(map(str, row))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, action="append", default=[], help="more recordings")
    parser.add_argument("--out", type=Path, help="write the table here")
    parser.add_argument("--against", type=Path, help="an earlier table to compare with")
    options = parser.parse_args()
    found = table([TESTS, *options.folder])
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=0), "utf-8")
    grades: dict[str, int] = {}
    for rows in found.values():
        for row in rows:
            grades[f"{row[4]} {row[5]}"] = grades.get(f"{row[4]} {row[5]}", 0) + 1
    print(f"{len(found)} recordings, {sum(grades.values())} ranges")
    for grade, count in sorted(grades.items()):
        print(f"  {count:6d} {grade}")
    if options.against is None:
        return 0
    lines = list(differences(json.loads(options.against.read_text("utf-8")), found))
    print("\n".join(lines) if lines else "no difference")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
