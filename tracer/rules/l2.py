"""Rules of the host pool and L2: slots taken and given back, copies queued into them, copies refused, evictions."""

from __future__ import annotations

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.hostpool import Content
from kvwitness.tracer.ledger.opened import OpenBackup
from kvwitness.tracer.ledger.runs import overlap
from kvwitness.tracer.ledger.state import ANCHOR_POOL, State
from kvwitness.tracer.rules.declare import Broken, Rules, always

L2 = Rules()


def size(slots: tuple[ev.Run, ...]) -> int:
    """How many slots they are."""
    return sum(run.length for run in slots)


def _known_pool(s: State, pool: int) -> bool:
    return not s.told.instance_at or any(each.pool == pool for each in s.told.instance.pools)


def _outside(s: State, pool: int, slots: tuple[ev.Run, ...]) -> str | None:
    """Why slots cannot be the anchor pool's; None when they can, or are another pool's."""
    if pool != ANCHOR_POOL:
        return None if _known_pool(s, pool) else f"slots of a pool {pool} that the instance does not have"
    if not s.host.whole(slots):
        return "slots that are no whole pages, or twice the same"
    if s.host.beyond(slots, s.told.instance.host_tokens):
        return f"slots beyond the host pool, which has {s.told.instance.host_tokens}"
    return None


def _miscounted(s: State, pool: int, available: int, change: int) -> Broken | None:
    if pool != ANCHOR_POOL:
        return None
    wrong, total = s.host.miscounted(available, change), s.told.instance.host_tokens
    if wrong is None and total is not None and available + s.host.in_use - change > total:
        wrong = f"the host pool has {available} free slots beside those in use, and {total} in all"
    return None if wrong is None else Broken(wrong, since=s.counted)


# --- slots -------------------------------------------------------------------------------------------

for _kind in (ev.HostAlloc, ev.HostFree, ev.HostClear):
    L2.within(_kind, 0, None, "available")


@L2.guard(ev.HostAlloc, "are the pool's slots")
def _allocated_slots(s: State, e: ev.HostAlloc) -> Broken | None:
    """Slots are taken in whole pages, each once, within the pool; where not, the instance is not what it says."""
    wrong = _outside(s, e.pool, e.slots)
    return None if wrong is None else always(wrong)


@L2.guard(ev.HostAlloc, "for a known request")
def _allocated_for_somebody(s: State, e: ev.HostAlloc) -> str | None:
    """The request whose insert or allocation takes them has a name."""
    return f"host slots were taken for a request without a name (event {e.seq})" if s.nameless(e.req) else None


@L2.guard(ev.HostAlloc, "the pool was emptied with the tree")
def _emptied_with_the_tree(s: State, e: ev.HostAlloc) -> Broken | None:
    """After the pool was emptied the tree is reset before slots are taken again."""
    if e.pool != ANCHOR_POOL or not s.emptied:
        return None
    return Broken("the host pool was emptied, and the tree was not", since=s.emptied)


@L2.guard(ev.HostAlloc, "were free")
def _were_free(s: State, e: ev.HostAlloc) -> Broken | None:
    """What is taken was free: given back, or never taken."""
    if e.pool != ANCHOR_POOL or not s.host.taken_twice(e.slots):
        return None
    return Broken("host slots were taken that were in use", since=s.counted)


@L2.guard(ev.HostAlloc, "are counted")
def _allocation_counted(s: State, e: ev.HostAlloc) -> Broken | None:
    """The pool has as many slots fewer as were taken, by its own count."""
    return _miscounted(s, e.pool, e.available, -size(e.slots))


@L2.effect(ev.HostAlloc)
def _slots_are_taken(s: State, e: ev.HostAlloc, m: ft.Moment) -> None:
    """They hold nothing until something is written; a read of them that is under way reads something else."""
    if e.pool != ANCHOR_POOL:
        s.states.taken(e, s.epoch, m)
        return
    s.host.count(e.available)
    s.counted, s.emptied = e.seq, 0
    s.host.taken(e.slots, e.req)
    s.lost_while_copying(e.slots)


@L2.guard(ev.HostFree, "are the pool's slots")
def _freed_slots(s: State, e: ev.HostFree) -> Broken | None:
    """Slots are given back in whole pages, each once, within the pool; where not, the instance is not what it says."""
    wrong = _outside(s, e.pool, e.slots)
    return None if wrong is None else always(wrong)


@L2.guard(ev.HostFree, "for a known request")
def _freed_for_somebody(s: State, e: ev.HostFree) -> str | None:
    """The request whose allocation needs them has a name."""
    return f"host slots were given back for a request without a name (event {e.seq})" if s.nameless(e.req) else None


@L2.guard(ev.HostFree, "were taken")
def _were_taken(s: State, e: ev.HostFree) -> Broken | None:
    """What is given back was taken."""
    if e.pool != ANCHOR_POOL or not s.host.given_back_twice(e.slots):
        return None
    return Broken("host slots were given back that were free", since=s.counted)


@L2.guard(ev.HostFree, "are not being copied")
def _are_not_being_copied(s: State, e: ev.HostFree) -> Broken | None:
    """Slots are not given back while a copy from them is under way, or a copy to them."""
    if e.pool != ANCHOR_POOL or s.told.now.transit_mode is not None:
        return None
    for load in s.copying.values():
        if overlap(load.queued.slots, e.slots):
            return Broken("host slots were given back while they were being read", since=load.moment.seq)
    return None


@L2.guard(ev.HostFree, "are counted")
def _release_counted(s: State, e: ev.HostFree) -> Broken | None:
    """The pool has as many slots more as were given back, by its own count."""
    return _miscounted(s, e.pool, e.available, size(e.slots))


@L2.effect(ev.HostFree)
def _slots_are_free(s: State, e: ev.HostFree, m: ft.Moment) -> None:
    """What they held is not in L2 any more."""
    if e.pool != ANCHOR_POOL:
        s.states.freed(e, m)
        return
    s.host.count(e.available)
    s.counted = e.seq
    closed = len(s.residencies)
    s.host.freed(e.slots, m)
    s.host_evictions.freed(e.slots, s.residencies[closed:], m)
    s.lost_while_copying(e.slots)


@L2.guard(ev.HostClear, "is of a known pool")
def _cleared_pool(s: State, e: ev.HostClear) -> str | None:
    """The pool is one of the instance's."""
    return None if _known_pool(s, e.pool) else f"a pool {e.pool} was emptied that the instance does not have"


@L2.guard(ev.HostClear, "leaves all slots free")
def _all_free(s: State, e: ev.HostClear) -> str | None:
    """An emptied pool has all its slots free."""
    total = s.told.instance.host_tokens
    if e.pool != ANCHOR_POOL:
        return None
    if total is None and not s.attached.begun and s.host.available is not None:
        total = s.host.available + s.host.in_use
    if total is None or e.available == total:
        return None
    return f"the host pool was emptied and has {e.available} free slots of {total}"


@L2.effect(ev.HostClear)
def _the_pool_is_empty(s: State, e: ev.HostClear, m: ft.Moment) -> None:
    """L2 holds nothing; a read that is under way reads nothing."""
    if e.pool != ANCHOR_POOL:
        s.states.cleared(e.pool, m)
        return
    s.host.finish(m)
    s.host.count(e.available)
    s.counted = s.emptied = e.seq
    s.lost_while_copying(None)


# --- copies are queued -------------------------------------------------------------------------------

L2.within(ev.BackupQueued, 0, 1, "write_back")


@L2.guard(ev.BackupQueued, "has the node's positions")
def _backup_positions(s: State, e: ev.BackupQueued) -> str | None:
    """A copy is of whole pages, of the positions that the node has, and of as many tokens."""
    page = s.told.page
    if e.start < 0 or e.end - e.start != e.tokens or e.tokens < 1 or e.start % page or e.end % page:
        return f"the positions of backup {e.seq} are not known"
    if s.tree.elsewhere(e.node, e.start, e.end):
        return f"backup {e.seq} is of other positions than node {e.node} has"
    return None


@L2.guard(ev.BackupQueued, "writes slots that were taken for it")
def _backup_slots(s: State, e: ev.BackupQueued) -> str | None:
    """The slots were allocated for the same request and not written since, in whole pages, one for each token."""
    if size(e.slots) == e.tokens and s.host.whole(e.slots) and s.host.unwritten(e.slots, e.req):
        return None
    return f"the slots of backup {e.seq} were not allocated for it, or do not cover its tokens"


@L2.guard(ev.BackupQueued, "is the only copy of the node")
def _only_copy(s: State, e: ev.BackupQueued) -> str | None:
    """A node is not queued again while a copy of it is queued or under way."""
    if not s.transfers.is_backing(e.node):
        return None
    return f"node {e.node} was queued to be backed up while a backup of it was under way"


@L2.guard(ev.BackupQueued, "is of a node in L1")
def _backed_up_from_l1(s: State, e: ev.BackupQueued) -> Broken | None:
    """What is copied to L2 is in L1: its slots in L1 are its own only there."""
    node = s.tree.get(e.node)
    if node is None or node.resident is not None or not (node.evicted or node.load):
        return None
    since = node.evicted.seq if node.evicted is not None else node.load
    return Broken(f"node {e.node} was queued to be copied to L2 while it was not in L1", since=since)


@L2.guard(ev.BackupQueued, "was computed before")
def _backed_up_what_was_computed(s: State, e: ev.BackupQueued) -> str | None:
    """Inside an insert that makes a node, what is copied was computed by passes that were launched."""
    request = s.request(e.req)
    if s.nameless(e.req):
        return f"a copy to L2 was queued for a request without a name (event {e.seq})"
    if e.write_back or request is None or s.tree.get(e.node) is not None:
        return None
    computed = request.computed()
    if computed is None or (computed.end is not None and e.end > computed.end and not request.chunks[-1].last):
        return f"tokens {e.start} to {e.end} of {request.rid} were queued to be copied before they were computed"
    return None


@L2.guard(ev.BackupQueued, "is written back within an eviction")
def _written_back_within_an_eviction(s: State, e: ev.BackupQueued) -> str | None:
    """A write-back is part of an eviction, and needs the write policy for it."""
    policy = s.told.instance.write_policy
    if e.write_back and (s.evictions.innermost is None or policy not in (None, "write_back")):
        return f"backup {e.seq} is a write-back outside an eviction, or against the write policy {policy}"
    return None


@L2.effect(ev.BackupQueued, also="tokens")
def _a_copy_to_l2_waits(s: State, e: ev.BackupQueued, m: ft.Moment) -> None:
    """The slots are this node's; what they hold is usable when the copy is acknowledged."""
    chain = s.tree.owner(e.node)
    content = Content("backup", e.seq, s.epoch, chain, e.node, e.start, e.end)
    backup = OpenBackup(e, s.epoch, s.names.get(e.req), content, m)
    node = s.tree.get(e.node)
    if node is not None and node.resident is not None:
        backup.in_l1 = True
        s.tree.backing(e.node, e.start, e.end, 1)
    elif node is None and not e.write_back:
        s.inserting[e.node] = (e.req, backup)
    s.backups.append(backup)
    s.backup_nodes[e.seq] = e.node
    s.transfers.backup_queued(backup)
    s.host.written(e.slots, content)
    s.lost_while_copying(e.slots)


# --- copies are refused ------------------------------------------------------------------------------

L2.within(ev.BackupRejected, 1, None, "tokens")


@L2.guard(ev.BackupRejected, "is of the node's tokens")
def _rejected_tokens(s: State, e: ev.BackupRejected) -> str | None:
    """The copy that found no slots was of the whole node, for a request that is known."""
    _, start, end = s.tree.holds(e.node)
    if s.nameless(e.req):
        return f"a copy to L2 was refused for a request without a name (event {e.seq})"
    if start >= 0 and end - start != e.tokens:
        return f"a copy of {e.tokens} tokens of node {e.node} was refused, it has {end - start}"
    return None


@L2.guard(ev.BackupRejected, "is counted")
def _rejected_count(s: State, e: ev.BackupRejected) -> Broken | None:
    """By the pool's own count as much is free as the events say, and it is too little."""
    if s.host.available is not None and s.host.available != e.available:
        return Broken(f"the host pool has {e.available} free slots where the events say {s.host.available}", s.counted)
    return (
        Broken(f"a copy of {e.tokens} tokens was refused, {e.available} slots were free")
        if e.available >= e.tokens
        else None
    )


@L2.effect(ev.BackupRejected)
def _a_copy_is_refused(s: State, e: ev.BackupRejected, m: ft.Moment) -> None:
    """The node has no copy in L2 by this."""
    owner, start, end = s.tree.holds(e.node)
    rid = s.names.get(e.req)
    s.rejections.append(ft.Rejection(m, s.epoch, rid, owner or rid, e.node, start, end, e.tokens, e.available))


# --- evictions ---------------------------------------------------------------------------------------

L2.within(ev.EvictHostBegin, 0, None, "asked", "available")


@L2.guard(ev.EvictHostBegin, "is counted")
def _room_in_l2(s: State, e: ev.EvictHostBegin) -> Broken | None:
    """By the pool's own count as much is free as the events say."""
    if s.host.available is None or s.host.available == e.available:
        return None
    return Broken(f"the host pool has {e.available} free slots where the events say {s.host.available}", s.counted)


@L2.guard(ev.EvictHostBegin, "begins once")
def _host_eviction_begins_once(s: State, e: ev.EvictHostBegin) -> str | None:
    """One eviction from L2 goes on at a time."""
    begun = s.host_evictions.begun
    return None if begun is None else f"eviction {e.call} from L2 began within eviction {begun[0].call}"


@L2.effect(ev.EvictHostBegin, also="call asked available")
def _an_eviction_from_l2_begins(s: State, e: ev.EvictHostBegin, m: ft.Moment) -> None:
    """What is given back until its end is taken by it."""
    s.host_evictions.begin(e, m)


L2.within(ev.EvictHost, ev.Cause.UNKNOWN, ev.Cause.PREFETCH, "cause")
L2.within(ev.EvictHost, 0, None, "asked", "freed")


@L2.guard(ev.EvictHost, "ends what began")
def _ends_what_began(s: State, e: ev.EvictHost) -> str | None:
    """It is the eviction that began, asked for as much, for a request that is known."""
    begun = s.host_evictions.begun
    if s.nameless(e.req):
        return f"eviction {e.call} from L2 serves a request without a name"
    if begun is not None and (begun[0].call, begun[0].asked) != (e.call, e.asked):
        return f"eviction {e.call} from L2 ended, eviction {begun[0].call} had begun"
    return None


@L2.guard(ev.EvictHost, "freed what was given back")
def _freed_what_was_given_back(s: State, e: ev.EvictHost) -> Broken | None:
    """The tokens that it freed are the slots that were given back since it began."""
    begun = s.host_evictions.begun
    if begun is None or s.host_evictions.freed_since == e.freed:
        return None
    told = f"the eviction from L2 freed {e.freed} tokens, {s.host_evictions.freed_since} slots were given back"
    return Broken(told, since=begun[1].seq)


@L2.effect(ev.EvictHost, also="call cause asked freed req")
def _an_eviction_from_l2_ends(s: State, e: ev.EvictHost, m: ft.Moment) -> None:
    """What was given back left L2 for this request."""
    s.host_evictions.end(e, s.epoch, s.names.get(e.req), m)
