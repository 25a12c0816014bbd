"""``kvwitness matrix``: the demo on every release that the CPU stand runs."""

from __future__ import annotations

from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvwitness.tracer.cli.output import console, display, json_option, note, print_json
from kvwitness.tracer.demo.matrix import MatrixRow, run_matrix
from kvwitness.tracer.stand.progress import reporting
from kvwitness.tracer.stand.releases import RELEASES


@click.command()
@click.option("--sglang", "releases", multiple=True, type=click.Choice(list(RELEASES)), help="[default: all of them]")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/matrix"), show_default=True)
@json_option
@click.pass_context
def matrix(ctx: click.Context, releases: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Run A, B, eviction and C on several SGLang releases; exit 1 unless every one gives the right verdicts.

    \b
    Example:
      kvwitness matrix --sglang 0.5.17 --sglang 0.5.8
    """
    rows: list[MatrixRow] = []
    with reporting() as progress:
        for row in run_matrix(releases or tuple(RELEASES), out, progress):
            rows.append(row)
            if not as_json:
                note(f"{row.release}: {'as it should be' if row.right else row.error or row.sentences}")
    if as_json:
        print_json(rows)
    else:
        display(console(), _table(rows))
    ctx.exit(0 if rows and all(row.right for row in rows) else 1)


def _table(rows: list[MatrixRow]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("SGLang", "tree", "core", "hooks", "not understood", "missing", "A", "B", "C", "C = A"):
        table.add_column(name, overflow="fold")
    for row in rows:
        if row.error:
            table.add_row(row.release, "-", "-", "-", "-", "-", row.error, "-", "-", "-")
            continue
        same = {True: "yes", False: "NO", None: "-"}[row.same_tokens]
        sentences = [row.sentences.get(series, "-") for series in ("A", "B", "C")]
        counts = (str(row.installed), str(len(row.not_understood)), str(len(row.missing)))
        table.add_row(row.release, row.tree_class, row.tree_core, *counts, *sentences, same)
    return table
