"""An HTTP server for tests that call the command in their own process."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    """Says nothing of a client that has hung up.

    The standard library's writes a traceback to ``sys.stderr`` from its own thread, whenever that gets there: a test
    that compares what a command wrote would find it in between.
    """

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
