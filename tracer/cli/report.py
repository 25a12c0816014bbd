"""``kvwitness report``: a bundle as one page for people."""

from __future__ import annotations

from pathlib import Path

import click

from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.report.load import load_evidence
from kvwitness.tracer.report.messages import LANGUAGES, words_for
from kvwitness.tracer.report.page import build_page
from kvwitness.tracer.report.render import FORMATS, render_html, render_markdown

_RENDER = {"html": render_html, "md": render_markdown}


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: BUNDLE.report.html or .md]")
@click.option("--format", "kind", type=click.Choice(FORMATS), default="html", show_default=True)
@click.option("--lang", "language", type=click.Choice(LANGUAGES), default="en", show_default=True)
@json_option
@click.pass_context
def report(ctx: click.Context, bundle: Path, out: Path | None, kind: str, language: str, as_json: bool) -> None:
    """Write a report about BUNDLE: what is claimed and what is not, and on what it rests.

    An HTML report is one file that loads nothing; a Markdown report is for issues and wikis. The same bundle gives
    the same report. The exit code is 1 for a bundle that does not verify, and the report then says so on top.

    \b
    Example:
      kvwitness report bundle --out report.html
    """
    target = out or bundle.with_name(f"{bundle.name}.report.{kind}")
    with bundle_errors():
        evidence = load_evidence(bundle)
    if bundle.is_dir() and target.resolve().is_relative_to(bundle.resolve()):
        raise UserError("a file there would change the bundle", str(target), "name a place outside the bundle")
    words = words_for(language)
    page = build_page(evidence, words)
    text = _RENDER[kind](page, words)
    try:
        target.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(
            f"the report cannot be written ({error.strerror or error})", str(target), "name another place with --out"
        ) from error
    if as_json:
        print_json(
            {
                "bundle": str(bundle),
                "report": str(target),
                "format": kind,
                "language": language,
                "intact": evidence.intact,
                "standing": page.outcome.standing,
                "grade": page.outcome.grade,
                "claim": page.claim.sentence,
            }
        )
    else:
        click.echo(f"{page.claim.sentence}{f' ({page.claim.grade})' if page.claim.grade else ''}")
        click.echo(f"report: {target}")
    if not evidence.intact:
        note(f"error: {bundle}: this bundle does not verify ({evidence.problems[0]}); see `kvwitness verify {bundle}`")
    ctx.exit(0 if evidence.intact else 1)
