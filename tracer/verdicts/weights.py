"""Which weights computed what a request reused. Nothing here raises or lowers a grade.

A read of KV of other weights is what it is, and its tier is proven or not as ever; what the sentence says beside it is
that the answer rests on KV that the present weights did not compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvwitness.patches.schema.events import WeightsKind
from kvwitness.tracer.ledger.facts import InstanceFacts, Load, RequestFacts
from kvwitness.tracer.model import RangeVerdict, Reason, RequestVerdict, Tier
from kvwitness.tracer.verdicts.view import InstanceView

_ADAPTERS = (WeightsKind.LORA_LOADED, WeightsKind.LORA_UNLOADED)
_REUSED = (Tier.L1, Tier.L2, Tier.L3)


def by_other_weights(
    verdicts: Sequence[RequestVerdict], instances: Sequence[InstanceFacts]
) -> tuple[RequestVerdict, ...]:
    """The verdicts; of reused tokens that other weights computed it is said (reason ``other_weights``)."""
    views = {one.instance: InstanceView(one) for one in instances if changes_of(one)}
    if not views:
        return tuple(verdicts)
    requests = {
        (name, request.rid, request.queued.t_ns): request
        for name, view in views.items()
        for request in view.instance.requests
    }
    found = []
    for verdict in verdicts:
        view = views.get(verdict.instance)
        request = requests.get((verdict.instance, verdict.rid, verdict.queued_ns or 0))
        found.append(verdict if view is None or request is None else _told(verdict, view, request))
    return tuple(found)


def changes_of(instance: InstanceFacts) -> list[int]:
    """The events that changed the weights of the model itself. An adapter's KV has a cache namespace of its own."""
    return [change.moment.seq for change in instance.weights if change.kind not in _ADAPTERS]


def _told(verdict: RequestVerdict, view: InstanceView, request: RequestFacts) -> RequestVerdict:
    if not request.chunks:
        return verdict
    own = _version(view.instance, request.chunks[0].moment.seq)
    ranges, others, unknown = [], set[int](), False
    for r in verdict.ranges:
        versions = _versions(view, request, r) if r.tier in _REUSED else set[int | None]()
        unknown = unknown or None in versions
        strange = {version for version in versions if version is not None and version != own}
        others |= strange
        ranges.append(msgspec.structs.replace(r, reason=Reason.OTHER_WEIGHTS) if strange else r)
    if not others:
        note = "by which weights what it reused was computed is not known: they were changed while kvwitness recorded"
        return msgspec.structs.replace(verdict, notes=(*verdict.notes, note)) if unknown else verdict
    before = " and ".join(f"version {version}" for version in sorted(others))
    reason = (
        Reason.OTHER_WEIGHTS
        if any(r.reason is Reason.OTHER_WEIGHTS and r.tier is verdict.tier for r in ranges)
        else None
    )
    return msgspec.structs.replace(
        verdict,
        ranges=tuple(ranges),
        reason=reason or verdict.reason,
        sentence=f"{verdict.sentence} (computed by other weights: {before}, the request ran with version {own})",
        notes=(*verdict.notes, *_changes(view.instance, min(others), own)),
    )


def _changes(instance: InstanceFacts, first: int, last: int) -> Iterator[str]:
    """The changes between two versions of the weights, as notes."""
    changes = [change for change in instance.weights if change.kind not in _ADAPTERS]
    low, high = sorted((first, last))
    for version, change in enumerate(changes[low:high], start=low + 1):
        how = WeightsKind.NAMES.get(change.kind, "in an unknown way")
        called = f" ({change.label})" if change.label else ""
        text = f"other_weights: version {version} of the weights{called} came {how} with event {change.moment.seq}"
        text += "; the cache was to be emptied with it" if change.flushed else "; the cache was kept"
        yield text if change.ok else f"{text}; SGLang says that it failed, which weights there are is not known"


def _version(instance: InstanceFacts, seq: int) -> int:
    """How often the model's weights had been changed before an event."""
    return sum(change < seq for change in changes_of(instance))


def _versions(view: InstanceView, request: RequestFacts, r: RangeVerdict) -> set[int | None]:
    """The versions of the weights that computed a range; None among them: of a part it is not known."""
    found: set[int | None] = set()
    for seq in _computed(view, request, r):
        found.add(None if seq is None else _version(view.instance, seq))
    return found


def _computed(view: InstanceView, request: RequestFacts, r: RangeVerdict) -> Iterator[int | None]:
    """The events at which the parts of a range were computed; what was found at the attaching was by then."""
    for load in view.loads_of(request):
        yield from _loaded(view, load, r.start, r.end)
    for node in request.match.nodes if request.match is not None and r.tier is Tier.L1 else ():
        if node.end <= r.start or r.end <= node.start:
            continue
        brought = view.loads.get(node.load) if node.load is not None else None
        if brought is not None:
            yield from _loaded(view, brought, node.start, node.end)
        elif node.computed is not None:
            yield node.computed.seq
        else:
            yield node.resident.seq if node.resident is not None else None


def _loaded(view: InstanceView, load: Load, start: int, end: int) -> Iterator[int | None]:
    for segment in load.segments:
        if segment.end <= start or end <= segment.start:
            continue
        backup, prefetch = view.backups.get(segment.origin_id), view.prefetches.get(segment.origin_id)
        found = view.found.get(segment.origin_id)
        if segment.origin == "backup" and backup is not None and backup.born is not None:
            yield from (birth.computed.seq if birth.computed else birth.since.seq for birth in backup.born)
        elif segment.origin == "prefetch" and prefetch is not None:
            yield from prefetch.computed if prefetch.computed is not None else (None,)
        else:
            yield found.moment.seq if segment.origin == "snapshot" and found is not None else None
