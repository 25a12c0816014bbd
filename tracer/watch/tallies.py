"""What `kvwitness watch` counts, each thing once, when it is settled: numbers that only grow.

A round judges all that is recorded so far. A request is taken when its verdict cannot change any more, or when it
has waited long enough for what may never come.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from kvwitness.collectors.tail import TailState
from kvwitness.patches.schema.events import Cause, Eviction
from kvwitness.tracer.judgement import SCHEDULER_ROLE, Judgement
from kvwitness.tracer.ledger.facts import EvictionCall, HostEviction, InstanceFacts, Load
from kvwitness.tracer.model import CrossCheck, RequestVerdict, Tier

SETTLE_S: Final = 3.0
"""How long a request that was released waits for an acknowledgement or for another rank's journal."""

_NOT_EVICTED: Final = (Eviction.STAGED, Eviction.KEPT)


class Evicted(msgspec.Struct, frozen=True):
    """Tokens that left a tier in one eviction. ``kind``: demoted, dropped, ...; ``host`` for L2."""

    tier: str
    kind: str
    cause: str
    tokens: int
    wall_ns: int


class Loaded(msgspec.Struct, frozen=True):
    """One completed host-to-device copy. ``seconds``: from the queueing to its completion as the scheduler saw it."""

    tokens: int
    bytes: int
    seconds: float
    wall_ns: int


class Lost(msgspec.Struct, frozen=True):
    """Records that a journal does not have."""

    instance: str
    what: str
    records: int


class News(msgspec.Struct, frozen=True):
    """What a round brought."""

    requests: tuple[RequestVerdict, ...] = ()
    evictions: tuple[Evicted, ...] = ()
    loads: tuple[Loaded, ...] = ()
    lost: tuple[Lost, ...] = ()
    gaps: tuple[str, ...] = ()
    """Servers that began or ended, journals that broke off."""


class Tallies:
    """Turns judgements of a growing record into news, each item once. Used by one thread."""

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._taken: set[tuple[str, int, int | None]] = set()
        self._waiting: dict[tuple[str, int, int | None], float] = {}
        self._evictions: set[tuple[str, int]] = set()
        self._host_evictions: set[tuple[str, int]] = set()
        self._transfers: set[tuple[str, int]] = set()
        self._lost: dict[tuple[str, str], int] = {}
        self._instances: dict[str, bool] = {}

    def take(
        self,
        judged: Judgement,
        journals: Sequence[TailState],
        now_s: float,
        alive: Iterable[int],
        *,
        leaving: Container[str] = (),
        all_: bool = False,
    ) -> News:
        """The news of one round. ``alive``: process ids that run; ``leaving``: requests that later rounds will not
        have any more; ``all_``: do not wait for anything any more."""
        running = set(alive)
        news = News(
            requests=tuple(self._requests(judged, now_s, leaving, all_)),
            evictions=tuple(one for facts in judged.instances for one in self._evicted(facts)),
            loads=tuple(one for facts in judged.instances for one in self._loads(facts)),
            lost=tuple(self._losses(journals)),
            gaps=tuple(self._servers(journals, running)),
        )
        self._forget(judged)
        return news

    def _forget(self, judged: Judgement) -> None:
        """What this round does not have any more will not come again."""
        self._taken &= {_key(verdict) for verdict in judged.verdicts}
        self._evictions &= {(facts.instance, call.call) for facts in judged.instances for call in facts.evictions}
        self._host_evictions &= {_left(facts, one) for facts in judged.instances for one in facts.host_evictions}
        self._transfers &= {_copy(facts, load) for facts in judged.instances for load in facts.loads}

    def _requests(
        self, judged: Judgement, now_s: float, leaving: Container[str], all_: bool
    ) -> Iterator[RequestVerdict]:
        for verdict in judged.verdicts:
            key = _key(verdict)
            if key in self._taken or not verdict.finished:
                continue
            since = self._waiting.setdefault(key, now_s)
            if all_ or verdict.rid in leaving or now_s - since >= self._settle_s or _complete(verdict):
                self._taken.add(key)
                del self._waiting[key]
                yield verdict

    def _evicted(self, facts: InstanceFacts) -> Iterator[Evicted]:
        for call in facts.evictions:
            key = (facts.instance, call.call)
            if call.end is not None and key not in self._evictions:
                self._evictions.add(key)
                yield from _victims(facts, call)
        for eviction in facts.host_evictions:
            if _left(facts, eviction) in self._host_evictions:
                continue
            self._host_evictions.add(_left(facts, eviction))
            cause = Cause.NAMES.get(eviction.cause, "unknown")
            yield Evicted("L2", "host", cause, eviction.freed, facts.wall_time_ns(eviction.end.t_ns))

    def _loads(self, facts: InstanceFacts) -> Iterator[Loaded]:
        """Merged copies are counted once, with all their tokens."""
        for load in facts.loads:
            key = _copy(facts, load)
            if load.done is None or key in self._transfers:
                continue
            self._transfers.add(key)
            yield _loaded(facts, load)

    def _losses(self, journals: Sequence[TailState]) -> Iterator[Lost]:
        for journal in journals:
            missing = sum(gap.last - gap.first + 1 for gap in journal.gaps if gap.cause == "records missing")
            for what, count in (
                ("quota", journal.lost_quota),
                ("oversize", journal.lost_oversize),
                ("missing", missing),
                ("damaged", len(journal.anomalies)),
            ):
                before = self._lost.get((journal.instance, what), 0)
                if count > before:
                    self._lost[journal.instance, what] = count
                    yield Lost(journal.instance, what, count - before)

    def _servers(self, journals: Sequence[TailState], alive: set[int]) -> Iterator[str]:
        for journal in journals:
            if journal.role != SCHEDULER_ROLE:
                continue
            known = self._instances.get(journal.instance)
            ended = journal.closed or journal.pid not in alive
            if known is None:
                again = bool(self._instances)
                self._instances[journal.instance] = False
                if again:
                    yield f"scheduler {journal.pid} began to record: before that, nothing is known of its cache"
            if ended and not self._instances[journal.instance]:
                self._instances[journal.instance] = True
                last = journal.last_seq
                if journal.closed:
                    yield f"scheduler {journal.pid} ended, its journal is whole (event {last})"
                else:
                    what = "is not running any more and did not end its journal"
                    yield f"scheduler {journal.pid} {what}: nothing is known after event {last}"


def _key(verdict: RequestVerdict) -> tuple[str, int, int | None]:
    return verdict.rid, verdict.attempt, verdict.queued_ns


def _left(facts: InstanceFacts, eviction: HostEviction) -> tuple[str, int]:
    return facts.instance, eviction.end.seq


def _copy(facts: InstanceFacts, load: Load) -> tuple[str, int]:
    return facts.instance, load.transfer if load.transfer is not None else -load.id


def _complete(verdict: RequestVerdict) -> bool:
    """Nothing that its claim lacks can still come."""
    return all(not piece.missing for piece in verdict.ranges) and all(
        load.done_ns is not None for load in verdict.load_backs
    )


def _victims(facts: InstanceFacts, call: EvictionCall) -> Iterator[Evicted]:
    cause = Cause.NAMES.get(call.cause, "unknown")
    wall = facts.wall_time_ns(call.end.t_ns) if call.end is not None else 0
    by_kind: dict[int, int] = {}
    for victim in call.victims:
        if victim.how not in _NOT_EVICTED:
            by_kind[victim.how] = by_kind.get(victim.how, 0) + victim.tokens
    for how, tokens in by_kind.items():
        yield Evicted("L1", Eviction.NAMES.get(how, str(how)), cause, tokens, wall)


def _loaded(facts: InstanceFacts, load: Load) -> Loaded:
    assert load.done is not None
    seconds = (load.done.t_ns - load.queued.t_ns) / 1e9
    tokens = load.transfer_tokens if load.transfer_tokens is not None else load.tokens
    return Loaded(tokens, load.transfer_bytes or 0, seconds, facts.wall_time_ns(load.done.t_ns))


def disagreements(verdict: RequestVerdict) -> tuple[CrossCheck, ...]:
    """The witnesses that contradict the events."""
    return tuple(check for check in verdict.checks if check.agrees is False)


def tokens_by_tier(verdict: RequestVerdict) -> dict[Tier, int]:
    """Prompt tokens by where their KV came from."""
    tokens = verdict.tokens
    return {
        Tier.L1: tokens.l1,
        Tier.L2: tokens.l2,
        Tier.L3: tokens.l3,
        Tier.RECOMPUTED: tokens.recomputed,
        Tier.UNKNOWN: tokens.unknown,
    }
