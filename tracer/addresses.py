"""Which texts are addresses of HTTP servers."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_web_address(text: str) -> bool:
    """Whether ``text`` is like http://127.0.0.1:30000: a scheme, a host, perhaps a port and a path."""
    if not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no port, or brackets without their other half
        return False


def is_loopback_name(host: str) -> bool:
    """Whether ``host`` is this machine as it calls itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
