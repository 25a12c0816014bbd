"""Evictions as they are told: who needed room, and what was taken for it, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.opened import OpenEviction
from kvwitness.tracer.ledger.requests import OpenRequest

_FREED_KEPT: Final = 10_000
"""Of what was given back outside a recorded L2 eviction so much is kept for the next one."""


class L1Evictions:
    """The evictor's calls, one within another where an eviction makes another one necessary."""

    def __init__(self) -> None:
        self._calls: list[OpenEviction] = []
        self._by_number: dict[int, OpenEviction] = {}
        self._under_way: list[OpenEviction] = []
        self.last = 0
        """The largest number of a call so far."""

    def get(self, number: int) -> OpenEviction | None:
        """A call by its number."""
        return self._by_number.get(number)

    @property
    def innermost(self) -> OpenEviction | None:
        """The call that is going on; within it no other one is."""
        return self._under_way[-1] if self._under_way else None

    def begin(self, event: ev.EvictBegin, epoch: int, rids: tuple[str, ...], moment: ft.Moment) -> None:
        """A call begins; ``rids`` need the room."""
        call = self._by_number[event.call] = OpenEviction(event, epoch, rids, moment)
        self._calls.append(call)
        self._under_way.append(call)
        self.last = max(self.last, event.call)

    def room(self, number: int, free: int) -> None:
        """How much was free then."""
        call = self._by_number.get(number)
        if call is not None and free >= 0:
            call.free = free

    def victim(self, event: ev.EvictedL1, owner: str | None, moment: ft.Moment) -> None:
        """A node is taken."""
        call = self.innermost
        if call is not None and call.begin.call == event.call:
            victim = ft.Victim(moment, event.node, owner, event.start, event.end, event.how, event.tokens)
            call.victims.append(victim)

    def end(self, event: ev.EvictEnd, moment: ft.Moment) -> None:
        """The call returns."""
        call = self.innermost
        if call is not None and call.begin.call == event.call:
            self._under_way.pop()
            call.freed, call.end = event.freed, moment

    def without_end(self) -> Iterator[int]:
        """The first events of calls that have not returned."""
        return (call.moment.seq for call in self._under_way)

    def freeze(self) -> tuple[ft.EvictionCall, ...]:
        """All calls, immutable."""
        return tuple(call.freeze() for call in self._calls)

    def forget(self, keep: Collection[str | None], judged: Sequence[OpenRequest], before: int) -> None:
        """Drop what ended before event ``before``, took nothing of ``keep``, and was not for one of ``judged``."""
        self._calls = [
            call
            for call in self._calls
            if call.moment.seq >= before
            or call.end is None
            or any(v.owner in keep for v in call.victims)
            or any(r.queued.seq < call.last.seq and call.moment.seq < r.computed_by() for r in judged)
        ]
        self._by_number = {call.begin.call: call for call in self._calls}


class L2Evictions:
    """Host slots that were given back to make room for others."""

    def __init__(self) -> None:
        self._evictions: list[ft.HostEviction] = []
        self.begun: tuple[ev.EvictHostBegin, ft.Moment] | None = None
        """The call that is going on, where its begin was recorded."""
        self._freed: list[ev.Run] = []
        self._victims: list[ft.HostVictim] = []
        """Usable copies in these slots."""

    @property
    def freed_since(self) -> int:
        """Slots that were given back since the call began."""
        return sum(run.length for run in self._freed)

    def begin(self, event: ev.EvictHostBegin, moment: ft.Moment) -> None:
        """What is given back from here on is taken by it."""
        self.begun = event, moment
        self._clear()

    def freed(self, slots: tuple[ev.Run, ...], gone: Iterable[ft.Residency], moment: ft.Moment) -> None:
        """Slots are given back, and with them these copies."""
        self._freed.extend(slots)
        self._victims.extend(ft.HostVictim(moment, r.since, r.node, r.owner, r.start, r.end) for r in gone)

    def end(self, event: ev.EvictHost, epoch: int, rid: str | None, moment: ft.Moment) -> None:
        """It is over; ``rid`` needed the room."""
        begun, self.begun = self.begun, None
        if begun is not None and begun[0].call != event.call:
            begun = None
        self._evictions.append(
            ft.HostEviction(
                event.call,
                epoch,
                event.cause,
                rid,
                event.asked,
                event.freed,
                tuple(self._freed),
                moment,
                tuple(self._victims),
                begun[1] if begun is not None else None,
                begun[0].available if begun is not None else None,
            )
        )
        self._clear()

    def _clear(self) -> None:
        self._freed.clear()
        self._victims.clear()

    def freeze(self) -> tuple[ft.HostEviction, ...]:
        """All of them."""
        return tuple(self._evictions)

    def forget(self, keep: Collection[str | None], before: int) -> None:
        """Drop what ended before event ``before`` and took nothing of ``keep``."""
        self._evictions = [
            one for one in self._evictions if one.end.seq >= before or any(v.owner in keep for v in one.victims)
        ]
        if self.begun is None:
            del self._freed[:-_FREED_KEPT], self._victims[:-_FREED_KEPT]
