"""The HTTP process (tokenizer manager) of SGLang 0.5.22 and 0.5.23: the client's trace context.

SGLang reads ``traceparent`` only with ``--enable-trace``; here it is kept so that a client's trace can be
continued without it. Header values other than ``traceparent`` are not looked at.
"""

from __future__ import annotations

import re
from typing import Any

from kvwitness.patches.contract import Args, Hook, Kwargs, argument
from kvwitness.patches.instance import describe_process
from kvwitness.patches.schema.events import FactKind, HttpRequest
from kvwitness.patches.witness import Witness

MODULE = "sglang.srt.managers.tokenizer_manager"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def _enter_init(w: Witness, args: Args, kwargs: Kwargs) -> None:
    w.open("http")


def _after_init(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    w.facts(FactKind.PROCESS, describe_process(w, "http", argument(args, kwargs, 1, "server_args")))


def _after_request(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    request = argument(args, kwargs, 2, "request")
    if request is None:
        return
    value = request.headers.get("traceparent")
    if value is None or not _TRACEPARENT.fullmatch(value):
        return
    rids = argument(args, kwargs, 1, "obj").rid
    for rid in rids if isinstance(rids, list) else [rids]:
        w.emit(HttpRequest, w.text(rid), tail=value.encode())
        if w.recorder is not None:
            w.recorder.forget_text(rid)


HOOKS: tuple[Hook, ...] = (
    Hook(
        name="http.init",
        module=MODULE,
        owner="TokenizerManager",
        attribute="__init__",
        parameters=("self", "server_args", "port_args"),
        links=(),
        enter=_enter_init,
        seen=_after_init,
        always=True,
    ),
    Hook(
        name="http.request",
        module=MODULE,
        owner="TokenizerManager",
        attribute="_init_req_state",
        parameters=("self", "obj", "request"),
        links=("trace_context",),
        seen=_after_request,
    ),
)
