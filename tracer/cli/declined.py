"""``kvwitness declined``: a host hit that the server reports and never loaded, on a real server."""

from __future__ import annotations

from pathlib import Path

import click

from kvwitness.tracer.bundle.rows import rows_of
from kvwitness.tracer.bundle.write import check_destination
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.errors import UserError, with_log
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.cli.table import print_requests
from kvwitness.tracer.demo.declined import run_declined, wrong_about_probe
from kvwitness.tracer.protocol.client import ServerUnavailable
from kvwitness.tracer.stand.building import StandBuildError
from kvwitness.tracer.stand.progress import reporting
from kvwitness.tracer.stand.releases import NEWEST, RELEASES
from kvwitness.tracer.stand.server import StandServerError


@click.command()
@click.option("--sglang", "release", type=click.Choice(list(RELEASES)), default="0.5.17", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/declined"), show_default=True)
@json_option
@click.pass_context
def declined(ctx: click.Context, release: str, out: Path, as_json: bool) -> None:
    """Make SGLang match six tokens in L2, decline to load them, and report them: the report is refuted.

    \b
    Example:
      kvwitness declined --sglang 0.5.17
    """
    with bundle_errors():
        check_destination(out, replace=True)
    try:
        with reporting() as progress, bundle_errors():
            result = run_declined(release, out, progress)
    except (StandBuildError, StandServerError) as error:
        raise with_log(error, "kvwitness declined") from error
    except ServerUnavailable as error:
        raise UserError(str(error), "kvwitness declined", "look at the server's log") from error
    wrong = wrong_about_probe(result.probe, capped=release == NEWEST)
    rows = [row for row in rows_of(result.bundle.verdicts, result.records) if row.series]
    checks = result.probe.checks if result.probe is not None else ()
    if as_json:
        print_json({"bundle": str(result.bundle.path), "not_as_expected": wrong, "requests": rows, "checks": checks})
    else:
        print_requests(rows)
        for check in checks:
            agrees = {True: "agrees", False: "DISAGREES", None: "not comparable"}[check.agrees]
            why = f" ({check.explanation})" if check.explanation else ""
            click.echo(f"{check.witness}: {agrees}: it says {check.theirs}, the events say {check.ours}{why}")
        click.echo(f"bundle: {result.bundle.path}")
    if wrong is not None:
        note(f"not as expected: {wrong}")
    ctx.exit(1 if wrong else 0)
