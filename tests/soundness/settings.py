"""The settings matrix, judged twice: ``python tests/soundness/settings.py [--setting NAME]... [--out FOLDER]``.

Runs ``kvwitness matrix --settings`` and asks the oracle about everything that the product confirmed, on the journals
of all ranks. Exit 1 when a row is not right, or the oracle does not agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from kvwitness.tracer.bundle.read import open_bundle, read_bundle_journals
from kvwitness.tracer.cli.matrix import print_settings
from kvwitness.tracer.demo.settings import SETTINGS, SettingRow, run_settings
from kvwitness.tracer.judgement import SCHEDULER_ROLE
from kvwitness.tracer.stand.progress import reporting
from soundness.compare import CLAIMED, ORACLE_TIERS
from soundness.oracle import Oracle, Recorded


def judged(row: SettingRow) -> tuple[bool, str]:
    """Whether the oracle agrees with every confirmed range of a bundle, and that in words."""
    path = Path(row.bundle)
    journals = [journal for journal in read_bundle_journals(path) if journal.role == SCHEDULER_ROLE]
    oracle = Oracle([Recorded([journal.events], journal.instance, journal.wall_ns) for journal in journals])
    confirmed, refused = 0, []
    for verdict in open_bundle(path).verdicts:
        for r in verdict.ranges:
            if r.grade not in CLAIMED or r.tier not in ORACLE_TIERS:
                continue
            confirmed += 1
            asked = [stay for stay in oracle.attempts() if stay.use.rid == verdict.rid]
            for stay in asked:
                why = oracle.refusal(stay, r.tier.value, r.start, r.end)
                refused += [f"{verdict.rid} [{r.start}, {r.end}): {why}"] if why is not None else []
            refused += [f"{verdict.rid} is unknown to it"] if not asked else []
    ranks = f" on {len(journals)} ranks" if len(journals) > 1 else ""
    if refused:
        return False, f"refuses {refused[0]}"
    return confirmed > 0, f"confirms all {confirmed} confirmed ranges{ranks}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), help="only this one")
    parser.add_argument("--out", type=Path, default=Path("out/settings"))
    parser.add_argument("--rows", type=Path, help="append each row to this file as soon as it is there")
    arguments = parser.parse_args()
    rows: list[SettingRow] = []
    words: dict[str, str] = {}
    wrong = 0
    with reporting() as progress:
        for row in run_settings(arguments.setting or list(SETTINGS), arguments.out, progress):
            rows.append(row)
            agrees = True
            if row.bundle:
                agrees, words[row.setting] = judged(row)
            wrong += not ((row.right and agrees) or row.refused)
            if arguments.rows is not None:
                with arguments.rows.open("a") as out:
                    out.write(json.dumps([msgspec.to_builtins(row), words.get(row.setting, "")]) + "\n")
    print_settings(rows, words)
    print(f"{len(rows)} settings, {wrong} not as they should be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
