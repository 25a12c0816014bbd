"""What ``kvwitness run sweep`` prints."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.table import Table

from kvwitness.tracer.cli.output import console, display
from kvwitness.tracer.model import RequestVerdict
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.report.breakeven import breakeven_of
from kvwitness.tracer.report.messages import words_for
from kvwitness.tracer.report.statistics import Summary
from kvwitness.tracer.report.sweep import sweep_sentence


def echo_sweep(records: Sequence[RequestRecord], verdicts: Sequence[RequestVerdict]) -> None:
    """The medians by length, and the answer in one sentence."""
    found = breakeven_of(records, {verdict.rid: verdict for verdict in verdicts})
    if found is None:
        return
    table = Table("prefix", "cold, ms", "L1, ms", "L2, ms", "L2 - cold, ms", box=None)
    for point in found.points:
        interval = point.difference.interval if point.difference is not None else None
        told = f"{point.difference.difference:+.1f}" if point.difference is not None else "-"
        table.add_row(
            str(point.length),
            *(_median(one) for one in (point.cold, point.l1, point.l2)),
            told + (f" ({interval.low:+.1f} .. {interval.high:+.1f})" if interval is not None else ""),
        )
    display(console(), table)
    click.echo(sweep_sentence(found, words_for("en")))


def _median(summary: Summary | None) -> str:
    return "-" if summary is None else f"{summary.median:.1f}"
