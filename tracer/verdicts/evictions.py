"""What forced an eviction: whose allocation, how much it needed, and what was taken for it, in order."""

from __future__ import annotations

import msgspec

from kvwitness.patches.schema.events import Cause, Eviction
from kvwitness.tracer.ledger.facts import EvictionCall, HostEviction, InstanceFacts, Moment, Victim
from kvwitness.tracer.model import EventRef, Tier
from kvwitness.tracer.verdicts.view import InstanceView

LEFT_L2 = "left L2"


class Taken(msgspec.Struct, frozen=True):
    """One victim, in the order of the eviction. Positions are tokens of ``owner``'s prompt; -1: not known."""

    owner: str | None
    start: int
    end: int
    tokens: int
    outcome: str
    """L1: what became of it, in the words of :class:`~kvwitness.patches.schema.events.Eviction`; L2: that it left."""
    seq: int
    """Number of the event that says so."""


class ForcedEviction(msgspec.Struct, frozen=True):
    """One eviction, with the request whose allocation forced it. Times are wall-clock ns since 1970."""

    tier: Tier
    call: int
    began_ns: int
    cause: str
    rids: tuple[str, ...]
    """The requests whose allocation it served: several when a whole batch allocated, none when nobody is known."""
    asked: int
    """Tokens that the evictor was told to free."""
    freed: int | None
    """Tokens that it freed; None when its end was not recorded."""
    free: int | None
    """Tokens that were free when it began; None when that was not recorded."""
    needed: int | None
    """Tokens that the allocation needed beyond these; None when that cannot be told."""
    surplus: int | None
    """L1 tokens that were freed beyond those; victims are whole nodes, so that a few are no sign of anything."""
    overasked: int | None
    """Tokens that the evictor was asked for beyond those that were needed: room that was free was not counted."""
    victims: tuple[Taken, ...]
    events: tuple[EventRef, ...]


def forced_l1(view: InstanceView, call: EvictionCall) -> ForcedEviction:
    """One eviction from L1."""
    instance = view.instance
    needed = _needed(view, call)
    surplus = call.freed - needed if call.freed is not None and needed is not None else None
    return ForcedEviction(
        tier=Tier.L1,
        call=call.call,
        began_ns=instance.wall_time_ns(call.begin.t_ns),
        cause=Cause.NAMES.get(call.cause, "unknown"),
        rids=call.rids,
        asked=call.asked,
        freed=call.freed,
        free=call.free,
        needed=needed,
        surplus=None if surplus is None else max(surplus, 0),
        overasked=None if needed is None else max(call.asked - needed, 0),
        victims=taken_of(instance, call),
        events=_refs(instance, call.begin, call.end),
    )


def taken_of(instance: InstanceFacts, call: EvictionCall) -> tuple[Taken, ...]:
    """The victims of an L1 eviction in order. One that is written back first may be recorded twice; here it is one."""
    settled = {victim.node for victim in call.victims if victim.how != Eviction.STAGED}
    until = call.end.seq if call.end is not None else instance.last_seq
    written = {b.node for b in instance.backups if b.write_back and call.begin.seq < b.queued.seq < until}
    return tuple(
        Taken(victim.owner, victim.start, victim.end, victim.tokens, _outcome(victim, written), victim.moment.seq)
        for victim in call.victims
        if victim.how != Eviction.STAGED or victim.node not in settled
    )


def _outcome(victim: Victim, written: set[int]) -> str:
    name = Eviction.NAMES.get(victim.how, "evicted")
    return f"written back, then {name}" if victim.how == Eviction.DEMOTED and victim.node in written else name


def forced_l2(view: InstanceView, eviction: HostEviction) -> ForcedEviction:
    """One eviction from L2."""
    instance = view.instance
    begin = eviction.begin or eviction.end
    return ForcedEviction(
        tier=Tier.L2,
        call=eviction.call,
        began_ns=instance.wall_time_ns(begin.t_ns),
        cause=Cause.NAMES.get(eviction.cause, "unknown"),
        rids=() if eviction.rid is None else (eviction.rid,),
        asked=eviction.asked,
        freed=eviction.freed,
        free=eviction.available,
        needed=None,
        surplus=None,
        overasked=None,
        victims=tuple(Taken(v.owner, v.start, v.end, v.end - v.start, LEFT_L2, v.moment.seq) for v in eviction.victims),
        events=_refs(instance, eviction.begin, eviction.end),
    )


def _needed(view: InstanceView, call: EvictionCall) -> int | None:
    """L1 tokens that the allocation took, less those that were free before the eviction."""
    if call.free is None or call.end is None:
        return None
    if call.cause == Cause.LOAD_BACK:
        taken = _loaded(view, call)
    elif call.cause == Cause.PREFILL:
        taken = _prefilled(view, call)
    else:
        # Of a decode step's allocation nothing is recorded.
        taken = None
    return None if taken is None else max(taken - call.free, 0)


def _loaded(view: InstanceView, call: EvictionCall) -> int | None:
    """Tokens of the load-back that was queued right after."""
    end = call.end.seq if call.end is not None else 0
    loads = [load for load in view.instance.loads if load.rid in call.rids and load.queued.seq > end]
    return min(loads, key=lambda load: load.queued.seq).tokens if loads else None


def _prefilled(view: InstanceView, call: EvictionCall) -> int | None:
    """Tokens of the pass that was launched right after. SGLang reserves a page more for each request of a batch."""
    end = call.end.seq if call.end is not None else 0
    asking = set(call.rids)
    chunks = [
        chunk for request in view.instance.requests if request.rid in asking for chunk in request.chunks
        if chunk.moment.seq > end
    ]  # fmt: skip
    if not chunks:
        return None
    batch = min(chunks, key=lambda chunk: chunk.moment.seq).batch
    page = view.instance.facts.instance.page_size
    spare = page if page is not None and page > 1 else 0
    return sum(chunk.end - chunk.start + spare for chunk in chunks if chunk.batch == batch)


def _refs(instance: InstanceFacts, *moments: Moment | None) -> tuple[EventRef, ...]:
    return tuple(EventRef(instance.instance, m.seq, m.kind) for m in moments if m is not None)
