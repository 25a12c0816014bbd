"""W3C trace contexts as clients send them."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_FORM: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


class ClientContext(NamedTuple):
    """The client's span that a request continues."""

    trace_id: str
    span_id: str
    sampled: bool


def parse_traceparent(text: str | None) -> ClientContext | None:
    """The context in a ``traceparent`` header; None when there is none, or none that the standard accepts."""
    match = _FORM.fullmatch(text.strip()) if text else None
    if match is None:
        return None
    version, trace, span = match["version"], match["trace"], match["span"]
    # Later versions may append fields, version 00 may not; ff and ids of zeros are invalid.
    if version == "ff" or (version == "00" and match["more"]) or not trace.strip("0") or not span.strip("0"):
        return None
    return ClientContext(trace, span, bool(int(match["flags"], 16) & 1))
