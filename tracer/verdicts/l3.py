"""Storage (L3): whether it filled the slots that were read, and why what was computed again did not come from it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence

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
from kvwitness.tracer.verdicts.groups import Server, servers
from kvwitness.tracer.verdicts.links import REMEDY, Evidence
from kvwitness.tracer.verdicts.view import InstanceView

_NOT_READ = (Reason.RECOMPUTED, Reason.NEVER_BACKED_UP, Reason.LEFT_L2_BEFORE_READ, Reason.INVALID_MODE)


class Story(msgspec.Struct, frozen=True):
    """What storage has to do with tokens that were computed."""

    detail: str
    moments: tuple[Moment, ...]
    reason: Reason | None = None
    """In place of the range's own."""
    remedy: str = ""


def link_prefetched(evidence: Evidence, request: RequestFacts, prefetch: Prefetch, segment: LoadSegment) -> None:
    """Link "prefetched": the slots were filled from storage for this request, between its queueing and its match."""
    match, asked = request.match, prefetch.asked
    if not segment.aligned:
        evidence.miss(Link.PREFETCHED, "the prefetch filled the slots for other positions", prefetch.done)
    elif prefetch.unfounded or asked is None:
        evidence.miss(Link.PREFETCHED, prefetch.unfounded, prefetch.asked, prefetch.done)
    elif match is None or not request.queued.seq < asked.seq < prefetch.done.seq < match.moment.seq:
        detail = "the prefetch did not lie between the request's queueing and its match"
        evidence.miss(Link.PREFETCHED, detail, prefetch.asked, prefetch.done)
    else:
        detail = f"{prefetch.loaded} tokens from storage, from token {prefetch.start + prefetch.existing} on"
        evidence.hold(Link.PREFETCHED, detail, *moments_of(prefetch))


def moments_of(prefetch: Prefetch) -> tuple[Moment | None, ...]:
    """What a claim about a prefetch rests on: asked for, looked up, ended."""
    return prefetch.asked, prefetch.looked_up, prefetch.done


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
        return _refused(storage, end)
    tries = [t for t in storage.tries if t.rid == request.rid and request.queued.seq < t.moment.seq < end]
    troubles = [t for t in storage.troubles if t.rid == request.rid and request.queued.seq < t.moment.seq]
    found = next((t for t in reversed(tries) if t.what == "looked_up"), None)
    revoked = next((t for t in reversed(tries) if t.what == "revoked"), None)
    done = next((t for t in reversed(tries) if t.what == "done"), None)
    stopped = next((t for t in reversed(tries) if t.what == "stopped"), None)
    if stopped is not None and not any(t.moment.seq < stopped.moment.seq for t in troubles):
        return _cut_short(stopped, found, revoked or done)
    if troubles:
        first = troubles[0]
        same = sum(t.work == first.work for t in storage.troubles if t.moment.seq < request.max_seq)
        what = StorageWork.NAMES.get(first.work, "work")
        detail = f"the {what} in storage (L3) failed: {first.error}"
        detail += f" ({same} such failures so far)" if same > 1 else ""
        return Story(detail, (first.moment,), remedy="mend what the error names, then repeat the request")
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


def _refused(storage: Storage, before: int) -> Story | None:
    """No backend is attached, and the last that was tried is to attach one: on this rank, whatever others said."""
    changes = [c for c in storage.changes if c.moment.seq < before and (c.ok or c.attach)]
    if not changes or changes[-1].ok:
        return None
    detail = f"no storage (L3) is attached on this rank: attaching was refused ({changes[-1].message})"
    return Story(detail, (changes[-1].moment,), remedy="mend what the message names, and attach again")


def _cut_short(stopped: StorageTry, found: StorageTry | None, ended: StorageTry | None) -> Story:
    """The prefetch policy ended the prefetch while it was under way."""
    read = f"with {stopped.tokens} tokens read" if stopped.tokens else "before anything was in L2"
    detail = f"the prefetch from storage (L3) was cut short by the prefetch policy {stopped.why} {read}"
    if found is not None and found.moment.seq < stopped.moment.seq:
        detail += f"; the look-up had found {found.tokens} tokens"
    else:
        detail += "; the look-up had not answered"
    remedy = "use the prefetch policy wait_complete or timeout"
    if stopped.why == "timeout":
        remedy = (
            "use the prefetch policy wait_complete, or a longer timeout (prefetch_timeout_base and "
            "prefetch_timeout_per_ki_token in the backend's extra config)"
        )
    moments = tuple(t.moment for t in (found, stopped, ended) if t is not None)
    return Story(detail, tuple(sorted(moments, key=lambda m: m.seq)), remedy=remedy)


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
    """The backend that is attached at an event: by which change, or "start"; None when there is none.

    Attaching what is attached already only changes policies.
    """
    attached: StorageChange | str | None = "start" if view.instance.facts.instance.storage else None
    for change in view.instance.storage.changes:
        if change.ok and change.moment.seq < before:
            attached = (attached or change) if change.attach else None
    return attached


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


def waits_for_storage(view: InstanceView, request: RequestFacts) -> list[str]:
    """A request that was not admitted, and whose prefetch failed: SGLang before 0.5.22 then waits for ever."""
    failed = [t for t in view.instance.storage.troubles if t.rid == request.rid and t.moment.seq > request.queued.seq]
    if request.admitted is not None or request.released is not None or not failed:
        return []
    what = StorageWork.NAMES.get(failed[0].work, "work")
    return [
        f"it was not admitted: it waits for its prefetch from storage (L3), whose {what} failed in event "
        f"{failed[0].moment.seq} ({failed[0].error})"
    ]


def storage_changes(instances: Sequence[InstanceFacts]) -> list[str]:
    """What became of each attaching and detaching of a storage backend, over all ranks: one line each.

    Every rank is asked and answers for itself. SGLang takes nothing back where one of them refuses.
    """
    together = [part for server in servers(instances) for part in _working_together(server)]
    return [_change_told(answers) for ranks in together for answers in _answers(ranks)]


def _working_together(server: Server) -> list[Sequence[InstanceFacts]]:
    """The ranks of a server, which are asked at once; each on its own where others may be another start's."""
    return [(rank,) for rank in server.ranks] if server.doubt else [server.ranks]


_Answers = list[tuple[str, StorageChange | None]]
"""What each rank said to one request to attach or detach; None: nothing was recorded."""


def _answers(instances: Sequence[InstanceFacts]) -> Iterator[_Answers]:
    """One request after the other: it goes to all ranks, and the next one comes when all have answered."""
    waiting = [(i, deque((i.wall_time_ns(c.moment.t_ns), c) for c in i.storage.changes)) for i in instances]
    while any(changes for _, changes in waiting):
        at, attach, after = min(_head(changes) for _, changes in waiting if changes)
        answers: _Answers = []
        for instance, changes in waiting:
            told = None
            if changes and changes[0][1].attach == attach and changes[0][0] - at <= after - changes[0][0]:
                told = changes.popleft()[1]
            answers.append((_rank(instance), told))
        yield answers


def _head(changes: Sequence[tuple[int, StorageChange]]) -> tuple[int, bool, int]:
    """The next change of a rank: when, whether it attaches, and when the one after it was."""
    (at, change), *rest = changes
    return at, change.attach, rest[0][0] if rest else sys.maxsize


def _change_told(answers: _Answers) -> str:
    done = [(rank, c) for rank, c in answers if c is not None and c.ok]
    refused = [(rank, c) for rank, c in answers if c is not None and not c.ok]
    silent = [rank for rank, c in answers if c is None]
    what = "attach" if (done or refused)[0][1].attach else "detach"
    if not refused and not silent:
        return f"storage {what}ed: {_each(done)}"
    if not done and not silent:
        return f"storage {what} refused: {_each(refused)}"
    parts = [f"took effect on {', '.join(rank for rank, _ in done)}"] if done else []
    parts += [f"was refused on {rank} ({c.message})" for rank, c in refused]
    parts += [f"was not recorded on {', '.join(silent)}"] if silent else []
    return f"storage {what} {' and '.join(parts)}: SGLang rolls nothing back, the ranks differ"


def _each(answers: Sequence[tuple[str, StorageChange]]) -> str:
    """What the ranks said, once where they said the same."""
    messages = {c.message for _, c in answers}
    return messages.pop() if len(messages) == 1 else "; ".join(f"on {rank} {c.message}" for rank, c in answers)


def _rank(instance: InstanceFacts) -> str:
    r = instance.facts.ranks
    known = (("dp", r.dp_size, r.dp_rank), ("tp", r.tp_size, r.tp_rank), ("pp", r.pp_size, r.pp_rank))
    named = [f"{name} {rank}" for name, size, rank in known if (size or 1) > 1]
    return f"rank {' '.join(named)}" if named else instance.instance
