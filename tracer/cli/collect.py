"""``kvwitness collect``: spans of a running server, sent as its requests finish."""

from __future__ import annotations

from pathlib import Path

import click

from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.otlp import otlp_options
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.spans.export import collect_live
from kvwitness.tracer.spans.live import INTERVAL_S


@click.command()
@click.option("--dir", "directory", required=True, type=click.Path(path_type=Path), help="Where the server records.")
@otlp_options
@click.option(
    "--interval", "interval_s", type=float, default=INTERVAL_S, show_default=True, help="Between looks, in s."
)
@json_option
def collect(directory: Path, url: str, protocol: str, interval_s: float, as_json: bool) -> None:
    """Follow the journals of a running server and send the spans of each request, until interrupted.

    \b
    Example:
      kvwitness collect --dir kvwitness-data/20260102-030405 --otlp http://127.0.0.1:4318
    """
    if not directory.is_dir():
        raise UserError("there is no such folder", str(directory), "name the folder that `kvwitness serve` printed")
    sent = collect_live(directory, url, protocol=protocol, interval_s=interval_s)
    if as_json:
        print_json({"directory": str(directory), "url": url, "spans": sent})
    else:
        note(f"sent {sent} spans to {url}")
