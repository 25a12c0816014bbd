"""From a client's record of a response to what the server itself claims about the request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvwitness.tracer.model import ServerReport
from kvwitness.tracer.protocol.record import RequestRecord


def report_of(record: RequestRecord) -> ServerReport | None:
    """The server's attribution in a response; None when the response carried none.

    SGLang leaves the details out when nothing was cached, before 0.5.9, and the storage part when there is
    no storage. What it left out stays None: it is not a zero that the server said.
    """
    details = record.cached_tokens_details or {}
    report = ServerReport(
        source="response",
        cached=_tokens(record.cached_tokens),
        device=_tokens(details.get("device")),
        host=_tokens(details.get("host")),
        storage=_tokens(details.get("storage")),
    )
    return report if report != ServerReport(source="response") else None


def reports_by_rid(records: Iterable[RequestRecord]) -> dict[str, ServerReport]:
    """The reports of all records that have one (of the last, when a client used a request id twice)."""
    found = ((record.rid, report_of(record)) for record in records)
    return {rid: report for rid, report in found if report is not None}


def _tokens(value: Any) -> int | None:
    """A token count, or None for anything that cannot be one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
