"""Slots that stay taken: the load-back of an aborted request that never ends, while later ones do."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvwitness.patches.schema.events import ReleaseState
from kvwitness.tracer.ledger.facts import InstanceFacts, Load, Moment


class Leak(msgspec.Struct, frozen=True):
    """A load-back whose slots nobody gives back."""

    rid: str
    tokens: int
    queued: Moment
    aborted: Moment
    later: Moment
    """A load-back that was launched after the abort was complete: SGLang sees them end in their order."""

    def __str__(self) -> str:
        return (
            f"leak: the load-back of {self.tokens} tokens for request {self.rid} (event {self.queued.seq}), which was "
            f"aborted (event {self.aborted.seq}), never ended, and a later one did (event {self.later.seq}): its "
            f"{self.tokens} slots of L1 and the {self.tokens} host slots that it reads stay taken until the next flush"
        )


def leaks_of(instance: InstanceFacts) -> Iterator[Leak]:
    """The leaks that the events show. Where one of them may be missing, nothing is said."""
    open_loads = [load for load in instance.loads if load.done is None and load.rid is not None]
    if not open_loads:
        return
    aborted = {r.rid: r.released for r in instance.requests if r.state == ReleaseState.ABORTED and not r.shared_id}
    for load in open_loads:
        ended = aborted.get(load.rid or "")
        later = _later(instance, load, ended) if ended is not None else None
        if ended is None or later is None or ended.seq < load.queued.seq:
            continue
        if not any(first <= later.seq and last >= load.queued.seq for first, last, _ in instance.gaps):
            yield Leak(load.rid or "", load.tokens, load.queued, ended, later)


def _later(instance: InstanceFacts, load: Load, ended: Moment) -> Moment | None:
    done = (
        other.done
        for other in instance.loads
        if other.epoch == load.epoch and other.done is not None and other.queued.seq > ended.seq
    )
    return min(done, key=lambda moment: moment.seq, default=None)
