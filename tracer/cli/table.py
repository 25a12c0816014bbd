"""The requests for people, and the colours that grades have everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvwitness.tracer.bundle.rows import Row
from kvwitness.tracer.cli.output import console, display
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

_SENTENCE_ROOM: Final = 50
"""Columns in which a sentence is still easy to read; with less it gets lines of its own."""
_GAP: Final = 3
"""Columns between two columns of the table."""


def print_requests(rows: Sequence[Row], *, doubt: str = "") -> None:
    """Print all requests: one line each in a table, or a few lines each where that would squeeze the sentences.

    ``doubt`` is put before every sentence.
    """
    if not rows:
        return
    out = console()
    sentences = [Text(doubt + row.sentence) for row in rows]
    longest = max(sentence.cell_len for sentence in sentences)
    room = out.width - out.measure(_table(rows)).maximum - _GAP
    if room < min(_SENTENCE_ROOM, longest):
        display(out, *_blocks(rows, sentences))
    else:
        display(out, _table(rows, sentences))


def grade_text(grade: Grade) -> Text:
    """A grade in its colour."""
    return Text(grade.value, style=GRADE_STYLE[grade])


def _table(rows: Sequence[Row], sentences: Sequence[Text] = ()) -> Table:
    """The column for unknown tokens is there when a request has some, that for sentences when they are given."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("request")
    table.add_column("series")
    for name in _counts(rows, rows[0]):
        table.add_column(name, justify="right")
    table.add_column("grade")
    if sentences:
        table.add_column("sentence")
    for at, row in enumerate(rows):
        counts = _counts(rows, row).values()
        table.add_row(Text(row.request), Text(row.series), *counts, grade_text(row.grade), *sentences[at : at + 1])
    return table


def _blocks(rows: Sequence[Row], sentences: Sequence[Text]) -> Iterator[Text | Padding]:
    for row, sentence in zip(rows, sentences, strict=True):
        series = f" ({row.series})" if row.series else ""
        yield Text.assemble((row.request, "bold"), f"{series}: ", grade_text(row.grade))
        yield Padding(sentence, (0, 0, 0, 2))
        counts = ", ".join(f"{name} {count}" for name, count in _counts(rows, row).items())
        yield Padding(Text(counts, style="dim"), (0, 0, 0, 2))


def _counts(rows: Sequence[Row], row: Row) -> dict[str, str]:
    counts = {"prompt": row.prompt, "L1": row.l1, "L2": row.l2, "L3": row.l3, "recomputed": row.recomputed}
    if any(each.unknown for each in rows):
        counts["unknown"] = row.unknown
    return {name: "-" if count is None else str(count) for name, count in counts.items()}
