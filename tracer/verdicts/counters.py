"""The server's Prometheus counters as a witness: do they move by what the events say?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import CrossCheck, RequestVerdict, Tier
from kvwitness.tracer.verdicts.request import overall_grade
from kvwitness.tracer.verdicts.sentences import sentence
from kvwitness.tracer.verdicts.witnesses import weigh

LOADED: Final = "loaded"
BACKED_UP: Final = "backed up"
EVICTED: Final = "evicted"


class CounterWindow(msgspec.Struct, frozen=True):
    """What the server's counters gained between two readings. Times are ns since the epoch."""

    begin_ns: int
    end_ns: int
    tokens: dict[str, int]
    """By :data:`LOADED`, :data:`BACKED_UP`, :data:`EVICTED`; a counter that is not known is left out."""


def check_counters(instances: Sequence[InstanceFacts], window: CounterWindow) -> tuple[CrossCheck, ...]:
    """Compare each known counter with the events of the same time, one number for the server."""
    ranks = max((_ranks(instance) for instance in instances), default=1)
    leaders = [instance for instance in instances if _is_leader(instance)]
    return tuple(
        _compare(name, sum(count(i, window) for i in leaders), window.tokens[name], ranks)
        for name, count in _EVENTS.items()
        if name in window.tokens and leaders
    )


def _compare(name: str, ours: int, theirs: int, ranks: int) -> CrossCheck:
    explanation = ""
    agrees = ours == theirs
    if not agrees and ranks > 1 and theirs == ours * ranks:
        agrees, explanation = True, f"the counter is summed over {ranks} ranks and carries no rank label"
    return CrossCheck(f"metrics: tokens {name}", agrees, f"{ours} tokens", f"{theirs} tokens", explanation)


def _loaded(instance: InstanceFacts, window: CounterWindow) -> int:
    done = {load.transfer: load for load in instance.loads if load.done is not None}
    return sum(
        load.transfer_tokens or 0
        for load in done.values()
        if load.done is not None and _within(instance, load.done.t_ns, window)
    )


def _backed_up(instance: InstanceFacts, window: CounterWindow) -> int:
    return sum(
        backup.tokens
        for backup in instance.backups
        if backup.acked is not None and _within(instance, backup.acked.t_ns, window)
    )


def _evicted(instance: InstanceFacts, window: CounterWindow) -> int:
    return sum(
        call.freed or 0
        for call in instance.evictions
        if call.end is not None and _within(instance, call.end.t_ns, window)
    )


_EVENTS: Final[dict[str, Callable[[InstanceFacts, CounterWindow], int]]] = {
    LOADED: _loaded,
    BACKED_UP: _backed_up,
    EVICTED: _evicted,
}


def _within(instance: InstanceFacts, t_ns: int, window: CounterWindow) -> bool:
    return window.begin_ns <= instance.wall_time_ns(t_ns) <= window.end_ns


def _ranks(instance: InstanceFacts) -> int:
    ranks = instance.facts.get("ranks") or {}
    return int(ranks.get("tp_size") or 1) * int(ranks.get("pp_size") or 1)


def _is_leader(instance: InstanceFacts) -> bool:
    """Token counts are taken once per group of ranks that work on the same tokens."""
    ranks = instance.facts.get("ranks") or {}
    return not (ranks.get("tp_rank") or 0) and not (ranks.get("pp_rank") or 0)


def weigh_counters(
    verdicts: Sequence[RequestVerdict], instances: Sequence[InstanceFacts], window: CounterWindow
) -> tuple[RequestVerdict, ...]:
    """Add the comparison to every verdict of the window that it concerns; a disagreement caps the grade."""
    checks = check_counters(instances, window)
    clocks = {instance.instance: instance for instance in instances}
    return tuple(_weigh_one(v, checks, clocks[v.instance], window) for v in verdicts)


def _weigh_one(
    verdict: RequestVerdict, checks: Sequence[CrossCheck], instance: InstanceFacts, window: CounterWindow
) -> RequestVerdict:
    ended = verdict.released_ns
    if verdict.tier not in (Tier.L2, Tier.L3) or ended is None or not _within(instance, ended, window):
        return verdict
    mine = [check for check in checks if check.witness.endswith(LOADED)]
    if not mine:
        return verdict
    ranges = tuple(weigh(verdict.ranges, mine, ()))
    grade = overall_grade(ranges, verdict.tier)
    return msgspec.structs.replace(
        verdict,
        checks=(*verdict.checks, *mine),
        ranges=ranges,
        grade=grade,
        sentence=sentence(verdict.tier, grade, ranges),
    )
