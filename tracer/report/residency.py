"""Which prefix was in which tier when, from the ledger: the lanes of the chart and the rows of its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from kvwitness.tracer.bundle.summary import STORY
from kvwitness.tracer.ledger.facts import InstanceFacts, Moment, Residency

DRAWN: Final = 10
"""Prefixes in the chart; the table has all of them."""
LISTED: Final = 400

_LEAVING: Final = frozenset({"EvictedL1", "HostFree"})
"""Events that end one stay, where others (a reset) end all of them."""


class Stay(msgspec.Struct, frozen=True):
    """A tier held tokens ``[start, end)`` of a prefix. Times in s since the first thing that is shown."""

    tier: str
    start: int
    end: int
    since: float
    until: float | None
    since_event: str
    until_event: str


class Lane(msgspec.Struct, frozen=True):
    """One prefix: the request that made it, and its stays in both tiers."""

    owner: str
    series: str
    stays: tuple[Stay, ...]

    @property
    def tokens(self) -> int:
        return max(stay.end for stay in self.stays)


class Marker(msgspec.Struct, frozen=True):
    """A request of the story, when it was matched against the cache."""

    series: str
    rid: str
    at: float


class Residencies(msgspec.Struct, frozen=True):
    """All lanes of one instance, the ones to draw first."""

    instance: str
    lanes: tuple[Lane, ...]
    markers: tuple[Marker, ...]
    end: float
    """When the record ends, or what is drawn of it."""
    resets: tuple[float, ...]
    begin: float = 0.0
    """When what is drawn begins."""
    shown: tuple[str, ...] = ()
    """The prefixes to draw, by owner; empty: the first ones."""

    @property
    def drawn(self) -> tuple[Lane, ...]:
        """The lanes of the chart, cut to its time."""
        lanes = [lane for lane in self.lanes if not self.shown or lane.owner in self.shown]
        cut = (
            msgspec.structs.replace(lane, stays=tuple(stay for stay in lane.stays if self._within(stay)))
            for lane in lanes
        )
        return tuple(lane for lane in cut if lane.stays)[:DRAWN]

    def _within(self, stay: Stay) -> bool:
        return stay.since <= self.end and (stay.until is None or stay.until >= self.begin)

    @property
    def stays(self) -> int:
        return sum(len(lane.stays) for lane in self.lanes)


def residencies_of(
    instance: InstanceFacts, series: Mapping[str, str], focus: frozenset[str] = frozenset()
) -> Residencies | None:
    """The lanes of ``instance``; None when nothing of it was seen to be in a tier.

    ``focus`` are the requests of the round to draw, where a run has several: their prefixes, and their time.
    """
    if not instance.residencies:
        return None
    zero = min(residency.since.t_ns for residency in instance.residencies)
    requests = [r for r in instance.requests if series.get(r.rid) in STORY and r.match is not None]
    zero = min([zero, *(r.queued.t_ns for r in requests)])

    def seconds(moment: Moment) -> float:
        return (moment.t_ns - zero) / 1e9

    by_owner: dict[str, list[Residency]] = {}
    for residency in sorted(instance.residencies, key=lambda r: (r.since.seq, r.start)):
        by_owner.setdefault(residency.owner or "?", []).append(residency)
    lanes = [
        Lane(owner, series.get(owner, ""), tuple(_stay(residency, seconds) for residency in found))
        for owner, found in by_owner.items()
    ]
    lanes.sort(key=lambda lane: (lane.series not in STORY, -lane.tokens if lane.series not in STORY else 0))
    markers = tuple(Marker(series[r.rid], r.rid, seconds(r.match.moment)) for r in requests if r.match is not None)
    moments = [
        *(r.since for r in instance.residencies),
        *(r.until for r in instance.residencies if r.until is not None),
        *(r.released for r in instance.requests if r.released is not None),
    ]
    resets = tuple(seconds(e.begin) for e in instance.epochs if e.begin.t_ns > zero)
    found = Residencies(instance.instance, tuple(lanes), markers, max(map(seconds, moments)), resets)
    return _focused(found, instance, focus, seconds) if focus else found


def _focused(
    found: Residencies, instance: InstanceFacts, focus: frozenset[str], seconds: Callable[[Moment], float]
) -> Residencies:
    requests = [request for request in instance.requests if request.rid in focus]
    if not requests:
        return found
    begin = min(seconds(request.queued) for request in requests)
    ends = [seconds(request.released or request.queued) for request in requests]
    margin = 0.03 * (max(ends) - begin)
    end = min(found.end, max(ends) + margin)
    return msgspec.structs.replace(
        found,
        begin=max(0.0, begin - margin),
        end=end,
        markers=tuple(marker for marker in found.markers if marker.rid in focus),
        resets=tuple(at for at in found.resets if begin <= at <= end),
        shown=tuple(lane.owner for lane in found.lanes if lane.owner in focus),
    )


def was_evicted(stay: Stay) -> bool:
    """Whether the tier gave these tokens up, and not a reset or the end of the record."""
    return stay.until is not None and stay.until_event.partition(" ")[0] in _LEAVING


def _stay(residency: Residency, seconds: Callable[[Moment], float]) -> Stay:
    return Stay(
        residency.tier,
        residency.start,
        residency.end,
        seconds(residency.since),
        None if residency.until is None else seconds(residency.until),
        _event(residency.since),
        "" if residency.until is None else _event(residency.until),
    )


def _event(moment: Moment) -> str:
    return f"{moment.kind} {moment.seq}"


def instance_of(instances: Sequence[InstanceFacts], name: str | None) -> InstanceFacts | None:
    """The instance of that name, else the first one."""
    for instance in instances:
        if instance.instance == name:
            return instance
    return instances[0] if instances else None
