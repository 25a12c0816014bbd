"""``kvwitness collect``: spans of a running server, sent as its requests finish."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from kvwitness.tracer.bundle.places import bundles_within, is_bundle_folder, recorded_journals
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.otlp import otlp_options
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.spans.export import collect_live
from kvwitness.tracer.spans.live import INTERVAL_S
from kvwitness.tracer.spans.probe import endpoint_problem


@click.command()
@click.option("--dir", "directory", required=True, type=click.Path(path_type=Path), help="Where the server records.")
@otlp_options
@click.option(
    "--interval", "interval_s", type=float, default=INTERVAL_S, show_default=True, help="Between looks, in s."
)
@json_option
def collect(directory: Path, url: str, protocol: str, interval_s: float, as_json: bool) -> None:
    """Follow the journals of a running server and send the spans of each request, until interrupted.

    Says at the start which journals it follows; a server that starts to record later is followed as well.

    \b
    Example:
      kvwitness collect --dir kvwitness-data/20260102-030405 --otlp http://127.0.0.1:4318
    """
    if not directory.is_dir():
        raise UserError("there is no such folder", str(directory), "name the folder that `kvwitness serve` printed")
    if is_bundle_folder(directory):
        raise UserError("it is a bundle, not a server's folder", str(directory), "`kvwitness export` sends its spans")
    _announce(directory, url, protocol)
    sent = collect_live(directory, url, protocol=protocol, interval_s=interval_s)
    if as_json:
        print_json({"directory": str(directory), "url": url, "spans": sent})
    else:
        note(f"sent {sent} spans to {url}")


def _announce(directory: Path, url: str, protocol: str) -> None:
    """What is followed and where to, and what is odd about either; none of it keeps the collector from waiting."""
    note(f"following {_found(directory)}; spans go to {url} over {protocol}, until Ctrl-C")
    problem = endpoint_problem(url, protocol)
    if problem is not None:
        note(f"warning: {url}: {problem.what}; {problem.what_to_do}")


def _found(directory: Path) -> str:
    folders = Counter(path.parent for path in recorded_journals(directory))
    if not folders:
        held = ", it holds bundles (`kvwitness export` sends theirs)" if bundles_within(directory) else ""
        return f"{directory}: no journals there yet{held}, waiting for a server that records into it"
    return " and ".join(f"{folder} ({count} journal{'s' if count > 1 else ''})" for folder, count in folders.items())
