"""Put all hooks in place at once, and the originals back at once.

Everything that takes time (signatures, wrappers) is done beforehand; what is left is one assignment for each
function, and one for each place where the scheduler has bound it. Only modules that are loaded are hooked: the server
is up, what it uses is there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvwitness.patches.contract import Hook, Installed, mismatch, wrap
from kvwitness.patches.standby.bound import Dispatched
from kvwitness.patches.witness import Witness


class NotSwapped(Exception):
    """A function was not what it was when the hooks were planned; nothing is changed."""


@dataclass(slots=True)
class Swap:
    """One function of SGLang: what stands there, and what is to stand there."""

    owner: Any
    attribute: str
    original: Any
    wrapper: Any
    bound: bool
    """The scheduler calls what it has bound."""

    @property
    def name(self) -> str:
        return f"{getattr(self.owner, '__qualname__', self.owner.__name__)}.{self.attribute}"

    @property
    def standing(self) -> Any:
        return vars(self.owner).get(self.attribute)


class Swaps:
    """The hooks of one attachment."""

    def __init__(self, hooks: Sequence[Hook], witness: Witness, scheduler: Any) -> None:
        self._dispatched = Dispatched(scheduler)
        self.states = [Installed(hook) for hook in hooks]
        self._swaps: dict[tuple[int, str], Swap] = {}
        self._names: dict[tuple[int, str], set[str]] = {}
        for state in self.states:
            self._plan(state, witness)

    def __len__(self) -> int:
        return len(self._swaps)

    def _plan(self, state: Installed, witness: Witness) -> None:
        hook = state.hook
        module = sys.modules.get(hook.module)
        if module is None:
            state.detail = f"{hook.module} is not loaded"
            return
        found = state.find(module)
        if found is None:
            return
        owner, original = found
        wrong = mismatch(original, hook.parameters)
        if wrong is not None:
            state.status, state.detail = "unknown_signature", wrong
            return
        if hook.bound and not self._dispatched.has(original):
            state.status, state.detail = "missing", f"the running scheduler does not call {hook.target}"
            return
        key = (id(owner), hook.attribute)
        swap = self._swaps.setdefault(key, Swap(owner, hook.attribute, original, original, hook.bound))
        # One name may stand for several modules or families that lead to the same function: it is observed once.
        names = self._names.setdefault(key, set())
        if hook.name not in names:
            swap.wrapper = wrap(swap.wrapper, hook, witness)
            names.add(hook.name)
        state.status = "installed"

    def put_in(self) -> None:
        """All of them or none. Raises :class:`NotSwapped`, or whatever an assignment raised."""
        changed = [swap.name for swap in self._swaps.values() if swap.standing is not swap.original]
        if changed:
            raise NotSwapped(f"{changed[0]} was changed by something else meanwhile")
        try:
            for swap in self._swaps.values():
                setattr(swap.owner, swap.attribute, swap.wrapper)
                if swap.bound:
                    self._dispatched.exchange(swap.original, swap.wrapper)
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> tuple[str, ...]:
        """The originals, wherever our wrapper still stands; returns the functions where it does not.

        A wrapper that something else has wrapped since stays below that, and observes nothing.
        """
        left: list[str] = []
        for swap in self._swaps.values():
            if swap.standing is swap.wrapper:
                setattr(swap.owner, swap.attribute, swap.original)
            if swap.bound:
                self._dispatched.exchange(swap.wrapper, swap.original)
            if swap.standing is not swap.original:
                left.append(swap.name)
        return tuple(left)
