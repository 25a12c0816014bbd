"""``kvwitness matrix``: the demo on every release that the CPU stand runs, or under every setting of the newest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvwitness.tracer.cli.output import console, display, json_option, note, print_json
from kvwitness.tracer.demo.matrix import MatrixRow, run_matrix
from kvwitness.tracer.demo.settings import SETTINGS, SettingRow, run_settings
from kvwitness.tracer.stand.progress import reporting
from kvwitness.tracer.stand.releases import RELEASES


@click.command()
@click.option("--sglang", "releases", multiple=True, type=click.Choice(list(RELEASES)), help="[default: all of them]")
@click.option("--settings", is_flag=True, help="Every setting of the newest release that a CPU can run instead.")
@click.option("--setting", "names", multiple=True, type=click.Choice(list(SETTINGS)), help="Only this setting.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/matrix"), show_default=True)
@json_option
@click.pass_context
def matrix(
    ctx: click.Context, releases: tuple[str, ...], settings: bool, names: tuple[str, ...], out: Path, as_json: bool
) -> None:
    """Run A, B, eviction and C on several SGLang releases; exit 1 unless every one gives the right verdicts.

    \b
    Example:
      kvwitness matrix --sglang 0.5.17 --sglang 0.5.8
      kvwitness matrix --settings
      kvwitness matrix --setting write_back --setting page-64
    """
    if settings or names:
        if releases:
            raise click.UsageError("--settings is about the newest release: leave --sglang out")
        ctx.exit(_settings(names or tuple(SETTINGS), out, as_json))
    rows: list[MatrixRow] = []
    with reporting() as progress:
        for row in run_matrix(releases or tuple(RELEASES), out, progress):
            rows.append(row)
            if not as_json:
                note(f"{row.release}: {'as it should be' if row.right else row.error or row.sentences}")
    if as_json:
        print_json(rows)
    else:
        print_releases(rows)
    ctx.exit(0 if rows and all(row.right for row in rows) else 1)


def _settings(names: Sequence[str], out: Path, as_json: bool) -> int:
    rows: list[SettingRow] = []
    with reporting() as progress:
        for row in run_settings(names, out, progress):
            rows.append(row)
            if not as_json:
                note(f"{row.setting}: {'as it should be' if row.right else row.refused or row.error or row.sentences}")
    if as_json:
        print_json(rows)
    else:
        print_settings(rows)
    return 0 if rows and all(row.right or row.refused for row in rows) else 1


def print_settings(rows: Sequence[SettingRow], judged: Mapping[str, str] | None = None) -> None:
    """Print each setting with its sentences. ``judged``: somebody else's word on each, by setting."""
    lines: list[Text | Padding] = []
    for row in rows:
        lines.append(Text(f"{row.setting} (SGLang: {row.effective})" if row.effective else row.setting))
        told: dict[str, str] = {name: row.sentences[name] for name in ("A", "B", "C") if name in row.sentences}
        if row.same_tokens is not None:
            told["C's answer"] = "the same" if row.same_tokens else "NOT THE SAME"
        told |= {"refused by SGLang": row.refused} if row.refused else {}
        told |= {"error": row.error} if row.error else {}
        told |= {"oracle": judged[row.setting]} if judged and row.setting in judged else {}
        lines += [Padding(Text(f"{name}: {value}"), (0, 0, 0, 2)) for name, value in told.items()]
    display(console(), *lines)


def print_releases(rows: Sequence[MatrixRow]) -> None:
    """Print a line for each release, or a few where the table would be folded."""
    out = console()
    table = _table(rows)
    display(out, *([table] if out.measure(table).maximum < out.width else _blocks(rows)))


def _cells(row: MatrixRow) -> dict[str, str]:
    if row.error:
        return {"error": row.error}
    return {
        "tree": row.tree_class,
        "core": row.tree_core,
        "hooks": str(row.installed),
        "not understood": str(len(row.not_understood)),
        "missing": str(len(row.missing)),
        **{series: row.sentences.get(series, "-") for series in ("A", "B", "C")},
        "C = A": {True: "yes", False: "NO", None: "-"}[row.same_tokens],
    }


def _table(rows: Sequence[MatrixRow]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    cells = [_cells(row) for row in rows]
    names = dict.fromkeys(name for each in cells for name in each)
    for name in ("SGLang", *names):
        table.add_column(name)
    for row, each in zip(rows, cells, strict=True):
        table.add_row(row.release, *(Text(each.get(name, "-")) for name in names))
    return table


def _blocks(rows: Sequence[MatrixRow]) -> Iterator[Text | Padding]:
    for row in rows:
        cells = _cells(row)
        told = {name: cells.pop(name) for name in ("A", "B", "C", "error") if name in cells}
        yield Text(f"SGLang {row.release}" + "".join(f", {name} {value}" for name, value in cells.items()))
        for name, value in told.items():
            yield Padding(Text(f"{name}: {value}"), (0, 0, 0, 2))
