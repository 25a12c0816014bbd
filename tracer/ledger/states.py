"""Copies of the state that a hybrid model keeps beside its KV, in host pools of their own, where those are hooked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.facts import Moment, StateCopy
from kvwitness.tracer.ledger.runs import overlap


@dataclass(slots=True)
class _Open:
    pool: int
    epoch: int
    rid: str | None
    slots: tuple[ev.Run, ...]
    taken: Moment
    freed: Moment | None = None


class StatePools:
    """Follows the allocations of every pool but the anchor pool."""

    def __init__(self, name: Callable[[int], str | None]) -> None:
        self._name = name
        self._all: list[_Open] = []
        self._live: dict[int, list[_Open]] = defaultdict(list)

    def taken(self, event: ev.HostAlloc, epoch: int, moment: Moment) -> None:
        copy = _Open(event.pool, epoch, self._name(event.req), event.slots, moment)
        self._all.append(copy)
        self._live[event.pool].append(copy)

    def freed(self, event: ev.HostFree, moment: Moment) -> None:
        self._end(event.pool, [one for one in self._live[event.pool] if overlap(one.slots, event.slots)], moment)

    def cleared(self, pool: int | None, moment: Moment) -> None:
        """All of a pool, or (None) of every one."""
        for number in list(self._live) if pool is None else [pool]:
            self._end(number, list(self._live[number]), moment)

    def _end(self, pool: int, gone: list[_Open], moment: Moment) -> None:
        for copy in gone:
            copy.freed = moment
            self._live[pool].remove(copy)

    def forget(self, keep: Container[str | None], before: int) -> None:
        """Drop the copies that were given back before an event, but for those of these requests."""
        self._all = [one for one in self._all if one.freed is None or one.freed.seq >= before or one.rid in keep]

    def freeze(self) -> tuple[StateCopy, ...]:
        return tuple(StateCopy(one.pool, one.epoch, one.rid, one.taken, one.freed) for one in self._all)
