"""Changes of the model's weights, SGLang 0.4.6 to 0.5.23: what is computed afterwards has other ones.

All on the scheduler thread. An event is recorded when SGLang's function has returned, after whatever it emptied the
cache with; one that raised is recorded as failed. Whether the cache was emptied is what the tree's own reset says:
``flushed`` is what the request asked for. From disk (up to 0.5.5) and from a distributed group (up to 0.4.8) SGLang
does not let the client choose and always empties it.

Every release changes weights from disk, from tensors and from a distributed group: the link ``weights`` rests on
those. The other ways came later (from another process with 0.5.4, a check that overwrites the weights with 0.5.6,
sessions with 0.5.21): a release without such a function has no such way, but one whose function is not known is
blind there. They declare ``weights_too``.

LoRA adapters are no part of that. The base model's weights stay, and since 0.5.3 the KV of a request with an adapter
has a cache namespace of its own, whose name holds the adapter's id, which loading at run time makes anew. Before,
SGLang has no HiCache for LoRA: it refuses the two together (0.4), or its tree does not tell adapters apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from kvwitness.patches.contract import NOTHING, Args, Hook, Kwargs, argument
from kvwitness.patches.schema.events import WeightsKind, WeightsUpdated
from kvwitness.patches.witness import Witness

SCHEDULER: Final = ("sglang.srt.managers.scheduler", "Scheduler")
MIXIN: Final = ("sglang.srt.managers.scheduler_update_weights_mixin", "SchedulerUpdateWeightsMixin")
"""0.4.10 to 0.5.12."""
MANAGER: Final = ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager")
"""0.5.13 and newer."""

LABEL_LIMIT: Final = 64
"""Characters of the client's version that are kept."""


class _Change:
    """One call that changes weights, while it runs."""

    __slots__ = ("before", "request")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.before = sys.exc_info()[1]
        """The exception that is being handled already: not one of this call."""


def _enter(w: Witness, args: Args, kwargs: Kwargs) -> _Change:
    return _Change(argument(args, kwargs, 1, "recv_req"))


def _enter_session_end(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    """What loaded within a session was recorded then; without a load another process has written into the weights."""
    session = args[0]._session
    return NOTHING if session is None or session.loaded_weights else _enter(w, args, kwargs)


def _enter_check(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    """Of what can be checked one action writes: it fills the weights with random values."""
    change = _enter(w, args, kwargs)
    return change if change.request.action == "reset_tensors" else NOTHING


def _observers(kind: int) -> dict[str, Any]:
    def leave(w: Witness, change: _Change) -> None:
        raised = sys.exc_info()[1]
        if raised is not None and raised is not change.before:
            _changed(w, kind, change.request, ok=False)

    def seen(w: Witness, change: _Change, result: Any, args: Args, kwargs: Kwargs) -> None:
        _changed(w, kind, change.request, ok=getattr(result, "success", None) is True)

    return {"leave": leave, "seen": seen}


def _changed(w: Witness, kind: int, request: Any, *, ok: bool) -> None:
    flushed = getattr(request, "flush_cache", None) is True
    version = getattr(request, "weight_version", None)
    label = "" if version is None else str(version)[:LABEL_LIMIT]
    w.emit(WeightsUpdated, w.next_update(), kind, int(ok), int(flushed), tail=label.encode("utf-8", "replace"))


def _hook(
    name: str,
    place: tuple[str, str],
    attribute: str,
    kind: int,
    link: str = "",
    enter: Callable[..., Any] = _enter,
) -> Hook:
    return Hook(
        name=f"weights.{name}",
        module=place[0],
        owner=place[1],
        attribute=attribute,
        parameters=("self", "recv_req"),
        links=(link,) if link else (),
        enter=enter,
        bound=True,
        **_observers(kind),
    )


HOOKS: tuple[Hook, ...] = (
    *(
        _hook(name, place, f"update_weights_{name}", kind, "weights")
        for name, kind in (
            ("from_disk", WeightsKind.DISK),
            ("from_tensor", WeightsKind.TENSORS),
            ("from_distributed", WeightsKind.DISTRIBUTED),
        )
        for place in (SCHEDULER, MIXIN, MANAGER)
    ),
    *(
        hook
        for place in (MIXIN, MANAGER)
        for hook in (
            _hook("from_ipc", place, "update_weights_from_ipc", WeightsKind.IPC, "weights_too"),
            _hook("check", place, "check_weights", WeightsKind.CHECK, "weights_too", _enter_check),
        )
    ),
    _hook("session_end", MANAGER, "end_weight_update", WeightsKind.IPC, "weights_too", _enter_session_end),
    _hook("lora_load", SCHEDULER, "load_lora_adapter", WeightsKind.LORA_LOADED),
    _hook("lora_load_tensors", SCHEDULER, "load_lora_adapter_from_tensors", WeightsKind.LORA_LOADED),
    _hook("lora_unload", SCHEDULER, "unload_lora_adapter", WeightsKind.LORA_UNLOADED),
)
