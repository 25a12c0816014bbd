"""Ask an OTLP endpoint what it speaks before spans are sent: the exporters retry for long and then say little."""

from __future__ import annotations

import socket
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from requests.utils import get_environ_proxies

from kvwitness.tracer.addresses import is_loopback_name

TIMEOUT_S: Final = 2.0
"""For the connection, and again for the first bytes of an answer."""

PORTS: Final = "by custom 4318 is HTTP and 4317 is gRPC"

_NAMES: Final = {"http": "HTTP", "grpc": "gRPC"}
_SETTINGS: Final = 4
"""Type of the frame with which an HTTP/2 server, and so a gRPC one, begins; the fourth byte of a frame."""
_HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))


class EndpointProblem(NamedTuple):
    """Why no span will get through, and what the user can do about it."""

    what: str
    what_to_do: str


def endpoint_problem(url: str, protocol: str) -> EndpointProblem | None:
    """Ask ``url``, where ``protocol`` (``http`` or ``grpc``) is to be spoken; None when nothing is known.

    Nothing is known where the way leads through a proxy, and of an endpoint that takes its time.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or {"http": 80, "https": 443}[parts.scheme]
    if not is_loopback_name(host) and get_environ_proxies(url):
        return None
    try:
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            return _spoken(connection, host, protocol) if parts.scheme == "http" else None
    except socket.gaierror:
        what = f"there is no host {host!r}"
    except TimeoutError:
        what = f"nothing answers on port {port}"
    except OSError as error:
        what = f"nothing listens on port {port} ({(error.strerror or str(error)).lower()})"
    return EndpointProblem(what, f"start an OTLP endpoint there, or correct the address ({PORTS})")


def _spoken(connection: socket.socket, host: str, protocol: str) -> EndpointProblem | None:
    hello = f"OPTIONS /v1/traces HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    try:
        connection.sendall(hello if protocol == "http" else _HTTP2_HELLO)
        answer = connection.recv(16)
    except TimeoutError:
        return None
    except OSError:  # it hung up on what it does not understand
        answer = b""
    spoken = "grpc" if answer[3:4] == bytes((_SETTINGS,)) else "http" if answer.startswith((b"HTTP/", b"<")) else None
    if spoken == protocol:
        return None
    name = _NAMES[protocol]
    if spoken is None:
        return EndpointProblem(f"it does not speak {name}", f"name the port of an OTLP endpoint ({PORTS})")
    return EndpointProblem(
        f"it speaks {_NAMES[spoken]}, and not {name}", f"use --protocol {spoken}, or its port for {name} ({PORTS})"
    )
