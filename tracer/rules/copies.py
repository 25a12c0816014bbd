"""Rules of the copies between L1 and L2: launched with what waits, ended with what they began with."""

from __future__ import annotations

import msgspec

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.opened import OpenBackup, OpenLoad
from kvwitness.tracer.ledger.runs import tiles
from kvwitness.tracer.ledger.state import State
from kvwitness.tracer.rules.declare import Broken, Rules, always
from kvwitness.tracer.rules.l2 import size

COPIES = Rules()


# --- load-backs are queued ---------------------------------------------------------------------------


@COPIES.guard(ev.LoadQueued, "reads whole pages for its tokens")
def _load_pages(s: State, e: ev.LoadQueued) -> str | None:
    """A load-back is of whole pages, of as many slots as tokens as positions, within the pool."""
    page, covered = s.told.page, size(e.slots)
    aligned = e.start >= 0 and e.start % page == 0 and covered == e.tokens == e.end - e.start > 0
    if aligned and s.host.whole(e.slots) and not s.host.beyond(e.slots, s.told.instance.host_tokens):
        return None
    return f"the slots or positions of load {e.seq} are not known"


@COPIES.guard(ev.LoadQueued, "is for what its request's match found")
def _load_of_a_match(s: State, e: ev.LoadQueued) -> str | None:
    """It is queued for a request in the queue, for the whole nodes behind L1 that its match found, and its deepest."""
    request = s.request(e.req)
    if request is None or request.match is None:
        return "a load-back was queued for a request that was not matched"
    match = request.match
    # What only passes through host memory is in no node until it is in L1.
    transit = s.told.now.transit_mode is not None
    found = tiles(match.path, e.start, e.end) or transit
    if not request.waits or not found or request.decision is not None:
        return "a load-back was queued for tokens that its request's match did not find"
    if not transit and (e.start != match.device + request.loaded or e.end > match.device + match.host):
        return "a load-back was queued for tokens that its request's match did not find"
    if not transit and e.node not in {match.best_node, *(step.node for step in match.path if step.end == e.end)}:
        return f"a load-back was queued for node {e.node}, its request's match ends elsewhere"
    return None


@COPIES.guard(ev.LoadQueued, "reads what holds its tokens")
def _load_reads_its_tokens(s: State, e: ev.LoadQueued) -> Broken | None:
    """The slots that it reads hold these positions, by what was written to them."""
    if s.told.now.transit_mode is not None or s.host.holds(e.slots, e.start):
        return None
    if s.attached.begun:
        return None  # What was there before may not have been found.
    return Broken(f"load {e.seq} reads slots that do not hold its positions", since=0)


@COPIES.effect(ev.LoadQueued)
def _a_copy_to_l1_waits(s: State, e: ev.LoadQueued, m: ft.Moment) -> None:
    """Its nodes are on their way to L1; what the slots hold now is what they will bring, unless it is lost before."""
    request = s.request(e.req)
    segments: tuple[ft.LoadSegment, ...] = ()
    if e.start >= 0 and size(e.slots) == e.tokens == e.end - e.start and s.host.whole(e.slots):
        segments = s.host.segments(e.slots, e.start, e.end, s.chain(e.req))
    path = request.match.path if request is not None and request.match is not None else ()
    segments = tuple(_with_tail(s, segment, path) for segment in segments)
    load = OpenLoad(e, s.epoch, s.names.get(e.req), m, segments, path)
    filled = [one for one in segments if one.origin == "prefetch" and one.usable and one.aligned and one.same_prefix]
    s.tree.loading(e.start, e.end, path, e.seq, m, [(one.start, one.end) for one in filled])
    s.loads.append(load)
    s.copying[e.seq] = load
    s.transfers.load_queued(load)
    if request is not None:
        request.touched(m)
        request.loads.append(e.seq)
        request.loaded += e.tokens


def _with_tail(s: State, segment: ft.LoadSegment, path: tuple[ev.PathNode, ...]) -> ft.LoadSegment:
    """Where the digests do not reach the segment's end, the radix match must lead to the node that was written."""
    found = segment.origin == "snapshot"
    if segment.same_prefix is not True or (segment.digest_to >= segment.end and not found):
        return segment
    written = s.backup_nodes.get(segment.origin_id)
    # Nobody saw the slots of a node that was found being written: the match must lead to all of it.
    begin = segment.start if found else max(segment.digest_to, segment.start)
    if written is not None and s.tree.came_from(written, begin, segment.end, path):
        return segment
    return msgspec.structs.replace(segment, same_prefix=None)


# --- launched ----------------------------------------------------------------------------------------

COPIES.within(ev.TransferStarted, 0, 1, "timed")
COPIES.within(ev.TransferStarted, 1, None, "tokens", "bytes")


def _waiting(s: State, direction: int) -> list[OpenBackup | OpenLoad]:
    return list(s.transfers.waiting(direction)) if direction in s.transfers.launched else []


def _since(s: State, direction: int, text: str) -> Broken:
    return Broken(text, since=s.transfers.launched.get(direction, 0))


@COPIES.guard(ev.TransferStarted, "goes one of two ways")
def _one_of_two_ways(s: State, e: ev.TransferStarted) -> str | None:
    """A copy goes to the host or to the device."""
    if e.direction in s.transfers.launched:
        return None
    return f"transfer {e.transfer} copies in a direction that this version does not know"


@COPIES.guard(ev.TransferStarted, "has a number of its own")
def _own_number(s: State, e: ev.TransferStarted) -> Broken | None:
    """No two transfers have one number."""
    if e.transfer not in s.transfers.numbers:
        return None
    return _since(s, e.direction, f"transfer {e.transfer} has the number of an earlier one")


@COPIES.guard(ev.TransferStarted, "copies what waits")
def _copies_what_waits(s: State, e: ev.TransferStarted) -> Broken | None:
    """A launch takes everything that was queued that way, each node once, and nothing else."""
    if len(set(e.nodes)) != len(e.nodes):
        return _since(s, e.direction, f"transfer {e.transfer} names a node twice")
    waiting = _waiting(s, e.direction)
    unseen = s.attached.queued.get(e.direction, {})
    queued = [one.queued.node for one in waiting] + list(unseen)
    left_out = [node for node in queued if node not in e.nodes]
    if left_out:
        return _since(s, e.direction, f"transfer {e.transfer} leaves out node {left_out[0]}, which was queued")
    if len(queued) != len(e.nodes):
        return _since(s, e.direction, f"transfer {e.transfer} copies {len(e.nodes)} nodes, {len(queued)} were queued")
    return None


@COPIES.guard(ev.TransferStarted, "copies as many tokens as wait")
def _copies_as_many(s: State, e: ev.TransferStarted) -> Broken | None:
    """Its tokens are those that were queued."""
    unseen = s.attached.queued.get(e.direction, {})
    tokens = sum(one.queued.tokens for one in _waiting(s, e.direction))
    tokens += sum(unseen[node] for node in e.nodes if node in unseen)
    if tokens == e.tokens:
        return None
    return _since(s, e.direction, f"transfer {e.transfer} copies {e.tokens} tokens, {tokens} were queued")


@COPIES.guard(ev.TransferStarted, "moves the bytes of its tokens")
def _bytes_of_its_tokens(s: State, e: ev.TransferStarted) -> Broken | None:
    """Bytes are tokens times bytes of a token; more where further pools take part."""
    per_token = s.told.instance.bytes_per_token
    if per_token is None:
        return None
    expected = e.tokens * per_token
    if e.bytes == expected or (e.bytes > expected and not s.told.alone):
        return None
    if not s.transfers.fitted:
        # None did so far: then a token has other bytes than the instance says.
        return always(f"transfer {e.transfer} moves {e.bytes} bytes for {e.tokens} tokens of {per_token}")
    return _since(s, e.direction, f"transfer {e.transfer} moves {e.bytes} bytes for {e.tokens} tokens")


@COPIES.effect(ev.TransferStarted, also="tokens bytes transfer direction nodes")
def _a_copy_is_launched(s: State, e: ev.TransferStarted, m: ft.Moment) -> None:
    """What waited that way is on its way."""
    s.attached.launched(e.transfer, e.direction, e.nodes)
    s.transfers.fitted = s.transfers.fitted or e.bytes == e.tokens * (s.told.instance.bytes_per_token or 0)
    s.transfers.start(e, m)


# --- backups end -------------------------------------------------------------------------------------


@COPIES.guard(ev.BackupAcked, "is of a launched copy")
def _acknowledges_a_launch(s: State, e: ev.BackupAcked) -> Broken | None:
    """What is acknowledged was queued and launched, in the transfer that is named."""
    if s.attached.is_backup(e.transfer, e.node):
        return None
    backup = s.transfers.backup_of(e.node)
    if backup is None:
        queued = s.transfers.never_launched(e.node)
        if queued is not None:
            return Broken(f"the copy of node {e.node} was never launched", since=queued.moment.seq)
        before = [b.acked.seq for b in s.backups if b.transfer == e.transfer and b.queued.node == e.node and b.acked]
        return Broken(f"a backup of node {e.node} was acknowledged that was never queued", min(before, default=None))
    if backup.transfer != e.transfer:
        return Broken(f"the acknowledgement of node {e.node} names another transfer")
    return None


@COPIES.guard(ev.BackupAcked, "is timed as its launch was")
def _acknowledged_with_a_time(s: State, e: ev.BackupAcked) -> str | None:
    """A duration is told where the launch said that it is timed."""
    transfer = s.transfers.running.get(e.transfer)
    if e.duration_ns < -1 or (transfer is not None and bool(transfer.event.timed) != (e.duration_ns >= 0)):
        return f"the acknowledgement of node {e.node} tells a duration of {e.duration_ns} ns"
    return None


@COPIES.effect(ev.BackupAcked)
def _a_copy_is_usable(s: State, e: ev.BackupAcked, m: ft.Moment) -> None:
    """The slots hold what the node holds. It proves something where the node was in L1 all the while."""
    if s.attached.is_backup(e.transfer, e.node):
        s.attached.backup_ended(e.transfer, e.node)
        return
    backup = s.transfers.acknowledged(e.node)
    if backup is None:
        return
    content = backup.content
    born = s.tree.born(content.node, content.start, content.end)
    s.tree.backing(content.node, content.start, content.end, -1)
    if backup.transfer != e.transfer:
        return
    backup.acked = content.usable = m
    backup.duration_ns = e.duration_ns if e.duration_ns >= 0 else None
    if backup.in_l1 and backup.epoch == s.epoch and born is not None:
        # What was computed, or came back, only after the copy was queued is not what was copied.
        queued = backup.moment.seq
        if all(one.computed.seq < queued if one.computed else one.since.seq < queued for one in born):
            backup.born = born


# --- load-backs end ----------------------------------------------------------------------------------


@COPIES.guard(ev.LoadDone, "is of a launched copy")
def _ends_a_launch(s: State, e: ev.LoadDone) -> Broken | None:
    """A copy to the device that ends was launched, and ends once."""
    if s.attached.is_load(e.transfer):
        return None
    transfer = s.transfers.running.get(e.transfer)
    if transfer is None or transfer.event.direction != ev.Direction.H2D:
        before = [load.done.seq for load in _read_by(s, e.transfer) if load.done is not None]
        told = "ended twice" if before else "ended that never started"
        return Broken(f"transfer {e.transfer} {told}", since=min(before, default=None))
    return None


@COPIES.guard(ev.LoadDone, "ends as it began")
def _ends_as_it_began(s: State, e: ev.LoadDone) -> str | None:
    """It ends with the tokens, bytes and nodes with which it was launched."""
    transfer = s.transfers.running.get(e.transfer)
    if transfer is None or s.attached.is_load(e.transfer):
        return None
    begun = transfer.event
    if (begun.tokens, begun.bytes, begun.nodes) != (e.tokens, e.bytes, e.nodes):
        return f"transfer {e.transfer} ended with other figures than it started with"
    if e.duration_ns < -1 or bool(begun.timed) != (e.duration_ns >= 0):
        return f"transfer {e.transfer} tells a duration of {e.duration_ns} ns"
    return None


@COPIES.effect(ev.LoadDone)
def _its_nodes_are_in_l1(s: State, e: ev.LoadDone, m: ft.Moment) -> None:
    """What was loaded is in L1, if the cache was not emptied meanwhile."""
    if s.attached.is_load(e.transfer):
        s.attached.load_ended(e.transfer, e.nodes)
        return
    transfer = s.transfers.ended(e.transfer)
    if transfer is None:
        return
    begun = transfer.event
    if (begun.tokens, begun.bytes, begun.nodes) != (e.tokens, e.bytes, e.nodes):
        for load in transfer.loads if e.tokens < begun.tokens else ():
            load.ended_short = e.tokens
        return
    for load in transfer.loads:
        load.done = m
        load.duration_ns = e.duration_ns if e.duration_ns >= 0 else None
        s.copying.pop(load.moment.seq, None)
        if load.epoch == s.epoch:
            s.tree.loaded(load.queued.start, load.queued.end, load.rid, load.moment.seq, m)


# --- copies in threads -------------------------------------------------------------------------------

COPIES.within(ev.LoadWaited, 0, 1, "early")


def _read_by(s: State, transfer: int) -> list[OpenLoad]:
    return [load for load in s.loads if load.transfer == transfer]


@COPIES.guard(ev.LoadWaited, "is told once of a launched copy")
def _waited_once(s: State, e: ev.LoadWaited) -> str | None:
    """How a pass read what a launched copy brought is told once, for as many layers as there are at most."""
    loads = _read_by(s, e.transfer)
    if not loads or any(load.waited is not None for load in loads):
        return f"how transfer {e.transfer} was read was told for no load, or not once"
    layers = s.told.instance.layers
    if e.layers < 0 or (layers is not None and e.layers > layers):
        return f"transfer {e.transfer} was read in {e.layers} layers of {layers}"
    return None


@COPIES.effect(ev.LoadWaited)
def _a_pass_waited(s: State, e: ev.LoadWaited, m: ft.Moment) -> None:
    """In so many layers the pass went on only after the copy."""
    loads = _read_by(s, e.transfer)
    twice = any(load.waited is not None for load in loads)
    for load in loads:
        if twice:
            load.read_early = True  # Which of the two is true is not known.
        else:
            load.waited, load.waited_layers = m, e.layers
            load.read_early = bool(e.early) or load.epoch != s.epoch


# --- content -----------------------------------------------------------------------------------------


def _digested(s: State, e: ev.BackupDigested | ev.LoadDigested) -> str | None:
    layers = s.told.instance.layers
    if layers is not None and len(e.digests) != layers:
        return f"a page was digested in {len(e.digests)} layers of {layers}"
    if e.transfer not in s.transfers.numbers or e.slot % s.told.page or e.slot < 0:
        return f"a page of transfer {e.transfer} was digested that it does not copy"
    return None


@COPIES.guard(ev.BackupDigested, "is of a page of the copy", also="transfer slot digests", content=True)
def _digested_page_out(s: State, e: ev.BackupDigested) -> str | None:
    """The page is one of those that the transfer copies, and every layer has a digest."""
    return _digested(s, e)


@COPIES.effect(ev.BackupDigested, also="digests")
def _bytes_that_went_out(s: State, e: ev.BackupDigested, m: ft.Moment) -> None:
    """The page had these bytes in L1 as it was copied."""
    s.pages.backed_up(e, m)


@COPIES.guard(ev.LoadDigested, "is of a page of the copy", also="transfer slot digests", content=True)
def _digested_page_back(s: State, e: ev.LoadDigested) -> str | None:
    """The page is one of those that the transfer copied, and every layer has a digest."""
    return _digested(s, e)


@COPIES.effect(ev.LoadDigested, also="digests")
def _bytes_that_came_back(s: State, e: ev.LoadDigested, m: ft.Moment) -> None:
    """The page had these bytes in L1 after it was copied back."""
    s.pages.loaded(e, m)
