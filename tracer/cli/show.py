"""``kvwitness show``: the table of all requests."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from kvwitness.tracer.bundle.rows import Row, rows_of
from kvwitness.tracer.cli.evidence import load_evidence, load_outside
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.cli.outside import show_outside
from kvwitness.tracer.cli.table import print_requests
from kvwitness.tracer.outside.records import is_recording
from kvwitness.tracer.verdicts.recorded import about_the_recording

_HEALTH_CHECK: Final = "HEALTH_CHECK"
"""How the ids begin that SGLang gives to its own health checks."""


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--all", "with_health_checks", is_flag=True, help="Also the server's own health checks.")
@json_option
@click.pass_context
def show(ctx: click.Context, path: Path, with_health_checks: bool, as_json: bool) -> None:
    """Show the requests in PATH: a bundle, or the folder that a server records into (also while it runs).

    What was recorded from outside is shown as well, also from a recording that was not finished.

    Requests that SGLang sends itself to see whether it is healthy are left out and counted, except with --all
    and in --json. The exit code is 1 for a bundle that does not verify, and every sentence then says so.

    \b
    Example:
      kvwitness show kvwitness-data/20260102-030405
    """
    if is_recording(path) and (recorded := load_outside(path)) is not None:
        show_outside(recorded, str(path), as_json)
        return
    evidence = load_evidence(path)
    outside = load_outside(path)
    rows = rows_of(evidence.verdicts, evidence.requests)
    if as_json:
        more = {} if outside is None else {"outside": outside}
        storage = list(evidence.storage)
        print_json(
            {
                "path": evidence.path,
                "intact": evidence.intact,
                "requests": rows,
                "storage": storage,
                "leaks": list(evidence.leaks),
                **more,
            }
        )
    else:
        shown = [row for row in rows if with_health_checks or not is_health_check(row)]
        if shown:
            print_requests(shown, doubt=evidence.doubt)
        elif outside is None:
            click.echo(f"no requests yet in {path}")
        if outside is not None:
            show_outside(outside, str(path), False, evidence.doubt)
        for line in (*evidence.storage, *evidence.leaks):
            note(line)
        if count := len(rows) - len(shown):
            note(f"left out: {count} health check{'' if count == 1 else 's'} of the server itself (--all shows them)")
        for text in about_the_recording(evidence.verdicts):
            note(text)
    ctx.exit(1 if evidence.intact is False else 0)


def is_health_check(row: Row) -> bool:
    """Whether a request is one that SGLang sends itself."""
    return not row.series and row.request.startswith(_HEALTH_CHECK)
