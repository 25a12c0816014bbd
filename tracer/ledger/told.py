"""What the instance has told of itself so far, each fact with the event from which it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvwitness.patches.schema.events import FactKind, Facts
from kvwitness.tracer.ledger import described as d
from kvwitness.tracer.ledger.facts import HookState, Moment


class Told:
    """Facts are taken in as they come; what they leave open is None."""

    def __init__(self) -> None:
        self.instance = d.Instance()
        self.instance_at = 0
        """The event that told what the instance is; 0: none yet."""
        self.process: d.Process | None = None
        self.process_at = 0
        self.attach: d.Attach | None = None
        self.hooks: tuple[HookState, ...] = ()
        self._shown: dict[str, Any] = {}

    @property
    def page(self) -> int:
        """Tokens of a page; 1 until it is told."""
        return max(self.instance.page_size or 1, 1)

    @property
    def alone(self) -> bool:
        """Full-attention KV is all the state that there is: every byte of a copy is of it."""
        return len(self.instance.pools) <= 1

    @property
    def described(self) -> d.Described:
        """All of it."""
        return d.Described(self.instance, self.process, self.attach, dict(self._shown))

    def take(self, event: Facts, moment: Moment) -> None:
        """Learn what a facts event says; one that cannot be read says nothing."""
        try:
            raw = d.read_object(event.json)
            if event.kind == FactKind.COVERAGE:
                self._cover(d.read_hooks(raw), moment)
            elif event.kind == FactKind.INSTANCE:
                self.instance = d.read_as(d.Instance, raw)
                self.instance_at = self.instance_at or event.seq
                self._shown.update(raw)
            elif event.kind == FactKind.PROCESS:
                self.process = d.read_as(d.Process, raw)
                self.process_at = self.process_at or event.seq
                self._shown["process"] = raw
            elif event.kind == FactKind.PROFILE:
                self._shown["profile"] = raw
            elif event.kind == FactKind.ATTACH:
                merged = {**self._shown.get("attach", {}), **raw}
                self.attach = d.read_as(d.Attach, merged)
                self._shown["attach"] = merged
        except d.Unreadable:
            return

    def _cover(self, hooks: tuple[d.Hook, ...], moment: Moment) -> None:
        """A hook's status holds from the event that tells it, or from the one that told the same before."""
        before: Mapping[tuple[str, str, str], HookState] = {(h.name, h.target, h.family): h for h in self.hooks}
        found = []
        for hook in hooks:
            known = before.get((hook.name, hook.target, hook.family))
            since = known.since if known is not None and known.status == hook.status else moment.seq
            found.append(
                HookState(hook.name, hook.target, hook.status, hook.links, hook.detail, hook.family, since)
            )
        self.hooks = tuple(found)

    def wrong(self, event: Facts) -> str | None:
        """Why a facts event cannot be read; None when it can."""
        try:
            raw = d.read_object(event.json)
            if event.kind == FactKind.COVERAGE:
                d.read_hooks(raw)
            elif event.kind in _KINDS:
                d.read_as(_KINDS[event.kind], raw)
        except d.Unreadable as error:
            return str(error)
        return None

    def taken_back(self, event: Facts) -> tuple[int, str] | None:
        """The event that told it, and which fact this one tells otherwise; None when none."""
        if event.kind == FactKind.INSTANCE and self.instance_at:
            name = _differs(self.instance, event.json)
            return (self.instance_at, name) if name is not None else None
        if event.kind == FactKind.PROCESS and self.process is not None:
            name = _differs(self.process, event.json)
            return (self.process_at, name) if name is not None else None
        return None


_KINDS: dict[int, type[d.Instance] | type[d.Process] | type[d.Attach]] = {
    FactKind.INSTANCE: d.Instance,
    FactKind.PROCESS: d.Process,
    FactKind.ATTACH: d.Attach,
}


def _differs(known: d.Instance | d.Process, text: str) -> str | None:
    try:
        told = d.read_as(type(known), d.read_object(text))
    except d.Unreadable:
        return None
    return next((name for name in known.__struct_fields__ if getattr(told, name) != getattr(known, name)), None)


def impossible(instance: d.Instance) -> str | None:
    """Which fact no instance can be; None when all can."""
    at_least_one = ("page_size", "device_tokens", "host_tokens", "bytes_per_token", "layers", "write_through_threshold")
    for name in at_least_one:
        value = getattr(instance, name)
        if value is not None and value < 1:
            return f"{name} {value}"
    ranks = instance.ranks or d.Ranks()
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

