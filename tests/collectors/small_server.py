"""An HTTP server with fixed answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self

from http_tools import QuietServer


class SmallServer:
    """Answers GET with ``answers[path]`` (status, text), everything else with 404; ``asked`` has the paths."""

    def __init__(self, answers: dict[str, tuple[int, str]]) -> None:
        self.asked: list[str] = []
        small = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                small.asked.append(self.path)
                status, text = answers.get(self.path, (404, "Not Found"))
                body = text.encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self._http = QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
