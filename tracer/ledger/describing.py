"""What an instance says of itself, event by event: each is read as a whole, or not at all."""

from __future__ import annotations

from typing import Any, Final

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


class Describing:
    """What was said so far; what comes later adds to it, or takes its place."""

    def __init__(self) -> None:
        self.now = Described()
        self.hooks: tuple[HookState, ...] = ()
        self._instance: dict[str, Any] = {}
        self._beside: dict[str, dict[str, Any]] = {}
        """The parts that are shown beside the instance's, by name."""

    @property
    def says_instance(self) -> bool:
        """Whether it was said what transfers have to be like."""
        return "bytes_per_token" in self._instance

    def read(self, event: ev.Facts) -> str | None:
        """Take an event in. Where it cannot be read nothing of it is kept: why, in words."""
        try:
            self._take(event, read_object(event.json))
        except Unreadable as error:
            return f"the facts in event {event.seq} are not {_EXPECTED.get(event.kind, 'facts')}: {error}"
        return None

    def _take(self, event: ev.Facts, facts: dict[str, Any]) -> None:
        if event.kind == ev.FactKind.COVERAGE:
            self._cover(event.seq, facts)
        elif event.kind == ev.FactKind.INSTANCE:
            said = self._instance | facts
            self.now = msgspec.structs.replace(self.now, instance=read_as(Instance, said))
            self._instance = said
        elif event.kind == ev.FactKind.PROCESS:
            self.now = msgspec.structs.replace(self.now, process=read_as(Process, facts))
            self._beside["process"] = facts
        elif event.kind == ev.FactKind.PROFILE:
            self._beside["profile"] = facts
        elif event.kind == ev.FactKind.ATTACH:
            said = self._beside.get("attach", {}) | facts
            self.now = msgspec.structs.replace(self.now, attach=read_as(Attach, said))
            self._beside["attach"] = said
        self.now = msgspec.structs.replace(self.now, shown=self._instance | self._beside)

    def _cover(self, seq: int, facts: dict[str, Any]) -> None:
        before = {_standing(hook): hook.since for hook in self.hooks}
        self.hooks = tuple(
            HookState(h.name, h.target, h.status, h.links, h.detail, h.family, before.get(_standing(h), seq))
            for h in read_hooks(facts)
        )


def _standing(hook: Hook) -> tuple[str, str, str, str]:
    """What has to stay the same for a hook to have gone on as it was."""
    return hook.name, hook.target, hook.family, hook.status
