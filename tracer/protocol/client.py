"""The protocol runner's HTTP client for SGLang's native API. Proxies from the environment are never used.

What goes wrong with a request is part of the evidence, so it ends in the record and is not raised.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec

from kvwitness.collectors.metrics import MetricsSnapshot, fetch_metrics
from kvwitness.collectors.server_info import ServerInfo, fetch_server_info
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.protocol.workload import prompt_sha256

_LIBRARY_MARKS: Final = re.compile(r"\[[^]]*\] | \(_ssl\.c:\d+\)")
_BODY_CHARS: Final = 300
_HEALTH_TIMEOUT_S: Final = 30.0
"""SGLang's /health generates one token and itself waits up to 20 s for it."""


class ServerUnavailable(Exception):
    """The server cannot take requests; the message is one line for a person."""


class RequestInterrupted(KeyboardInterrupt):
    """Ctrl-C while a request was under way; ``record`` has what was seen of it."""

    def __init__(self, record: RequestRecord) -> None:
        super().__init__()
        self.record = record


class GenerateCall(msgspec.Struct, frozen=True):
    """One request to send: ``output_tokens`` greedy tokens for the prompt ``input_ids``."""

    rid: str
    series: str
    order: int
    input_ids: tuple[int, ...]
    output_tokens: int
    dp_rank: int | None = None
    """Data-parallel rank to send it to (None: the server chooses)."""
    keep_prompt: bool = False
    """Whether the record keeps the token ids."""


class FlushResult(msgspec.Struct, frozen=True):
    """The answer to a flush. ``ok``: the server says that the cache is empty now."""

    ok: bool
    status: int
    """HTTP status; 0 when there was no answer."""
    message: str
    wall_ns: int


class ServerClient:
    """Talks to one server. Use as a context manager, or call :meth:`close`.

    ``timeout_s`` bounds the silence between two pieces of an answer, not a whole answer.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 120.0,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
        self._client = httpx.Client(
            trust_env=False, timeout=timeout, transport=transport, headers=_authorization(api_key)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def check(self) -> None:
        """Make sure that the server answers requests. Raises :class:`ServerUnavailable` otherwise."""
        try:
            answer = self._client.get(f"{self.url}/health", timeout=_HEALTH_TIMEOUT_S)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerUnavailable(f"no server answers at {self.url} ({_unconnected(error)})") from error
        except httpx.TimeoutException as error:
            raise ServerUnavailable(f"the server at {self.url} did not answer /health in time") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnavailable(f"the server at {self.url} cannot be asked: {_words(error)}") from error
        if answer.status_code == 503:
            raise ServerUnavailable(f"the server at {self.url} is still starting, or not healthy (503)")
        if answer.status_code in (401, 403):
            raise ServerUnavailable(f"the server at {self.url} asks for an API key ({answer.status_code})")
        if answer.status_code == 404:
            raise ServerUnavailable(f"what answers at {self.url} is no SGLang server (it has no /health)")
        if answer.status_code != 200:
            raise ServerUnavailable(f"the server at {self.url} is not healthy: /health answers {answer.status_code}")

    def server_info(self) -> ServerInfo:
        """:func:`~kvwitness.collectors.server_info.fetch_server_info` over this connection."""
        return fetch_server_info(self.url, self._client)

    def metrics(self) -> MetricsSnapshot:
        """:func:`~kvwitness.collectors.metrics.fetch_metrics` over this connection."""
        return fetch_metrics(self.url, self._client)

    def generate(self, call: GenerateCall) -> RequestRecord:
        """Send one request and wait for its end. Never raises for what the server or the network does.

        Ctrl-C raises :class:`RequestInterrupted`, with what had been seen until then.
        """
        traceparent = new_traceparent()
        answer = _Answer()
        sent_ns, begin = time.time_ns(), time.monotonic()
        interrupt: KeyboardInterrupt | None = None
        try:
            self._stream(call, traceparent, answer, begin)
        except httpx.TimeoutException as error:
            answer.error = f"no answer in time ({type(error).__name__})"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            answer.error = f"the connection failed: {_unconnected(error)}"
        except KeyboardInterrupt as error:
            answer.error, interrupt = "interrupted by the user", error
        record = RequestRecord(
            rid=call.rid,
            series=call.series,
            order=call.order,
            prompt_tokens=len(call.input_ids),
            prompt_sha256=prompt_sha256(call.input_ids),
            sent_ns=sent_ns,
            ttft_s=answer.ttft_s,
            total_s=time.monotonic() - begin,
            status=answer.status,
            error=answer.problem(call.rid, len(call.input_ids)),
            traceparent=traceparent,
            output_ids=tuple(answer.output_ids),
            text=answer.text,
            finish_reason=answer.finish_reason,
            cached_tokens=answer.cached_tokens,
            cached_tokens_details=answer.cached_tokens_details,
            prompt_ids=call.input_ids if call.keep_prompt else (),
        )
        if interrupt is not None:
            raise RequestInterrupted(record) from interrupt
        return record

    def _stream(self, call: GenerateCall, traceparent: str, answer: _Answer, begin: float) -> None:
        headers = {"traceparent": traceparent}
        with self._client.stream("POST", f"{self.url}/generate", json=_body(call), headers=headers) as response:
            answer.status = response.status_code
            if answer.status == 200:
                for line in response.iter_lines():
                    answer.take(line, time.monotonic() - begin)
            else:
                response.read()
                answer.error = f"HTTP {answer.status}: {response.text[:_BODY_CHARS]}"

    def flush_cache(self, idle_s: float = 30.0) -> FlushResult:
        """Empty the server's L1 and L2. Waits up to ``idle_s`` for running requests; storage keeps its pages."""
        headers = _authorization(self._admin_api_key)
        try:
            answer = self._client.post(
                f"{self.url}/flush_cache", params={"timeout": idle_s}, headers=headers, timeout=idle_s + 30.0
            )
        except httpx.HTTPError as error:
            return FlushResult(False, 0, _words(error), time.time_ns())
        message = answer.text.strip()[:_BODY_CHARS]
        return FlushResult(answer.status_code == 200, answer.status_code, message, time.time_ns())


def new_traceparent() -> str:
    """A W3C trace context of its own: version 00, random trace and span id (never all zero), sampled."""
    trace = secrets.randbits(128) or 1
    span = secrets.randbits(64) or 1
    return f"00-{trace:032x}-{span:016x}-01"


class _Answer:
    """What has been read of one event stream."""

    def __init__(self) -> None:
        self.status = 0
        """HTTP status; 0 when there was no answer."""
        self.error: str | None = None
        self.ttft_s: float | None = None
        self.output_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.cached_tokens: int | None = None
        self.cached_tokens_details: dict[str, Any] | None = None
        self.id: str | None = None
        self.prompt_tokens: int | None = None

    def take(self, line: str, elapsed_s: float) -> None:
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.error = self.error or "the event stream is damaged"
            return
        if "error" in event:
            self.error = _error_text(event["error"])
            return
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            self.error = self.error or "an event carries no meta_info"
            return
        self._take_output(event, meta)
        if self.ttft_s is None and (self.output_ids or self.text or meta.get("completion_tokens")):
            self.ttft_s = elapsed_s
        self._take_meta(meta)

    def _take_output(self, event: dict[str, Any], meta: dict[str, Any]) -> None:
        ids, text = event.get("output_ids") or [], event.get("text") or ""
        completed = meta.get("completion_tokens")
        # Servers started with --incremental-streaming-output send only what is new in each event.
        incremental = isinstance(completed, int) and ids and len(ids) < completed
        if incremental and len(self.output_ids) + len(ids) == completed:
            self.output_ids.extend(ids)
            self.text += text
        else:
            self.output_ids = list(ids) or self.output_ids
            self.text = text or self.text

    def _take_meta(self, meta: dict[str, Any]) -> None:
        self.id = meta.get("id", self.id)
        self.prompt_tokens = meta.get("prompt_tokens", self.prompt_tokens)
        self.cached_tokens = meta.get("cached_tokens", self.cached_tokens)
        details = meta.get("cached_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens_details = details
        finish = meta.get("finish_reason")
        if isinstance(finish, dict):
            self.finish_reason = str(finish.get("type"))
            if self.finish_reason == "abort":
                self.error = f"aborted by the server: {finish.get('message') or 'no reason given'}"[:_BODY_CHARS]
        elif finish is not None:
            self.finish_reason = str(finish)

    def problem(self, rid: str, prompt_tokens: int) -> str | None:
        """Why this answer cannot be used, or None."""
        if self.error is not None:
            return self.error
        if self.finish_reason is None:
            return "the stream ended before the request was finished"
        if self.id not in (None, rid):
            return f"the server answered for request {self.id}"
        if self.prompt_tokens not in (None, prompt_tokens):
            return f"the server counted {self.prompt_tokens} prompt tokens where {prompt_tokens} were sent"
        return None


def _body(call: GenerateCall) -> dict[str, Any]:
    body: dict[str, Any] = {
        "rid": call.rid,
        "input_ids": list(call.input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": call.output_tokens, "ignore_eos": True},
        "stream": True,
    }
    if call.dp_rank is not None:
        # The first name is the current one, the second that of older releases; each ignores or maps the other.
        body["routed_dp_rank"] = body["data_parallel_rank"] = call.dp_rank
    return body


def _authorization(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return f"refused by the server: {message}"[:_BODY_CHARS]


def _unconnected(error: Exception) -> str:
    """Why there is no connection, without error numbers and the library's own places."""
    words = _words(error)
    if "WRONG_VERSION_NUMBER" in words:
        return "it speaks http, and not https"
    return _LIBRARY_MARKS.sub("", words)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
