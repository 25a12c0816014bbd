"""The table of requests, and the colours that grades have everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvwitness.tracer.bundle.rows import Row
from kvwitness.tracer.model import Grade

GRADE_STYLE: Final[dict[Grade, str]] = {
    Grade.UNKNOWN: "dim",
    Grade.CONSISTENT: "yellow",
    Grade.REPORTED: "yellow",
    Grade.CONFIRMED: "green",
    Grade.VERIFIED: "bold green",
    Grade.REFUTED: "bold red",
    Grade.RECOMPUTED: "cyan",
}


def request_table(rows: Sequence[Row], *, doubt: str = "") -> Table:
    """All requests, one line each. The column for unknown tokens is there when a request has some.

    ``doubt`` is put before every sentence.
    """
    with_unknown = any(row.unknown for row in rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("request", overflow="fold")
    table.add_column("series")
    for name in ("prompt", "L1", "L2", "L3", "recomputed", *(["unknown"] if with_unknown else [])):
        table.add_column(name, justify="right")
    table.add_column("grade")
    table.add_column("sentence", overflow="fold", ratio=1)
    for row in rows:
        counts = [row.l1, row.l2, row.l3, row.recomputed, *([row.unknown] if with_unknown else [])]
        table.add_row(
            Text(row.request),
            Text(row.series),
            str(row.prompt),
            *("-" if count is None else str(count) for count in counts),
            grade_text(row.grade),
            Text(doubt + row.sentence),
        )
    return table


def grade_text(grade: Grade) -> Text:
    """A grade in its colour."""
    return Text(grade.value, style=GRADE_STYLE[grade])
