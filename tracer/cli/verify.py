"""``kvwitness verify``: is a bundle as it was written, and does its evidence say what it says?"""

from __future__ import annotations

from pathlib import Path

import click

from kvwitness.tracer.bundle.verify import verify_bundle
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.output import json_option, print_json
from kvwitness.tracer.spans.otlp_json import span_lines


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def verify(ctx: click.Context, bundle: Path, as_json: bool) -> None:
    """Check BUNDLE, a folder or a .zip: every file against its hash, every verdict against the evidence.

    Names each file that was changed, added or removed, the first verdict that the recorded events do not give,
    and spans that do not follow from them. The exit code is 0 when nothing is wrong, else 1.

    \b
    Example:
      kvwitness verify bundle.zip
    """
    with bundle_errors():
        report = verify_bundle(bundle, spans=span_lines)
    if as_json:
        print_json(report)
    else:
        for problem in report.problems:
            click.echo(str(problem))
        if report.ok:
            click.echo(f"ok: {report.files} files unchanged, {report.verdicts} verdicts follow from the evidence")
        else:
            count = len(report.problems)
            click.echo(f"NOT OK: {count} problem{'' if count == 1 else 's'} in {bundle}")
    ctx.exit(0 if report.ok else 1)
