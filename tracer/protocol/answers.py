"""Read the event streams of the server's endpoints, piece by piece, into one answer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, Final

BODY_CHARS: Final = 300


class Answer(ABC):
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
        """Read one line that arrived ``elapsed_s`` after the request was sent."""
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
        elif event.get("error") is not None:
            self.error = _error_text(event["error"])
        else:
            self._take_event(event, elapsed_s)

    @abstractmethod
    def _take_event(self, event: dict[str, Any], elapsed_s: float) -> None: ...

    def problem(self, rid: str, prompt_tokens: int | None) -> str | None:
        """Why this answer cannot be used, or None. ``prompt_tokens`` is None where only the server can count."""
        if self.error is not None:
            return self.error
        if self.finish_reason is None:
            return "the stream ended before the request was finished"
        if self.id not in (None, rid):
            return f"the server answered for request {self.id}"
        if prompt_tokens is not None and self.prompt_tokens not in (None, prompt_tokens):
            return f"the server counted {self.prompt_tokens} prompt tokens where {prompt_tokens} were sent"
        return None

    def _abort(self, message: object) -> None:
        self.error = f"aborted by the server: {message or 'no reason given'}"[:BODY_CHARS]


class NativeAnswer(Answer):
    """Of SGLang's /generate."""

    def _take_event(self, event: dict[str, Any], elapsed_s: float) -> None:
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
                self._abort(finish.get("message"))
        elif finish is not None:
            self.finish_reason = str(finish)


class OpenAiAnswer(Answer):
    """Of /v1/completions and /v1/chat/completions. They carry no token ids and no tiers."""

    def _take_event(self, event: dict[str, Any], elapsed_s: float) -> None:
        self.id = event.get("id", self.id)
        usage = event.get("usage")
        begun = isinstance(usage, dict) and bool(usage.get("completion_tokens"))
        for choice in event.get("choices") or ():
            delta = choice.get("delta")
            text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
            # A model that thinks says that in a field of its own; its first token is a first token, too.
            begun = begun or bool(text) or (isinstance(delta, dict) and bool(delta.get("reasoning_content")))
            self.text += text or ""
            if choice.get("finish_reason") is not None:
                self.finish_reason = str(choice["finish_reason"])
                if self.finish_reason == "abort":
                    self._abort(None)
        if begun and self.ttft_s is None:
            self.ttft_s = elapsed_s
        if isinstance(usage, dict):
            self._take_usage(usage)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            self.cached_tokens = details["cached_tokens"]


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return f"refused by the server: {message}"[:BODY_CHARS]
