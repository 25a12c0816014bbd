"""Storage (L3): whether it filled the slots that were read, and why what was computed again did not come from it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from kvwitness.patches.schema.events import StorageWork
from kvwitness.tracer.ledger.facts import (
    InstanceFacts,
    LoadSegment,
    Moment,
    Prefetch,
    RequestFacts,
    Storage,
    StorageChange,
    StorageTry,
)
from kvwitness.tracer.model import EventRef, Grade, Link, LinkEvidence, RangeVerdict, Reason, Tier
from kvwitness.tracer.verdicts.links import REMEDY, Evidence
from kvwitness.tracer.verdicts.view import InstanceView

_NOT_READ = (Reason.RECOMPUTED, Reason.NEVER_BACKED_UP, Reason.LEFT_L2_BEFORE_READ)


class Story(msgspec.Struct, frozen=True):
    """What storage has to do with tokens that were computed."""

    detail: str
    moments: tuple[Moment, ...]
    reason: Reason | None = None
    """In place of the range's own."""
    remedy: str = ""


def link_prefetched(
    evidence: Evidence, view: InstanceView, request: RequestFacts, prefetch: Prefetch, segment: LoadSegment
) -> None:
    """Link "prefetched": the slots were filled from storage for this request, between its queueing and its match."""
    match = request.match
    asked = next((t for t in view.instance.storage.tries if t.moment == prefetch.asked), None)
    if not segment.aligned:
        evidence.miss(Link.PREFETCHED, "the prefetch filled the slots for other positions", prefetch.done)
    elif asked is None or asked.what != "issued":
        evidence.miss(Link.PREFETCHED, "a prefetch ended that was not seen to be asked for", prefetch.done)
    elif asked.start != prefetch.start or prefetch.completed > asked.tokens:
        detail = "the prefetch ended for other tokens than it was asked for"
        evidence.miss(Link.PREFETCHED, detail, prefetch.asked, prefetch.done)
    elif match is None or not request.queued.seq < asked.moment.seq < prefetch.done.seq < match.moment.seq:
        detail = "the prefetch did not lie between the request's queueing and its match"
        evidence.miss(Link.PREFETCHED, detail, prefetch.asked, prefetch.done)
    else:
        detail = f"{prefetch.loaded} tokens from storage, from token {prefetch.start + prefetch.existing} on"
        evidence.hold(Link.PREFETCHED, detail, prefetch.asked, prefetch.done)


def with_storage(view: InstanceView, request: RequestFacts, ranges: Sequence[RangeVerdict]) -> list[RangeVerdict]:
    """Add what storage has to do with it to ranges that were computed although an earlier request had them."""
    story = _story(view, request)
    if story is None:
        return list(ranges)
    shared = min(request.prior_tokens, request.prompt_tokens)
    return [_told(view, r, story) if r.reason in _NOT_READ and r.start < shared else r for r in ranges]


def _told(view: InstanceView, r: RangeVerdict, story: Story) -> RangeVerdict:
    if r.tier is not Tier.RECOMPUTED or r.grade is not Grade.RECOMPUTED:
        return r
    instance = view.instance.instance
    events = tuple(EventRef(instance, m.seq, m.kind) for m in story.moments)
    link = LinkEvidence(Link.PREFETCHED, False, story.detail, events, story.remedy or REMEDY[Link.PREFETCHED])
    detail = "; ".join(filter(None, (r.detail, story.detail)))
    return msgspec.structs.replace(r, reason=story.reason or r.reason, detail=detail, links=(link, *r.links))


def _story(view: InstanceView, request: RequestFacts) -> Story | None:
    storage = view.instance.storage
    end = request.match.moment.seq if request.match is not None else request.max_seq
    attached = _attached(view, end)
    if not attached:
        return None
    tries = [t for t in storage.tries if t.rid == request.rid and request.queued.seq < t.moment.seq < end]
    troubles = [t for t in storage.troubles if t.rid == request.rid and request.queued.seq < t.moment.seq]
    if troubles:
        first = troubles[0]
        same = sum(t.work == first.work for t in storage.troubles if t.moment.seq < request.max_seq)
        what = StorageWork.NAMES.get(first.work, "work")
        detail = f"the {what} in storage (L3) failed: {first.error}"
        detail += f" ({same} such failures so far)" if same > 1 else ""
        return Story(detail, (first.moment,), remedy="mend what the error names, then repeat the request")
    found = next((t for t in reversed(tries) if t.what == "looked_up"), None)
    revoked = next((t for t in reversed(tries) if t.what == "revoked"), None)
    done = next((t for t in reversed(tries) if t.what == "done"), None)
    if revoked is not None and "cut short" in revoked.why:
        detail = f"the prefetch from storage (L3) was {revoked.why} before anything was in L2"
        return Story(detail, (revoked.moment,), remedy="use the prefetch policy wait_complete or timeout")
    if done is not None and done.why:
        detail = f"the prefetch from storage (L3) was cut short by its policy with {done.tokens} tokens in L2"
        return Story(detail, (done.moment,), remedy="use the prefetch policy wait_complete or timeout")
    if found is not None and found.tokens and (done is None or not done.tokens):
        detail = f"storage (L3) holds {found.tokens} tokens by the look-up, and none of them came into L2"
        moments = tuple(t.moment for t in (found, revoked or done) if t is not None)
        return Story(detail, moments, reason=Reason.PROMISED_NOT_LOADED)
    if found is not None and not found.tokens:
        return _not_held(view, request, storage, found, attached)
    return None


def _not_held(
    view: InstanceView, request: RequestFacts, storage: Storage, found: StorageTry, attached: StorageChange | str
) -> Story:
    """The look-up was answered, and nothing is there from the first missing token on."""
    asked = next((t for t in reversed(storage.tries) if t.rid == request.rid and t.what == "issued"), None)
    where = asked.start if asked is not None else 0
    prior = view.requests.get(request.prior_rid or "")
    if isinstance(attached, StorageChange) and prior is not None and prior.queued.seq < attached.moment.seq:
        detail = f"never backed up to storage (L3): request {prior.rid} is older than its attaching"
        return Story(detail, (attached.moment, found.moment), reason=Reason.NEVER_BACKED_UP)
    written = [w for w in storage.written if w[1] and w[2].seq < found.moment.seq]
    broken = next((t for t in storage.troubles if t.work == StorageWork.WRITE), None)
    if broken is not None and not any(w[2].seq > broken.moment.seq for w in written):
        detail = f"never backed up to storage (L3): a backup failed ({broken.error}), and none was written since"
        return Story(detail, (broken.moment, found.moment), reason=Reason.NEVER_BACKED_UP)
    detail = f"the prefix head is missing in storage (L3): the look-up found nothing from token {where} on"
    return Story(detail, (found.moment,))


def _attached(view: InstanceView, before: int) -> StorageChange | str | None:
    """The backend that is attached at an event: by which change, or "start"; None when there is none."""
    changes = [c for c in view.instance.storage.changes if c.ok and c.moment.seq < before]
    if changes:
        return changes[-1] if changes[-1].attach else None
    return "start" if view.instance.facts.get("storage") else None


def storage_alarm(view: InstanceView, request: RequestFacts) -> list[str]:
    """Backups that were handed to storage while none came back any more."""
    storage = view.instance.storage
    broken = next((t for t in storage.troubles if t.work == StorageWork.WRITE), None)
    if broken is None or broken.moment.seq > request.max_seq:
        return []
    queued = sum(broken.moment.seq < moment.seq <= request.max_seq for moment in storage.queued)
    if not queued or any(broken.moment.seq < moment.seq <= request.max_seq for _, _, moment in storage.written):
        return []
    return [
        f"storage (L3): no backup was acknowledged since event {broken.moment.seq} ({broken.error}), "
        f"{queued} were handed over: what L3 holds is not known"
    ]


def storage_changes(instances: Sequence[InstanceFacts]) -> list[str]:
    """What became of each attaching and detaching of a storage backend, over all ranks: one line each.

    Every rank is asked and answers for itself. SGLang takes nothing back where one of them refuses.
    """
    told: list[str] = []
    for answers in zip_longest(*(instance.storage.changes for instance in instances)):
        by_rank = [(_rank(i), c) for i, c in zip(instances, answers, strict=True)]
        done = [(rank, c) for rank, c in by_rank if c is not None and c.ok]
        refused = [(rank, c) for rank, c in by_rank if c is not None and not c.ok]
        silent = [rank for rank, c in by_rank if c is None]
        one = next(c for _, c in by_rank if c is not None)
        what = "attach" if one.attach else "detach"
        if not refused and not silent:
            told.append(f"storage {what}ed: {one.message}")
        elif not done and not silent:
            told.append(f"storage {what} refused: {refused[0][1].message}")
        else:
            parts = [f"took effect on {', '.join(rank for rank, _ in done)}"] if done else []
            parts += [f"was refused on {rank} ({c.message})" for rank, c in refused]
            parts += [f"was not recorded on {', '.join(silent)}"] if silent else []
            told.append(f"storage {what} {' and '.join(parts)}: SGLang rolls nothing back, the ranks differ")
    return told


def _rank(instance: InstanceFacts) -> str:
    ranks = instance.facts.get("ranks") or {}
    named = [f"{n} {ranks[f'{n}_rank']}" for n in ("dp", "tp", "pp") if (ranks.get(f"{n}_size") or 1) > 1]
    return f"rank {' '.join(named)}" if named else instance.instance
