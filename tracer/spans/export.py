"""Send spans to an OTLP endpoint: of a bundle, or of a running server. What ``export`` and ``collect`` call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvwitness.tracer import judgement
from kvwitness.tracer.addresses import is_web_address
from kvwitness.tracer.bundle.counters import window_of
from kvwitness.tracer.bundle.read import open_bundle, read_bundle_journals, read_bundle_metrics
from kvwitness.tracer.bundle.reports import reports_by_rid
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.spans import live
from kvwitness.tracer.spans.build import build_spans
from kvwitness.tracer.spans.live import INTERVAL_S, Stop
from kvwitness.tracer.spans.probe import PORTS, endpoint_problem
from kvwitness.tracer.spans.sender import TIMEOUT_S, Sender, SendError, batches
from kvwitness.tracer.spans.spec import SpanSpec

Progress = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Progress for people."""
    print(line, file=sys.stderr, flush=True)


def export_bundle(
    bundle: Path, url: str, *, protocol: str = "http", timeout_s: float = TIMEOUT_S, progress: Progress | None = None
) -> int:
    """Send the spans of a bundle to ``url`` and return how many there were.

    They are derived from the bundle's journals, so a bundle that was written without spans has them as well.
    Raises :class:`UserError` when the endpoint does not take them, and ``BundleError``.
    """
    _check_endpoint(url, protocol)
    spans = bundle_spans(bundle)
    sent = 0
    try:
        with Sender(url, protocol, timeout_s=timeout_s) as sender:
            for batch in batches(spans):
                sender.send(batch)
                sent += len(batch)
                if progress is not None:
                    progress(f"{sent} of {len(spans)} spans sent")
    except SendError as error:
        what = f"{sent} of {len(spans)} spans were sent: {error}" if sent else f"no span was sent: {error}"
        raise _user_error(what, url, protocol) from error
    return sent


def bundle_spans(bundle: Path) -> list[SpanSpec]:
    """The spans of a bundle, as :mod:`~kvwitness.tracer.spans.otlp_json` writes them, with the machine's name."""
    journals = read_bundle_journals(bundle)
    records = open_bundle(bundle).requests
    judged = judgement.judge(journals, reports_by_rid(records), window_of(read_bundle_metrics(bundle)))
    return build_spans(judged, records, live.hosts_of(journals))


def collect_live(
    directory: Path,
    url: str,
    *,
    protocol: str = "http",
    interval_s: float = INTERVAL_S,
    stop: Stop | None = None,
    progress: Progress | None = to_stderr,
) -> int:
    """Follow the journals below ``directory`` and send spans until ``stop`` or Ctrl-C; return how many arrived.

    Raises :class:`UserError` when ``url`` cannot be an endpoint, and when spans are left at the end that the
    endpoint did not take. An endpoint that is down meanwhile is tried again.
    """
    try:
        with Sender(url, protocol, timeout_s=live.SEND_TIMEOUT_S) as sender:
            result = live.follow(directory, sender, interval_s=interval_s, stop=stop, progress=progress)
    except SendError as error:
        raise _user_error(str(error), url, protocol) from error
    if result.unsent:
        what = f"{result.sent} spans were sent, {result.unsent} were not: {result.problem}"
        raise _user_error(what, url, protocol)
    return result.sent


def _check_endpoint(url: str, protocol: str) -> None:
    if is_web_address(url) and (problem := endpoint_problem(url, protocol)) is not None:
        raise UserError(f"no span was sent: {problem.what}", url, problem.what_to_do)


def _user_error(what: str, url: str, protocol: str) -> UserError:
    other = "grpc" if protocol == "http" else "http"
    return UserError(
        what, url, f"check that it is an OTLP endpoint for {protocol} ({PORTS}), or use --protocol {other}"
    )


__all__: Sequence[str] = ["bundle_spans", "collect_live", "export_bundle"]
