"""``kvwitness jaeger``: a bundle's traces in a Jaeger of its own, on loopback and in memory."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

from kvwitness.tracer.bundle.read import Bundle, open_bundle
from kvwitness.tracer.bundle.rows import one_of_series
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.errors import UserError, with_log
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.export import bundle_spans, export_bundle
from kvwitness.tracer.spans.jaeger import JaegerError, JaegerProcess, JaegerUnavailable, find_or_build_jaeger
from kvwitness.tracer.spans.spec import SpanSpec


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--module",
    type=click.Path(path_type=Path),
    default=Path("tests/jaeger"),
    show_default=True,
    help="Go module that Jaeger is built from when JAEGER_BIN does not name one.",
)
@click.option("--no-wait", is_flag=True, help="End at once instead of staying up until Ctrl-C.")
@json_option
def jaeger(bundle: Path, module: Path, no_wait: bool, as_json: bool) -> None:
    """Start Jaeger, send it the spans of BUNDLE, print where to find each request, stay up until Ctrl-C.

    \b
    Example:
      kvwitness jaeger out/demo
    """
    with bundle_errors():
        opened = open_bundle(bundle)
        spans = bundle_spans(bundle)
    try:
        program = find_or_build_jaeger(note, module)
        with JaegerProcess(program) as process:
            with bundle_errors():
                sent = export_bundle(bundle, process.otlp_http)
            links = dict(_links(opened, spans, process.query_url))
            if as_json:
                print_json({"spans": sent, "query": process.query_url, "traces": links})
            else:
                note(f"sent {sent} spans")
                for name, link in links.items():
                    click.echo(f"{name:<14} {link}")
                click.echo(f"{'web page':<14} {process.query_url}/search?service=sglang")
                click.echo(f"{'OTLP/HTTP':<14} {process.otlp_http}")
            if not no_wait:
                note("Jaeger stays up until Ctrl-C")
                _wait_for_interrupt()
            elif not as_json:
                note("Jaeger has ended; without --no-wait it stays up, and these links with it")
    except JaegerUnavailable as error:
        if error.log:
            note(error.log)
        raise UserError(error.what, "kvwitness jaeger", error.what_to_do) from error
    except JaegerError as error:
        raise with_log(error, "kvwitness jaeger") from error


def _links(bundle: Bundle, spans: list[SpanSpec], query_url: str) -> Iterator[tuple[str, str]]:
    """The trace of each of the protocol's requests, and the traces of the instance's cache."""
    by_rid = {span.attributes.get(sc.RID): span for span in spans if span.name == sc.REQUEST}
    for series in ("A", "B", "C"):
        record = one_of_series(bundle.requests, series)
        span = by_rid.get(record.rid) if record is not None else None
        if span is not None:
            yield f"request {series}", f"{query_url}/trace/{span.ref.trace_id}"
    for span in spans:
        if span.name == sc.EPOCH:
            yield f"cache, epoch {span.attributes[sc.EPOCH_INDEX]}", f"{query_url}/trace/{span.ref.trace_id}"


def _wait_for_interrupt() -> None:
    stop = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
