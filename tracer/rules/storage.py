"""Rules of L3 (storage): asked for, looked up, read into L2; handed over, written."""

from __future__ import annotations

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.hostpool import Content
from kvwitness.tracer.ledger.runs import skip
from kvwitness.tracer.ledger.state import State
from kvwitness.tracer.rules.declare import Rules
from kvwitness.tracer.rules.l2 import size

STORAGE = Rules()


def attached(s: State) -> bool:
    """Whether a backend is attached now."""
    return bool(s.told.instance.storage) if s.storage.attached is None else s.storage.attached


# --- asked for ---------------------------------------------------------------------------------------

STORAGE.within(ev.PrefetchAsked, 0, None, "start", "tokens")
STORAGE.within(ev.PrefetchAsked, 0, 1, "issued")


@STORAGE.guard(ev.PrefetchAsked, "is for a request that waits")
def _asked_for_who_waits(s: State, e: ev.PrefetchAsked) -> str | None:
    """A prefetch is asked for once for a request in the queue, within its prompt, from a page's start on."""
    request, fetch = s.request(e.req), s.storage.fetch(s.names.get(e.req))
    if request is None or fetch is None or not request.waits:
        return f"a prefetch from storage was asked for in event {e.seq}, for a request that does not wait"
    if fetch.asked is not None and fetch.asked.issued and not fetch.ended:
        return f"a prefetch from storage was asked for twice for {request.rid}"
    if e.start % s.told.page or (request.attempt == 1 and e.start + e.tokens > request.prompt_tokens):
        return f"tokens {e.start} to {e.start + e.tokens} of {request.rid} were asked for from storage"
    return None


@STORAGE.guard(ev.PrefetchAsked, "goes on where the cache ends")
def _asks_behind_the_cache(s: State, e: ev.PrefetchAsked) -> str | None:
    """What is asked for begins where the cache ended when it was asked for the request, at that node."""
    request = s.request(e.req)
    if request is None or request.probed is None or request.probed == (e.node, e.start):
        return None
    ends = request.probed[1]
    return f"tokens of {request.rid} from {e.start} on were asked for from storage, the cache ends at {ends}"


@STORAGE.guard(ev.PrefetchAsked, "has a backend to ask")
def _asks_a_backend(s: State, e: ev.PrefetchAsked) -> str | None:
    """What is issued is issued to a backend that is attached."""
    if not e.issued or attached(s) or not s.told.instance_at:
        return None
    return "a prefetch was asked for, and no storage backend was attached"


@STORAGE.effect(ev.PrefetchAsked)
def _storage_is_asked(s: State, e: ev.PrefetchAsked, m: ft.Moment) -> None:
    """What it brings for this request before its match is L3's."""
    rid = s.names.get(e.req)
    s.storage.told(rid, "issued" if e.issued else "declined", e.start, e.tokens, "", m)
    fetch = s.storage.fetch(rid)
    if fetch is not None and e.issued:
        fetch.asked, fetch.asked_at, fetch.backend, fetch.ended = e, m, attached(s), False


@STORAGE.guard(ev.StorageLookedUp, "answers for a request that waits")
def _looked_up_for_who_waits(s: State, e: ev.StorageLookedUp) -> str | None:
    """A look-up answers once for what was asked, with no more than that (its thread may be faster than the asking)."""
    fetch = s.storage.fetch(s.names.get(e.req))
    if e.tokens < 0 or fetch is None:
        return f"storage answered in event {e.seq} for a request that does not wait"
    if fetch.looked_up is not None and not fetch.ended:
        return f"storage answered twice for {s.names.get(e.req)}"
    if fetch.asked is not None and e.tokens > fetch.asked.tokens:
        return f"storage holds {e.tokens} of {fetch.asked.tokens} tokens that were asked for"
    return None


@STORAGE.effect(ev.StorageLookedUp)
def _storage_holds_so_much(s: State, e: ev.StorageLookedUp, m: ft.Moment) -> None:
    """Storage holds so many of the tokens that were asked for."""
    rid = s.names.get(e.req)
    s.storage.told(rid, "looked_up", -1, e.tokens, "", m)
    fetch = s.storage.fetch(rid)
    if fetch is not None and not fetch.ended:
        fetch.looked_up, fetch.looked_up_at = e, m


# --- ended -------------------------------------------------------------------------------------------


@STORAGE.guard(ev.PrefetchStopped, "stops what was asked for")
def _stops_what_goes_on(s: State, e: ev.PrefetchStopped) -> str | None:
    """What the policy ends was asked for, and has read no more than was found; the policy has a name."""
    fetch = s.storage.fetch(s.names.get(e.req))
    if fetch is None or fetch.asked is None or fetch.ended or s.names.get(e.policy) is None:
        return f"a prefetch from storage was stopped in event {e.seq} that was not under way"
    if not 0 <= e.completed <= max(e.found, 0) and e.completed:
        return f"a prefetch was stopped with {e.completed} tokens of {e.found} found"
    if e.found and fetch.looked_up is not None and e.found != fetch.looked_up.tokens:
        return f"a prefetch was stopped with {e.found} tokens found, the look-up said {fetch.looked_up.tokens}"
    return None


@STORAGE.effect(ev.PrefetchStopped)
def _the_policy_ends_it(s: State, e: ev.PrefetchStopped, m: ft.Moment) -> None:
    """What it had read by then is all that it brings."""
    rid = s.names.get(e.req)
    s.storage.told(rid, "stopped", -1, e.completed, s.names.get(e.policy) or "", m)
    fetch = s.storage.fetch(rid)
    if fetch is not None:
        fetch.stopped = e


@STORAGE.guard(ev.PrefetchRevoked, "ends what was asked for")
def _revokes_what_goes_on(s: State, e: ev.PrefetchRevoked) -> str | None:
    """What ends without anything was asked for, and the reason has a text."""
    fetch = s.storage.fetch(s.names.get(e.req))
    if fetch is None or fetch.asked is None or fetch.ended or s.names.get(e.reason) is None:
        return f"a prefetch from storage was revoked in event {e.seq} that was not under way"
    return None


@STORAGE.effect(ev.PrefetchRevoked)
def _it_brings_nothing(s: State, e: ev.PrefetchRevoked, m: ft.Moment) -> None:
    """Nothing of it is in L2."""
    rid = s.names.get(e.req)
    s.storage.told(rid, "revoked", -1, 0, s.names.get(e.reason) or "", m)
    fetch = s.storage.fetch(rid)
    if fetch is not None:
        fetch.ended = True


STORAGE.within(ev.PrefetchDone, 0, 1, "deadline")
STORAGE.within(ev.PrefetchDone, 0, None, "start", "completed", "existing", "loaded")


@STORAGE.guard(ev.PrefetchDone, "has slots for its tokens")
def _prefetched_slots(s: State, e: ev.PrefetchDone) -> str | None:
    """It names the slots of all that it read, in whole pages; what is new of it was taken for it and not written."""
    if size(e.slots) != e.completed or not s.host.whole(e.slots) or e.start % s.told.page:
        return f"the slots of prefetch {e.seq} are not those of its tokens"
    if e.loaded and not s.host.unwritten(skip(e.slots, e.existing), 0):
        return f"the slots of prefetch {e.seq} do not cover its tokens"
    return None


@STORAGE.guard(ev.PrefetchDone, "adds up")
def _prefetch_adds_up(s: State, e: ev.PrefetchDone) -> str | None:
    """What was read was in L2 already, or is new there."""
    if e.completed == e.existing + e.loaded or not (e.existing or e.loaded):
        return None
    return f"the tokens of the prefetch do not add up: {e.completed} read, {e.loaded} put into L2"


def unfounded(s: State, e: ev.PrefetchDone) -> str:
    """Why the events do not show that a prefetch brought its tokens from storage; empty when they do."""
    request, fetch = s.request(e.req), s.storage.fetch(s.names.get(e.req))
    if fetch is None or fetch.asked is None or fetch.ended:
        return "a prefetch ended that was not seen to be asked for"
    if request is None or not request.waits:
        return "the prefetch ended for a request that did not wait for it any more"
    if fetch.asked_at is not None and s.epochs and fetch.asked_at.seq < s.epochs[-1].begin.seq:
        return "the cache was reset after the prefetch was asked for"
    if not fetch.backend:
        return "by the events no storage backend was attached when the prefetch was asked for"
    if fetch.asked.start != e.start or e.completed > fetch.asked.tokens:
        return "the prefetch ended for other tokens than it was asked for"
    if fetch.failed is not None and e.completed:
        return "its look-up or its transfer had failed"
    if fetch.looked_up is None:
        return "no look-up in storage was recorded for it"
    if fetch.looked_up.tokens < e.completed:
        return f"the prefetch brought {e.completed} tokens, the look-up had found {fetch.looked_up.tokens}"
    if fetch.stopped is not None and fetch.stopped.completed < e.completed:
        return f"the prefetch brought {e.completed} tokens, it was stopped with {fetch.stopped.completed}"
    return ""


@STORAGE.guard(ev.PrefetchDone, "ends what was asked for", also="start completed")
def _ends_what_was_asked_for(s: State, e: ev.PrefetchDone) -> str | None:
    """It was asked for, for a request that still waits; storage had answered that it holds these tokens."""
    return unfounded(s, e) or None if s.names.get(e.req) else f"prefetch {e.seq} ended for a request without a name"


@STORAGE.effect(ev.PrefetchDone)
def _l2_has_it_from_storage(s: State, e: ev.PrefetchDone, m: ft.Moment) -> None:
    """What L2 did not hold already is there now, usable, for this prefix."""
    rid, chain = s.names.get(e.req), s.chain(e.req)
    s.storage.told(rid, "done", e.start, e.loaded, "cut short" if e.deadline else "", m)
    fetch = s.storage.fetch(rid)
    begin = e.start + e.existing
    s.prefetches.append(
        ft.Prefetch(
            rid,
            s.epoch,
            e.start,
            e.completed,
            e.existing,
            e.loaded,
            bool(e.deadline),
            e.slots,
            fetch.asked_at if fetch is not None else None,
            m,
            fetch.looked_up_at if fetch is not None else None,
            unfounded(s, e),
            s.storage.computed(chain, begin, begin + e.loaded),
            fetch.queued.seq if fetch is not None else 0,
        )
    )
    if fetch is not None:
        fetch.ended = True
    if not e.loaded:
        return
    # The copies of what L2 held already were freed; the rest is new L2 content from storage.
    content = Content("prefetch", e.seq, s.epoch, chain, -1, begin, begin + e.loaded)
    if s.told.now.transit_mode is None:
        content.usable = m
    s.host.written(skip(e.slots, e.existing), content)


# --- backends, backups, failures ---------------------------------------------------------------------

STORAGE.within(ev.StorageChanged, 0, 1, "attach", "ok")


@STORAGE.effect(ev.StorageChanged, also="attach ok message")
def _a_backend_comes_or_goes(s: State, e: ev.StorageChanged, m: ft.Moment) -> None:
    """Whether there is a storage to ask."""
    s.storage.changed(e, m)


STORAGE.within(ev.StorageBackupQueued, 0, None, "tokens")


@STORAGE.effect(ev.StorageBackupQueued)
def _a_copy_is_handed_over(s: State, e: ev.StorageBackupQueued, m: ft.Moment) -> None:
    """Storage gets what the node holds, with the weights that computed it."""
    s.storage.handed_over(e.tokens, m)
    node = s.tree.get(e.node)
    if node is None or node.chain is None or node.computed is None or not node.chain.grid:
        return
    grid = node.chain.grid
    s.storage.holds(node.chain.cells[node.start // grid : -(-node.end // grid)], node.computed.seq)


STORAGE.within(ev.StorageBackedUp, 0, None, "tokens", "completed")


@STORAGE.guard(ev.StorageBackedUp, "writes no more than it has")
def _writes_what_it_has(s: State, e: ev.StorageBackedUp) -> str | None:
    """Of a backup's tokens no more are written than there are."""
    return f"{e.completed} of {e.tokens} tokens were written to storage" if e.completed > e.tokens else None


@STORAGE.effect(ev.StorageBackedUp)
def _storage_is_through(s: State, e: ev.StorageBackedUp, m: ft.Moment) -> None:
    """So much of the copy is in storage."""
    s.storage.written(e.tokens, e.completed, m)


@STORAGE.guard(ev.StorageFailed, "is of known work")
def _fails_at_known_work(s: State, e: ev.StorageFailed) -> str | None:
    """A storage thread looks up, reads or writes."""
    if e.work in ev.StorageWork.NAMES and not s.nameless(e.req):
        return None
    return f"a storage thread failed at work {e.work} for request {e.req}"


@STORAGE.effect(ev.StorageFailed)
def _storage_fails(s: State, e: ev.StorageFailed, m: ft.Moment) -> None:
    """What was looked up or read for the request until then is not known."""
    rid = s.names.get(e.req)
    s.storage.failed(e.work, rid, e.error, m)
    fetch = s.storage.fetch(rid)
    if fetch is not None and e.work in (ev.StorageWork.LOOK_UP, ev.StorageWork.READ) and not fetch.ended:
        fetch.failed = m
