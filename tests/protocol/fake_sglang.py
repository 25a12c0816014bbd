"""A small HTTP server that speaks enough of SGLang's API, with a cache that behaves like L1 and L2.

Only the seam is imitated: requests, event streams, metrics and server info have the shapes that a real
0.5.23 server answered. The cache keeps whole prompts, oldest out first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from http_tools import QuietServer


@dataclass
class Seen:
    """A request as the server got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeSglang:
    """Configure, then use as a context manager; ``url`` is valid inside."""

    page_size: int = 16
    device_tokens: int = 4096
    host_tokens: int = 16384
    hicache: bool = True
    metrics: bool = True
    healthy: bool = True
    legacy_paths: bool = False
    incremental: bool = False
    flush_status: int = 200
    info: dict[str, Any] = field(default_factory=dict)
    """Overrides of /server_info; a value of ... removes the key."""
    faults: dict[str, str] = field(default_factory=dict)
    """By series: ``500``, ``refuse``, ``abort``, ``cut``, ``garbage``, ``hang``."""
    seen: list[Seen] = field(default_factory=list)
    l1: dict[str, tuple[int, ...]] = field(default_factory=dict)
    l2: dict[str, tuple[int, ...]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    answer: str = ""
    """What every request for a text is answered."""
    before_post: Callable[[int], None] = lambda number: None
    """Called with the number of each request before it is served."""
    url: str = ""
    hanging: threading.Event = field(default_factory=threading.Event)
    """Set when a request with the fault ``hang`` has its first token."""
    released: threading.Event = field(default_factory=threading.Event)
    """Ends the requests that hang."""

    def __enter__(self) -> Self:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake._get(self)

            def do_POST(self) -> None:
                fake._post(self)

            def log_message(self, *args: Any) -> None:
                pass

        self._http = QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def completed(self) -> list[dict[str, Any]]:
        """The bodies of the requests to OpenAI's endpoints, in order."""
        return [seen.body for seen in self.seen if seen.path.startswith("/v1/")]

    @property
    def generated(self) -> list[dict[str, Any]]:
        """The bodies of the /generate requests, in order."""
        return [seen.body for seen in self.seen if seen.path == "/generate"]

    # --- the cache -----------------------------------------------------------------------------------

    def shared(self, ids: Sequence[int], store: dict[str, tuple[int, ...]]) -> int:
        best = 0
        for held in store.values():
            equal = next((i for i, (a, b) in enumerate(zip(ids, held, strict=False)) if a != b), len(ids))
            best = max(best, min(equal, len(held)))
        return min(best, len(ids) - 1) // self.page_size * self.page_size

    def _serve(self, rid: str, ids: tuple[int, ...]) -> dict[str, int] | None:
        device = self.shared(ids, self.l1)
        host = max(0, self.shared(ids, self.l2) - device) if self.hicache else 0
        for name in [name for name, held in self.l1.items() if held[: self.page_size] == ids[: self.page_size]]:
            self.l1[name] = self.l1.pop(name)
        self.l1[rid] = ids
        while sum(map(len, self.l1.values())) > self.device_tokens:
            oldest = next(iter(self.l1))
            gone = self.l1.pop(oldest)
            self._count("sglang:evicted_tokens_total", len(gone))
            self.l2[oldest] = gone
        while sum(map(len, self.l2.values())) > self.host_tokens:
            del self.l2[next(iter(self.l2))]
        if host:
            self._count('sglang:load_back_tokens_total{pool="kv",tp_rank="0"}', host)
        return {"device": device, "host": host} if device or host else None

    def _count(self, series: str, amount: float) -> None:
        self.counters[series] = self.counters.get(series, 0) + amount

    # --- HTTP ----------------------------------------------------------------------------------------

    def server_info(self) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "version": "0.5.23",
            "page_size": self.page_size,
            "max_total_num_tokens": self.device_tokens,
            "max_req_input_len": self.device_tokens - 6,
            "chunked_prefill_size": 4096,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "disable_radix_cache": False,
            "enable_metrics": self.metrics,
            "disaggregation_mode": "null",
            "enable_hierarchical_cache": self.hicache,
            "hicache_ratio": self.host_tokens / self.device_tokens,
            "hicache_size": 0,
            "hicache_write_policy": "write_through",
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "layer_first",
            "hicache_host_memory_mode": "cache",
            "hicache_storage_backend": None,
            "hicache_storage_prefetch_policy": "timeout",
            "api_key": None,
            "vocab_size": 1024,
        }
        return {key: value for key, value in {**answer, **self.info}.items() if value is not ...}

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        path = urlsplit(handler.path).path
        self.seen.append(Seen(path, dict(handler.headers.items()), {}))
        prefix = "/get_" if self.legacy_paths else "/"
        if path == "/health":
            self._answer(handler, 200 if self.healthy else 503, b"")
        elif path == f"{prefix}server_info":
            self._answer(handler, 200, json.dumps(self.server_info()).encode())
        elif path == f"{prefix}model_info":
            model = {"model_path": "/models/tiny", "model_type": "qwen2", "is_generation": True}
            self._answer(handler, 200, json.dumps(model).encode())
        elif path == "/metrics" and self.metrics:
            self._answer(handler, 200, self._metrics().encode())
        else:
            self._answer(handler, 404, b"Not Found")

    def _metrics(self) -> str:
        lines = []
        for series, value in self.counters.items():
            lines += [f"# TYPE {series.partition('{')[0]} counter", f"{series} {value}"]
        return "\n".join([*lines, ""])

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        path = urlsplit(handler.path).path
        raw = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        body = json.loads(raw) if raw else {}
        self.seen.append(Seen(path, dict(handler.headers.items()), body))
        if path == "/flush_cache":
            if self.flush_status == 200:
                self.l1.clear()
                self.l2.clear()
            self._answer(handler, self.flush_status, b"Cache flushed." if self.flush_status == 200 else b"not idle")
            return
        if path == "/tokenize":
            self._answer(handler, 200, json.dumps({"count": len(body["prompt"].encode())}).encode())
            return
        rid = body["rid"]
        self.before_post(int(rid.split("-")[2]))
        fault = self.faults.get(rid.rpartition("-")[2])
        if fault == "500":
            self._answer(handler, 500, b"CUDA out of memory")
            return
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream; charset=utf-8")
        handler.end_headers()
        events = self._events if path == "/generate" else self._openai_events
        for event in events(rid, body, fault):
            handler.wfile.write(b"data: " + event.encode() + b"\n\n")

    def _events(self, rid: str, body: dict[str, Any], fault: str | None) -> Iterator[str]:
        if fault == "refuse":
            yield json.dumps({"error": {"message": "Requested token count exceeds the limit", "code": 400}})
            yield "[DONE]"
            return
        if fault == "garbage":
            yield "{not json"
            yield "[DONE]"
            return
        ids = tuple(body.get("input_ids") or body["text"].encode())
        details = self._serve(rid, ids)
        total = body["sampling_params"]["max_new_tokens"]
        outputs = [(sum(ids) + i) % 1000 for i in range(total)]
        for done in range(1, total + 1):
            finish: dict[str, Any] | None = {"type": "length", "length": total} if done == total else None
            if fault == "abort" and done == total:
                finish = {"type": "abort", "message": "out of memory", "status_code": 500}
            if fault == "cut" and done == total:
                return
            first = done - 1 if self.incremental else 0
            meta = {
                "id": rid,
                "prompt_tokens": len(ids),
                "completion_tokens": done,
                "finish_reason": finish,
                "cached_tokens": sum(details.values()) if details else 0,
                "cached_tokens_details": details,
            }
            text = "".join(chr(97 + token % 26) for token in outputs[first:done])
            if self.answer:
                text = self.answer
            yield json.dumps({"text": text, "output_ids": outputs[first:done], "meta_info": meta})
            if fault == "hang":
                self.hanging.set()
                self.released.wait(30)
                return
        yield "[DONE]"

    def _openai_events(self, rid: str, body: dict[str, Any], fault: str | None) -> Iterator[str]:
        chat = "messages" in body
        # A chat template begins every prompt alike.
        given = f"<user>{body['messages'][0]['content']}" if chat else body["prompt"]
        ids = tuple(given.encode() if isinstance(given, str) else given)
        details = self._serve(rid, ids)
        text = self.answer or "".join(chr(97 + (sum(ids) + i) % 26) for i in range(body["max_tokens"]))
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
        if chat:
            first = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield json.dumps({"id": rid, "choices": [first], "usage": {**usage, "completion_tokens": 0}})
        for place, char in enumerate(text):
            end = "stop" if place == len(text) - 1 else None
            piece = {"delta": {"content": char}} if chat else {"text": char}
            yield json.dumps({"id": rid, "choices": [{**piece, "finish_reason": end}], "usage": usage})
        cached = {"cached_tokens": sum(details.values())} if details else None
        yield json.dumps({"id": rid, "choices": [], "usage": {**usage, "prompt_tokens_details": cached}})
        yield "[DONE]"

    @staticmethod
    def _answer(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        handler.send_response(status)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


class SteppingClock:
    """A clock that only moves when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Silent:
    """Progress that remembers its phases."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, title: str) -> None:
        self.phases.append(title)

    def detail(self, text: str) -> None:
        pass


class CacheObserver:
    """Answers from the fake's cache, as the journals of a real server would."""

    def __init__(self, server: FakeSglang) -> None:
        self.server = server

    def _prompt(self, rid: str) -> tuple[int, ...]:
        return next(
            tuple(body.get("input_ids") or body["text"].encode())
            for body in self.server.generated
            if body["rid"] == rid
        )

    def left_l1(self, rid: str, beyond: int = 0) -> bool | None:
        return self.server.shared(self._prompt(rid), self.server.l1) == 0

    def backed_up(self, rid: str) -> bool | None:
        return True

    def in_l2(self, rid: str) -> bool | None:
        return self.server.shared(self._prompt(rid), self.server.l2) > 0

    def settled(self, rids: Sequence[str]) -> bool | None:
        sent = {body["rid"] for body in self.server.generated}
        return sent.issuperset(rids)
