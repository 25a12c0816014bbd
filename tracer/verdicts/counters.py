"""The server's Prometheus counters as a witness: do they move by what the events say?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from kvwitness.tracer.ledger.facts import InstanceFacts, Moment
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
        _compare(name, sum((_counted(i, spans(i), window) for i in leaders), _NONE), window.tokens[name], ranks)
        for name, spans in _EVENTS.items()
        if name in window.tokens and leaders
    )


class _Tokens(msgspec.Struct, frozen=True):
    """Tokens by the events: those certainly counted within the window, and those perhaps."""

    least: int
    most: int

    def __add__(self, other: _Tokens) -> _Tokens:
        return _Tokens(self.least + other.least, self.most + other.most)


_NONE: Final = _Tokens(0, 0)
_Span = tuple[int, Moment, Moment | None]
"""Tokens of something, when it began and when its end was seen. Releases count at the one or at the other."""


def _compare(name: str, ours: _Tokens, theirs: int, ranks: int) -> CrossCheck:
    explanation = ""
    agrees = ours.least <= theirs <= ours.most
    if not agrees and ranks > 1 and theirs % ranks == 0 and ours.least <= theirs // ranks <= ours.most:
        agrees, explanation = True, f"the counter is summed over {ranks} ranks and carries no rank label"
    told = f"{ours.least} tokens" if ours.least == ours.most else f"{ours.least} to {ours.most} tokens"
    return CrossCheck(f"metrics: tokens {name}", agrees, told, f"{theirs} tokens", explanation)


def _counted(instance: InstanceFacts, spans: Iterable[_Span], window: CounterWindow) -> _Tokens:
    least = most = 0
    for tokens, begin, end in spans:
        begun = instance.wall_time_ns(begin.t_ns)
        ended = None if end is None else instance.wall_time_ns(end.t_ns)
        if begun <= window.end_ns and (ended is None or ended >= window.begin_ns):
            most += tokens
            if begun >= window.begin_ns and ended is not None and ended <= window.end_ns:
                least += tokens
    return _Tokens(least, most)


def _loaded(instance: InstanceFacts) -> Iterator[_Span]:
    return ((load.tokens, load.queued, load.done) for load in instance.loads)


def _backed_up(instance: InstanceFacts) -> Iterator[_Span]:
    return ((backup.tokens, backup.queued, backup.acked) for backup in instance.backups)


def _evicted(instance: InstanceFacts) -> Iterator[_Span]:
    return ((call.freed or 0, call.begin, call.end) for call in instance.evictions)


_EVENTS: Final[dict[str, Callable[[InstanceFacts], Iterator[_Span]]]] = {
    LOADED: _loaded,
    BACKED_UP: _backed_up,
    EVICTED: _evicted,
}


def _within(instance: InstanceFacts, t_ns: int, window: CounterWindow) -> bool:
    return window.begin_ns <= instance.wall_time_ns(t_ns) <= window.end_ns


def _ranks(instance: InstanceFacts) -> int:
    ranks = instance.facts.ranks
    return (ranks.tp_size or 1) * (ranks.pp_size or 1)


def _is_leader(instance: InstanceFacts) -> bool:
    """Token counts are taken once per group of ranks that work on the same tokens."""
    return not instance.facts.ranks.tp_rank and not instance.facts.ranks.pp_rank


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
