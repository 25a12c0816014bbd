"""The protocol runner's HTTP client for SGLang's endpoints. Proxies from the environment are never used.

What goes wrong with a request is part of the evidence, so it ends in the record and is not raised.
"""

from __future__ import annotations

import re
import secrets
import time
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec
import psutil

from kvwitness.collectors.environment import ProcessIdentity, server_identity
from kvwitness.collectors.metrics import MetricsSnapshot, fetch_metrics
from kvwitness.collectors.server_info import ServerInfo, fetch_server_info
from kvwitness.tracer.protocol.answers import BODY_CHARS, Answer, NativeAnswer, OpenAiAnswer
from kvwitness.tracer.protocol.options import Api
from kvwitness.tracer.protocol.prompts import Prompt
from kvwitness.tracer.protocol.quality import compare
from kvwitness.tracer.protocol.record import RequestRecord

INTERRUPTED: Final = "interrupted by the user"
"""The error of a request that was under way."""
_LIBRARY_MARKS: Final = re.compile(r"\[[^]]*\] | \(_ssl\.c:\d+\)")
_PATHS: Final = {
    Api.GENERATE: "/generate",
    Api.COMPLETIONS: "/v1/completions",
    Api.CHAT: "/v1/chat/completions",
}
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
    """One request to send: ``output_tokens`` greedy tokens for ``prompt``, fewer where the model ends before."""

    rid: str
    series: str
    order: int
    prompt: Prompt
    output_tokens: int
    dp_rank: int | None = None
    """Data-parallel rank to send it to (None: the server chooses)."""
    keep_prompt: bool = False
    """Whether the record keeps the token ids."""
    api: Api = Api.GENERATE
    model: str = "default"
    """Name of the model, for the endpoints that ask for one."""
    round: int | None = None
    prefix_tokens: int | None = None


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

    def identity(self) -> tuple[ProcessIdentity, ...]:
        """:func:`~kvwitness.collectors.environment.server_identity` of this server; empty for one that goes away."""
        try:
            return server_identity(self.url)
        except psutil.Error:
            return ()

    def count_tokens(self, text: str) -> int | None:
        """How many tokens the server makes of ``text``; None where it does not tell (/tokenize came with 0.5.7)."""
        try:
            answer = self._client.post(f"{self.url}/tokenize", json={"model": "default", "prompt": text})
            count = answer.json().get("count") if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return count if isinstance(count, int) else None

    def metrics(self) -> MetricsSnapshot:
        """:func:`~kvwitness.collectors.metrics.fetch_metrics` over this connection."""
        return fetch_metrics(self.url, self._client)

    def generate(self, call: GenerateCall) -> RequestRecord:
        """Send one request and wait for its end. Never raises for what the server or the network does.

        Ctrl-C raises :class:`RequestInterrupted`, with what had been seen until then.
        """
        traceparent = new_traceparent()
        answer = NativeAnswer() if call.api is Api.GENERATE else OpenAiAnswer()
        sent_ns, begin = time.time_ns(), time.monotonic()
        interrupt: KeyboardInterrupt | None = None
        try:
            self._stream(call, traceparent, answer, begin)
        except httpx.TimeoutException as error:
            answer.error = f"no answer in time ({type(error).__name__})"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            answer.error = f"the connection failed: {_unconnected(error)}"
        except KeyboardInterrupt as error:
            answer.error, interrupt = INTERRUPTED, error
        record = _record(call, answer, sent_ns, time.monotonic() - begin, traceparent)
        if interrupt is not None:
            raise RequestInterrupted(record) from interrupt
        return record

    def _stream(self, call: GenerateCall, traceparent: str, answer: Answer, begin: float) -> None:
        headers = {"traceparent": traceparent}
        with self._client.stream("POST", self.url + _PATHS[call.api], json=_body(call), headers=headers) as response:
            answer.status = response.status_code
            if answer.status == 200:
                for line in response.iter_lines():
                    answer.take(line, time.monotonic() - begin)
            else:
                response.read()
                answer.error = f"HTTP {answer.status}: {response.text[:BODY_CHARS]}"

    def flush_cache(self, idle_s: float = 30.0) -> FlushResult:
        """Empty the server's L1 and L2. Waits up to ``idle_s`` for running requests; storage keeps its pages."""
        headers = _authorization(self._admin_api_key)
        try:
            answer = self._client.post(
                f"{self.url}/flush_cache", params={"timeout": idle_s}, headers=headers, timeout=idle_s + 30.0
            )
        except httpx.HTTPError as error:
            return FlushResult(False, 0, _words(error), time.time_ns())
        message = answer.text.strip()[:BODY_CHARS]
        return FlushResult(answer.status_code == 200, answer.status_code, message, time.time_ns())


def new_traceparent() -> str:
    """A W3C trace context of its own: version 00, random trace and span id (never all zero), sampled."""
    trace = secrets.randbits(128) or 1
    span = secrets.randbits(64) or 1
    return f"00-{trace:032x}-{span:016x}-01"


def interrupted_record(call: GenerateCall, sent_ns: int, begin: float) -> RequestRecord:
    """The record of a request that was sent and whose answer nobody waits for any more. ``begin``: monotonic, in s."""
    answer = NativeAnswer()
    answer.error = INTERRUPTED
    return _record(call, answer, sent_ns, time.monotonic() - begin, None)


def _record(call: GenerateCall, answer: Answer, sent_ns: int, total_s: float, traceparent: str | None) -> RequestRecord:
    error = answer.problem(call.rid, call.prompt.tokens)
    reference = call.prompt.reference
    wrong = None if reference is None or error is not None else compare(reference, answer.text)
    return RequestRecord(
        rid=call.rid,
        series=call.series,
        order=call.order,
        prompt_tokens=len(call.prompt.ids) or answer.prompt_tokens or 0,
        prompt_sha256=call.prompt.sha256,
        sent_ns=sent_ns,
        ttft_s=answer.ttft_s,
        total_s=total_s,
        status=answer.status,
        error=error,
        traceparent=traceparent,
        output_ids=tuple(answer.output_ids),
        text=answer.text,
        finish_reason=answer.finish_reason,
        cached_tokens=answer.cached_tokens,
        cached_tokens_details=answer.cached_tokens_details,
        prompt_ids=call.prompt.ids if call.keep_prompt else (),
        round=call.round,
        prefix_tokens=call.prefix_tokens,
        reference=reference,
        correct=None if reference is None or error is not None else wrong is None,
        wrong=wrong or "",
    )


def _body(call: GenerateCall) -> dict[str, Any]:
    prompt = call.prompt
    # A drawn prompt has no end that a model could come to; an answer to a question has.
    ignore_eos = not prompt.text
    body: dict[str, Any] = {"rid": call.rid, "stream": True}
    if call.api is Api.GENERATE:
        body |= {"text": prompt.text} if prompt.text else {"input_ids": list(prompt.ids)}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": call.output_tokens, "ignore_eos": ignore_eos}
    else:
        body |= {"model": call.model, "temperature": 0, "max_tokens": call.output_tokens, "ignore_eos": ignore_eos}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if call.api is Api.CHAT:
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.text or list(prompt.ids)
    if call.dp_rank is not None:
        # The first name is the current one, the second that of older releases; each ignores or maps the other.
        body["routed_dp_rank"] = body["data_parallel_rank"] = call.dp_rank
    return body


def _authorization(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _unconnected(error: Exception) -> str:
    """Why there is no connection, without error numbers and the library's own places."""
    words = _words(error)
    if "WRONG_VERSION_NUMBER" in words:
        return "it speaks http, and not https"
    return _LIBRARY_MARKS.sub("", words)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
