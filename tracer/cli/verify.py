"""``kvwitness verify``: is a bundle as it was written, does its evidence say what it says, and who signed it?"""

from __future__ import annotations

from pathlib import Path

import click

from kvwitness.tracer.bundle.signing import Outcome, SignatureCheck, read_public_key
from kvwitness.tracer.bundle.source import ProblemKind
from kvwitness.tracer.bundle.verify import VerifyReport, verify_bundle
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.output import json_option, print_json
from kvwitness.tracer.spans.otlp_json import span_lines


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--key", "key_file", type=click.Path(path_type=Path), help="Public key (PEM) that has to have signed it.")
@json_option
@click.pass_context
def verify(ctx: click.Context, bundle: Path, key_file: Path | None, as_json: bool) -> None:
    """Check BUNDLE, a folder or a .zip: every file against its hash, every verdict against the evidence.

    Names each file that was changed, added or removed, the first verdict that the recorded events do not give,
    and spans that do not follow from them. With --key it has to be signed by that key, too: an unsigned bundle,
    another key and a statement that was changed are told apart. The exit code is 0 when nothing is wrong, else 1.

    \b
    Example:
      kvwitness verify bundle.zip
      kvwitness verify bundle.zip --key me.pem.pub
    """
    with bundle_errors():
        key = read_public_key(key_file) if key_file is not None else None
        report = verify_bundle(bundle, spans=span_lines, key=key)
    if as_json:
        print_json(report)
    else:
        for problem in report.problems:
            click.echo(str(problem))
        if (line := _signature_line(report, report.signature)) is not None:
            click.echo(line)
        if report.ok:
            click.echo(f"ok: {report.files} files unchanged, {report.verdicts} verdicts follow from the evidence")
        else:
            count = len(report.problems)
            click.echo(f"NOT OK: {count} problem{'' if count == 1 else 's'} in {bundle}")
    ctx.exit(0 if report.ok else 1)


def _signature_line(report: VerifyReport, found: SignatureCheck | None) -> str | None:
    """What is not a problem is said, too: a valid signature of a bundle that was changed is no contradiction."""
    if found is not None and found.outcome is Outcome.NOT_CHECKED:
        return f"signature not checked: {found.detail}; --key KEY.pub checks it"
    if found is None or found.outcome is not Outcome.VALID:
        return None
    if changed := len({problem.path for problem in report.problems if problem.kind is not ProblemKind.VERDICT}):
        files = "1 file is" if changed == 1 else f"{changed} files are"
        return f"signature valid: {found.detail}, but {files} not as signed"
    return f"signature valid: {found.detail}"
