"""Would a hook be installed on this release? The rule is the installer's own."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvwitness.patches.contract import Hook, mismatch
from kvwitness.tracer.contracts.facts import ReleaseFacts
from kvwitness.tracer.contracts.signatures import StandIn


class Fit(StrEnum):
    """What the installer would say."""

    INSTALLABLE = "installed"
    MISSING = "missing"
    UNKNOWN_SIGNATURE = "unknown_signature"


class NotRead(LookupError):
    """The facts were taken before the hook existed: they have to be taken again."""


class HookCheck(msgspec.Struct, frozen=True):
    """One hook against one release."""

    name: str
    target: str
    owner: str
    family: str
    links: tuple[str, ...]
    fit: Fit
    detail: str = ""
    """Why it would not be installed."""

    @property
    def fits(self) -> bool:
        return self.fit is Fit.INSTALLABLE


def check(hooks: Sequence[Hook], facts: ReleaseFacts) -> tuple[HookCheck, ...]:
    """Every hook against the functions of a release, in the order of the hooks. Raises :class:`NotRead`."""
    return tuple(_check(hook, facts) for hook in hooks)


def _check(hook: Hook, facts: ReleaseFacts) -> HookCheck:
    text = facts.functions.get(hook.target)
    beside = f"{hook.target.rpartition('.')[0]}.{hook.beside}"
    if text is not None and hook.beside and beside not in facts.functions:
        detail, fit = facts.absent.get(beside, f"{hook.owner} has no {hook.beside}"), Fit.MISSING
    elif text is not None:
        detail = mismatch(StandIn(text), hook.parameters) or ""
        fit = Fit.UNKNOWN_SIGNATURE if detail else Fit.INSTALLABLE
    elif hook.target in facts.absent:
        detail, fit = facts.absent[hook.target], Fit.MISSING
    else:
        raise NotRead(f"{facts.version}: {hook.target}")
    return HookCheck(hook.name, hook.target, hook.owner, hook.family, hook.links, fit, detail)
