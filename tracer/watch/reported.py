"""What the server itself has reported since the watching began, and whether its own numbers fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvwitness.tracer.model import CrossCheck, Tier
from kvwitness.tracer.outside.counting import (
    CACHED_DEVICE,
    CACHED_HOST,
    CACHED_STORAGE,
    LOADED,
    PROMPT_TOKENS,
    Totals,
    totals,
)
from kvwitness.tracer.outside.records import Counted, Server
from kvwitness.tracer.outside.statement import host_check, sentence_of

_TIERS: Final = {"L1": CACHED_DEVICE, "L2": CACHED_HOST, "L3": CACHED_STORAGE}


class Reported:
    """Sums of the server's counters. Used by one thread."""

    def __init__(self) -> None:
        self._totals = totals(())
        self._server: Mapping[str, Any] = {}
        self._told: tuple[str, str] | None = None

    def server(self, line: Server) -> None:
        """Note what the server says that it is."""
        self._server = line.facts

    def take(self, line: Counted) -> None:
        """Add an interval. Behind a restart the sums begin anew: what was counted in between is not known."""
        if line.reset:
            self._totals, self._told = totals(()), None
        else:
            gained = self._totals.gained
            names = gained.keys() | line.gained.keys()
            summed = {name: gained.get(name, 0.0) + line.gained.get(name, 0.0) for name in names}
            first = self._totals.from_ns or line.from_ns
            self._totals = Totals(summed, (), self._totals.intervals + 1, first, line.at_ns)

    @property
    def by_tier(self) -> dict[str, int]:
        """Prompt tokens by tier; a tier that was never counted has no key."""
        return {tier: int(self._totals.gained[name]) for tier, name in _TIERS.items() if name in self._totals.gained}

    @property
    def sentence(self) -> str:
        """The claim about all of it."""
        return sentence_of(self.by_tier, True)[1]

    @property
    def tokens(self) -> dict[Tier, int]:
        """For a bar. The rest was computed or is not attributed: the server does not say which."""
        found = {tier: self.by_tier.get(tier.value, 0) for tier in (Tier.L1, Tier.L2, Tier.L3)}
        found[Tier.UNKNOWN] = max(0, int(self._totals.gained.get(PROMPT_TOKENS, 0)) - sum(found.values()))
        return found

    def disagreement(self, line: Counted) -> CrossCheck | None:
        """The server's cached tokens of L2 against its load-backs, where they do not fit; each once.

        Asked of an interval in which neither moved: the two are counted at different moments of a request.
        """
        if line.reset or line.gained.get(CACHED_HOST) or line.gained.get(LOADED):
            return None
        check = host_check(self._totals, self._server)
        if check is None or check.agrees is not False or (check.ours, check.theirs) == self._told:
            return None
        self._told = (check.ours, check.theirs)
        return check
