"""``kvwitness compare``: two runs beside each other, if their conditions allow it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.output import console, display, json_option, note, print_json
from kvwitness.tracer.protocol.settings import NOT_THERE
from kvwitness.tracer.report.comparison import Comparison, SeriesPair, compare_runs
from kvwitness.tracer.report.conditions import Difference
from kvwitness.tracer.report.load import Evidence, load_evidence
from kvwitness.tracer.report.statistics import FEWEST, Interval, Summary

_CHARS: Final = 60
_LISTED: Final = 8
"""Conditions that are named; there can be hundreds, where one run knows nothing of the server's arguments."""


@click.command()
@click.argument("one", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
@click.option("--allow-differences", is_flag=True, help="Compare all the same, and list what differs.")
@json_option
def compare(one: Path, other: Path, allow_differences: bool, as_json: bool) -> None:
    """Compare two bundles: the times and the reads of each series.

    Runs whose conditions differ (model, server arguments, pool sizes, prompt lengths and so on) are not compared:
    each difference is named, and the exit code is 2. So it is for a bundle that does not verify. What neither run
    knows is named as well, and how many backups to L2 were acknowledged where that is not the same.

    \b
    Example:
      kvwitness compare monday.zip tuesday.zip
    """
    found = compare_runs(_load(one), _load(other))
    refused = bool(found.differences) and not allow_differences
    if as_json:
        shown = {"differences": found.differences, "unknown": found.unknown, "copies": found.copies}
        measured = {} if refused else {"series": found.series}
        print_json({"one": str(one), "other": str(other), "compared": not refused, **shown, **measured})
    if refused:
        for line in _told(found.differences):
            note(line)
        for line in _copies(found):
            note(line)
        count, names = len(found.differences), _names([one.name for one in found.differences])
        raise UserError(
            f"{count} condition{' differs' if count == 1 else 's differ'}: {names}",
            f"{one} and {other}",
            "make the runs alike, or add --allow-differences",
        )
    if not as_json:
        _show(found)


def _load(path: Path) -> Evidence:
    with bundle_errors():
        evidence = load_evidence(path)
    if not evidence.intact:
        raise UserError(
            f"this bundle does not verify ({evidence.problems[0]})", str(path), f"see `kvwitness verify {path}`"
        )
    return evidence


def _show(found: Comparison) -> None:
    for line in _told(found.differences):
        click.echo(f"differs: {line}")
    for line in _copies(found):
        click.echo(line)
    if found.unknown:
        click.echo(f"unknown in both: {', '.join(found.unknown)}")
    if not found.series:
        click.echo("neither bundle holds requests of a series")
        return
    display(console(), _table(found.series))
    if few := [pair.series for pair in found.series if pair.difference and pair.difference.interval is None]:
        click.echo(f"no interval for {', '.join(few)}: it needs {FEWEST} requests in both runs")


def _copies(found: Comparison) -> Iterator[str]:
    """What was copied, where the runs differ in it; and the run of which nothing could be read back."""
    one, other = found.copies
    if one is None or other is None or one == other:
        return
    yield f"copies: {one} | {other}"
    for name, copies, beside in (("one", one, other), ("other", other, one)):
        if not copies.acknowledged and beside.acknowledged:
            why = "queued, and none acknowledged" if copies.backups else "and none was even queued"
            yield f"{name}: acknowledged backups are missing ({copies.backups} {why}): L2 had nothing to restore"


def _table(series: Sequence[SeriesPair]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("series")
    for name in ("one: ms", "other: ms", "other - one: ms", "95% interval"):
        table.add_column(name, justify="right")
    for name in ("one: reads", "other: reads"):
        table.add_column(name)
    for pair in series:
        difference = pair.difference
        table.add_row(
            Text(pair.series),
            _median(pair.one),
            _median(pair.other),
            "-" if difference is None else f"{difference.difference:+.1f}",
            _interval(difference.interval if difference else None),
            Text(pair.reads_one),
            Text(pair.reads_other),
        )
    return table


def _median(summary: Summary | None) -> str:
    return "-" if summary is None else f"{summary.median:.1f} (n={summary.count})"


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.low:+.1f} to {interval.high:+.1f}"


def _told(found: Sequence[Difference]) -> Iterator[str]:
    """A line for each; what only one run knows of a section is one line when it is much."""
    sections: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for difference in found:
        sections[_section(difference)].append(difference)
    for difference in found:
        section, where = _section(difference)
        alike = sections[section, where]
        if not where or len(alike) <= _LISTED:
            yield f"{difference.name}: {_short(difference.one)} | {_short(difference.other)}"
        elif difference is alike[0]:
            names = _names([one.name.partition(".")[2] for one in alike])
            yield f"{section}: {len(alike)} conditions are known of {where} alone ({names})"


def _section(difference: Difference) -> tuple[str, str]:
    """The first part of its name, and the run that has it when only one has ("" otherwise)."""
    alone = {difference.one: "other", difference.other: "one"}.get(NOT_THERE, "")
    return difference.name.partition(".")[0], alone


def _names(names: Sequence[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _short(value: str) -> str:
    text = " ".join(value.split())
    return text if len(text) <= _CHARS else text[: _CHARS - 1] + "…"
