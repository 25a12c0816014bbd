"""What an instance says of itself, event by event: each is read as a whole, or not at all."""

from __future__ import annotations

from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import msgspec

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.described import (
    Attach,
    Described,
    Hook,
    Instance,
    Process,
    Unreadable,
    read_as,
    read_hooks,
    read_object,
)
from kvwitness.tracer.ledger.facts import HookState

_EXPECTED: Final = {
    ev.FactKind.COVERAGE: "hooks",
    ev.FactKind.INSTANCE: "an instance's",
    ev.FactKind.PROCESS: "a process's",
    ev.FactKind.PROFILE: "a profile's",
    ev.FactKind.ATTACH: "those of an attaching",
}

_PENDING: Final = "pending"
"""Status of a hook whose module was not imported yet."""
_AT_LEAST_ONE: Final = (
    "page_size",
    "device_tokens",
    "host_tokens",
    "bytes_per_token",
    "layers",
    "write_through_threshold",
)
_STRUCTS: Final[dict[int, type[msgspec.Struct]]] = {
    ev.FactKind.INSTANCE: Instance,
    ev.FactKind.PROCESS: Process,
    ev.FactKind.ATTACH: Attach,
}


class Describing:
    """What was said so far, each fact with the event from which it holds. What comes later adds to it."""

    def __init__(self) -> None:
        self.now = Described()
        self.hooks: tuple[HookState, ...] = ()
        self.instance_at = 0
        """The event that first said what the instance is; 0: none yet."""
        self.process_at = 0
        """The same of its process."""
        self._instance: dict[str, Any] = {}
        self._beside: dict[str, dict[str, Any]] = {}
        """The parts that are shown beside the instance's, by name."""

    # --- questions -----------------------------------------------------------------------------------

    @property
    def instance(self) -> Instance:
        """What the instance is, as far as it was said."""
        return self.now.instance

    @property
    def page(self) -> int:
        """Tokens of a page; 1 until it is said."""
        return max(self.now.instance.page_size or 1, 1)

    @property
    def alone(self) -> bool:
        """Full-attention KV is all the state that there is: every byte of a copy is of it."""
        return len(self.now.instance.pools) <= 1

    @staticmethod
    def unreadable(event: ev.Facts) -> str | None:
        """Why nothing of an event can be read, in words; None when all of it can."""
        try:
            _read(event.kind, event.json)
        except Unreadable as error:
            return f"the facts in event {event.seq} are not {_EXPECTED.get(event.kind, 'facts')}: {error}"
        return None

    def taken_back(self, event: ev.Facts) -> tuple[int, str] | None:
        """The event that said it first, and which fact this one says otherwise; None when none."""
        since = {ev.FactKind.INSTANCE: self.instance_at, ev.FactKind.PROCESS: self.process_at}.get(event.kind, 0)
        said = read_facts(event) if since else None
        if said is None:
            return None
        before = self._instance if event.kind == ev.FactKind.INSTANCE else self._beside["process"]
        name = next((name for name, value in said.raw.items() if name in before and before[name] != value), None)
        return None if name is None else (since, name)

    def hooks_taken_back(self, event: ev.Facts) -> str | None:
        """A hook of which this event tells no more, or something else than that it has been put in since."""
        said = read_facts(event) if event.kind == ev.FactKind.COVERAGE and self.hooks else None
        for hook, now in zip_longest(self.hooks, said.hooks) if said is not None else ():
            if hook is None or now is None or _place(hook) != _place(now):
                return str((hook or now).name)
            if now.status != hook.status and hook.status != _PENDING:
                return str(hook.name)
        return None

    # --- what is said --------------------------------------------------------------------------------

    def take(self, event: ev.Facts) -> None:
        """Take an event in. Where it cannot be read nothing of it is kept."""
        said = read_facts(event)
        if said is None:
            return
        if event.kind == ev.FactKind.COVERAGE:
            before = {_standing(hook): hook.since for hook in self.hooks}
            self.hooks = tuple(
                HookState(h.name, h.target, h.status, h.links, h.detail, h.family, before.get(_standing(h), event.seq))
                for h in said.hooks
            )
        elif event.kind == ev.FactKind.INSTANCE:
            self._instance = self._instance | said.raw
            self.now = msgspec.structs.replace(self.now, instance=read_as(Instance, self._instance))
            self.instance_at = self.instance_at or event.seq
        elif event.kind == ev.FactKind.PROCESS:
            self.now = msgspec.structs.replace(self.now, process=read_as(Process, said.raw))
            self._beside["process"] = said.raw
            self.process_at = self.process_at or event.seq
        elif event.kind == ev.FactKind.PROFILE:
            self._beside["profile"] = said.raw
        elif event.kind == ev.FactKind.ATTACH:
            whole = self._beside.get("attach", {}) | said.raw
            self.now = msgspec.structs.replace(self.now, attach=read_as(Attach, whole))
            self._beside["attach"] = whole
        self.now = msgspec.structs.replace(self.now, shown=self._instance | self._beside)


class _Said(NamedTuple):
    """What one event says."""

    raw: dict[str, Any]
    hooks: tuple[Hook, ...]


@lru_cache(maxsize=64)
def _read(kind: int, text: str) -> _Said:
    """Each text is read once: the list of hooks is long, and several rules look at it. Nobody changes the result."""
    raw = read_object(text)
    if kind in _STRUCTS:
        read_as(_STRUCTS[kind], raw)
    return _Said(raw, read_hooks(raw) if kind == ev.FactKind.COVERAGE else ())


def read_facts(event: ev.Facts) -> _Said | None:
    """What an event says; None where nothing of it can be read."""
    try:
        return _read(event.kind, event.json)
    except Unreadable:
        return None


def impossible(instance: Instance) -> str | None:
    """Which fact no instance can be; None when all can."""
    for name in _AT_LEAST_ONE:
        value = getattr(instance, name)
        if value is not None and value < 1:
            return f"{name} {value}"
    if instance.ranks is None or instance.page_size is None or instance.bytes_per_token is None:
        return "without ranks, a page size or the bytes of a token"
    ranks = instance.ranks
    for name in ("tp", "pp", "dp", "attn_tp"):
        size, rank = getattr(ranks, f"{name}_size"), getattr(ranks, f"{name}_rank")
        if (size is not None and size < 1) or (rank is not None and not 0 <= rank < (size or rank + 1)):
            return f"{name}_rank {rank} of {size}"
    if len({pool.pool for pool in instance.pools}) != len(instance.pools):
        return "two pools with one number"
    page, host = instance.page_size, instance.host_tokens
    if page is not None and host is not None and host % page:
        return f"host_tokens {host} with pages of {page}"
    return None


def _place(hook: Hook) -> tuple[object, ...]:
    """Which hook it is, and what rests on it."""
    return hook.name, hook.target, hook.family, hook.links


def _standing(hook: Hook) -> tuple[str, str, str, str]:
    """What has to stay the same for a hook to have gone on as it was."""
    return hook.name, hook.target, hook.family, hook.status
