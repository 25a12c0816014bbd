"""``kvwitness export``: a bundle's spans, sent to an OTLP endpoint."""

from __future__ import annotations

from pathlib import Path

import click

from kvwitness.tracer.bundle.read import open_bundle
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.otlp import otlp_options
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.spans.export import export_bundle


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@otlp_options
@json_option
def export(bundle: Path, url: str, protocol: str, as_json: bool) -> None:
    """Send the spans of BUNDLE to an OTLP endpoint, Jaeger for example.

    \b
    Example:
      kvwitness export bundle --otlp http://127.0.0.1:4318
    """
    with bundle_errors():
        open_bundle(bundle)
        sent = export_bundle(bundle, url, protocol=protocol)
    if as_json:
        print_json({"bundle": str(bundle), "url": url, "spans": sent})
    else:
        note(f"sent {sent} spans to {url}")
