"""``kvwitness show``: the table of all requests."""

from __future__ import annotations

from pathlib import Path

import click

from kvwitness.tracer.bundle.rows import rows_of
from kvwitness.tracer.cli.evidence import load_evidence
from kvwitness.tracer.cli.output import json_option, print_json
from kvwitness.tracer.cli.table import print_requests


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def show(ctx: click.Context, path: Path, as_json: bool) -> None:
    """Show every request in PATH: a bundle, or the folder that a server records into (also while it runs).

    The exit code is 1 for a bundle that does not verify, and every sentence then says so.

    \b
    Example:
      kvwitness show kvwitness-data/20260102-030405
    """
    evidence = load_evidence(path)
    rows = rows_of(evidence.verdicts, evidence.requests)
    if as_json:
        print_json({"path": evidence.path, "intact": evidence.intact, "requests": rows})
    elif rows:
        print_requests(rows, doubt=evidence.doubt)
    else:
        click.echo(f"no requests yet in {path}")
    ctx.exit(1 if evidence.intact is False else 0)
