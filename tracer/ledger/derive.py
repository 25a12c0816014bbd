"""From one scheduler's journal to facts: a single pass over its events in their order, which may be a growing record.

Nothing is judged here. What does not fit together is kept as an anomaly or a gap with the sequence numbers
between which it happened.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from kvwitness.collectors.journal import Gap, Journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.attached import Unseen
from kvwitness.tracer.ledger.chains import Chain, cell_tokens
from kvwitness.tracer.ledger.describing import Describing
from kvwitness.tracer.ledger.digests import PageDigests
from kvwitness.tracer.ledger.evictions import L1Evictions, L2Evictions
from kvwitness.tracer.ledger.gaps import Gaps
from kvwitness.tracer.ledger.hostpool import Content, HostView
from kvwitness.tracer.ledger.numbers import Numbers
from kvwitness.tracer.ledger.opened import OpenBackup, OpenLoad
from kvwitness.tracer.ledger.requests import OpenChunk, OpenRequest
from kvwitness.tracer.ledger.runs import overlap, skip, tiles
from kvwitness.tracer.ledger.states import StatePools
from kvwitness.tracer.ledger.storage import StorageView
from kvwitness.tracer.ledger.transfers import Transfers
from kvwitness.tracer.ledger.tree import TreeView

ANCHOR_POOL = 0
"""Number of the host pool whose slots are the identity of full-attention KV."""

_LEFT_L1 = (ev.Eviction.DEMOTED, ev.Eviction.DROPPED, ev.Eviction.DROPPED_HOST_PRESSURE)


class Recorded(Protocol):
    """What a journal says of itself; a :class:`~kvwitness.collectors.journal.Journal` is one."""

    @property
    def instance(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def monotonic_ns(self) -> int: ...
    @property
    def wall_ns(self) -> int: ...
    @property
    def gaps(self) -> tuple[Gap, ...]: ...
    @property
    def anomalies(self) -> tuple[str, ...]: ...
    @property
    def closed(self) -> bool: ...


class Ledger:
    """Reads the events of one instance, all at once (:func:`derive`) or as they come."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._texts_forgotten = Numbers()
        self._renamed: list[int] = []
        self._chains: dict[str, Chain] = {}
        self._seen_cells: dict[bytes, tuple[str, int]] = {}
        """Digest of a prefix -> the request that last put it into the cache, and in which epoch."""
        self._open: dict[str, OpenRequest] = {}
        self._attempts: dict[str, int] = defaultdict(int)
        self._requests: list[OpenRequest] = []
        self._backups: list[OpenBackup] = []
        self._backup_nodes: dict[int, int] = {}
        self._loads: list[OpenLoad] = []
        self._copying: dict[int, OpenLoad] = {}
        """Loads of this epoch whose completion was not seen yet."""
        self._counted = 0
        """The last event that carried the host pool's own count."""
        self._gaps = Gaps()
        self._l1_evictions = L1Evictions(self._gaps)
        self._l2_evictions = L2Evictions()
        self._rejections: list[ft.Rejection] = []
        self._inserting: dict[int, tuple[int, Content]] = {}
        """Node -> request and content of a backup since the last insert of which only the next one says whose it is."""
        self._prefetches: list[ft.Prefetch] = []
        self._asked: dict[str, ft.Moment] = {}
        self._residencies: list[ft.Residency] = []
        self._pages = PageDigests()
        self._storage = StorageView(self._name)
        self._states = StatePools(self._name)
        self._described = Describing()
        self._attached = Unseen()
        self._transfers = Transfers(self._gaps, self._attached, self._described)
        self._found: list[ft.Found] = []
        self._epochs: list[ft.EpochFact] = []
        self._failures: dict[str, int] = {}
        self._anomalies: list[str] = []
        self._epoch = 0
        self._tree = TreeView(0, self._residencies.append)
        self._host = HostView(1, self._residencies.append)
        self._remembers_from = self._remembers_from_ns = 0
        self._context: set[int] = set()
        self._times: deque[tuple[int, int]] = deque([(0, 0)])
        """The time of an event now and then, as far back as is asked for."""
        self._first = 0
        self._last_ns: int | None = None
        self._handlers: dict[type[ev.Event], Callable[[Any, ft.Moment], None]] = {
            ev.Text: self._text,
            ev.Facts: self._read_facts,
            ev.HookFailed: self._hook_failed,
            ev.Queued: self._queued,
            ev.PrefixDigests: self._digests,
            ev.PrefixPoint: self._point,
            ev.Matched: self._matched,
            ev.LoadBackDecided: self._decided,
            ev.Admission: self._admission,
            ev.Prefill: self._prefill,
            ev.PrefillDone: self._prefill_done,
            ev.Released: self._released,
            ev.AbortedInQueue: self._aborted,
            ev.Inserted: self._inserted,
            ev.EvictBegin: self._evict_begin,
            ev.L1Room: self._l1_evictions.room,
            ev.EvictedL1: self._evicted,
            ev.EvictEnd: self._l1_evictions.end,
            ev.Reset: self._reset,
            ev.BackupQueued: self._backup_queued,
            ev.TransferStarted: self._transfers.started,
            ev.BackupAcked: self._transfers.backup_acked,
            ev.LoadQueued: self._load_queued,
            ev.LoadDone: self._load_done,
            ev.LoadWaited: self._load_waited,
            ev.HostAlloc: self._host_alloc,
            ev.HostFree: self._host_free,
            ev.HostClear: self._host_clear,
            ev.BackupRejected: self._backup_rejected,
            ev.EvictHostBegin: self._l2_evictions.begin,
            ev.EvictHost: self._evict_host,
            ev.BackupDigested: self._pages.backed_up,
            ev.LoadDigested: self._pages.loaded,
            ev.PrefetchAsked: self._prefetch_asked,
            ev.PrefetchDone: self._prefetch_done,
            ev.PrefetchRevoked: self._prefetch_revoked,
            ev.PrefetchStopped: self._storage.stopped,
            ev.StorageLookedUp: self._storage.looked_up,
            ev.StorageFailed: self._storage.failed,
            ev.StorageChanged: self._storage.changed,
            ev.StorageBackupQueued: self._storage.backup_queued,
            ev.StorageBackedUp: self._storage.backed_up,
            ev.SnapshotBegin: self._snapshot_begin,
            ev.InFlight: self._in_flight,
            ev.WaitingAtAttach: self._waiting_at_attach,
            ev.ResidentDigests: self._resident_digests,
            ev.ResidentNode: self._resident_node,
            ev.SnapshotEnd: self._snapshot_end,
        }

    def take(self, events: Iterable[ev.Event]) -> None:
        """Go on with these events, which follow those before."""
        for event in events:
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event, ft.Moment(event.seq, event.t_ns, type(event).__name__))
            self._first = self._first or event.seq
            self._gaps.before, self._last_ns = event.seq, event.t_ns
        if self._last_ns is not None:
            self._times.append((self._gaps.before, self._last_ns))

    def _name(self, number: int) -> str | None:
        return self._texts.get(number) if number else None

    # --- journal and instance ------------------------------------------------------------------------

    def _text(self, event: ev.Text, _: ft.Moment) -> None:
        # The recorder never gives a number away twice: from here on nobody knows whom an event names.
        known = self._texts.get(event.id)
        if known != event.text and (known is not None or event.id in self._texts_forgotten):
            self._renamed.append(event.seq)
        self._texts[event.id] = event.text

    def _read_facts(self, event: ev.Facts, moment: ft.Moment) -> None:
        known = self._described.says_instance
        wrong = self._described.read(event)
        if wrong is not None:
            self._anomalies.append(wrong)
        elif event.kind == ev.FactKind.INSTANCE:
            if self._transfers.any_seen and not known:
                # Nothing was known to check them with.
                self._gaps.since(0, event.seq, "transfers were recorded before what the instance is")
            page = self._described.now.instance.page_size
            if page is not None:
                self._host.page = max(page, 1)

    def _hook_failed(self, event: ev.HookFailed, _: ft.Moment) -> None:
        self._failures[self._name(event.hook) or str(event.hook)] = event.count

    def _reset(self, event: ev.Reset, moment: ft.Moment) -> None:
        self._tree.finish(moment)
        self._host.finish(moment)
        self._states.cleared(None, moment)
        self._epoch += 1
        self._epochs.append(ft.EpochFact(self._epoch, moment))
        page = self._host.page
        self._tree = TreeView(self._epoch, self._residencies.append)
        self._host = HostView(page, self._residencies.append, self._host.available)
        self._transfers.reset()
        self._inserting.clear()
        self._lost_while_copying(None)
        self._copying.clear()
        self._attached.reset()

    # --- requests ------------------------------------------------------------------------------------

    def _request(self, number: int, moment: ft.Moment) -> OpenRequest | None:
        request = self._open.get(self._name(number) or "")
        if request is not None:
            request.last = moment
        return request

    def _chain(self, number: int) -> Chain | None:
        return self._chains.get(self._name(number) or "")

    def _queued(self, event: ev.Queued | ev.WaitingAtAttach, moment: ft.Moment) -> None:
        rid = self._name(event.req)
        if rid is None:
            self._anomalies.append(f"event {event.seq} queues a request without a name")
            return
        if event.retracted:
            self._attempts[rid] += 1
        else:
            self._attempts[rid] = 1
            self._chains[rid] = Chain(rid, since=event.seq)
        request = OpenRequest(rid, self._attempts[rid], self._epoch, event.prompt_tokens, moment, moment)
        before = self._open.get(rid)
        if before is not None and before.released is None and not event.retracted:
            # Two requests with one id at a time: nobody can tell whose events follow.
            before.shared_id = request.shared_id = True
        if before is not None:
            self._asked.pop(rid, None)  # Storage is asked anew; an answer to what was asked before is none.
        self._open[rid] = request
        self._requests.append(request)

    def _digests(self, event: ev.PrefixDigests, _: ft.Moment) -> None:
        rid = self._name(event.req)
        if rid is None:
            return
        chain = self._chains.setdefault(rid, Chain(rid))
        if not chain.add_cells(event.grid, event.first_cell, event.digests):
            self._gaps.here(event.seq, f"the prefix digests of {rid} do not continue")

    def _point(self, event: ev.PrefixPoint, _: ft.Moment) -> None:
        chain = self._chain(event.req)
        if chain is not None and event.digests:
            chain.points[event.position] = event.digests[0]

    def _matched(self, event: ev.Matched, moment: ft.Moment) -> None:
        if self._nameless(event):
            return
        chain = self._chain(event.req)
        if event.purpose != ev.MatchPurpose.ADMISSION:
            self._tree.follow(event.path, chain)
            self._compare(event.path, chain, moment)
            return
        request = self._request(event.req, moment)
        if request is not None and request.released is not None:
            self._gaps.here(event.seq, f"request {request.rid} was matched after it had ended")
        self._undigested(event, chain)
        nodes = self._tree.matched(event.path, chain)
        self._compare(event.path, chain, moment)
        if request is None or request.admitted is not None:
            return
        request.prior = self._prior(chain)
        request.match = ft.MatchFact(
            moment,
            event.device,
            event.host,
            event.key_tokens,
            event.best_node,
            event.path,
            nodes,
            event.swa_host,
            event.mamba_host,
        )
        request.decision = None
        # Matched in another epoch than it was queued in: what counts is the cache that answered.
        request.epoch = self._epoch

    def _nameless(self, event: ev.Inserted | ev.Matched) -> bool:
        """An event for a request whose name was not recorded: whose tokens its path holds is not known."""
        if event.req and self._name(event.req) is None:
            self._gaps.here(event.seq, f"event {event.seq} is about a request without a name")
            return True
        return False

    def _undigested(self, event: ev.Inserted | ev.Matched, chain: Chain | None) -> None:
        """A path for a prompt whose digests do not reach as far: they are recorded before, so some are missing.

        Digests that come later could show that the path is another request's. Those of outputs need not be there.
        """
        if not event.req or not event.path:
            return
        request = self._open.get(self._name(event.req) or "")
        end = event.path[-1].end if request is None else min(event.path[-1].end, request.prompt_tokens)
        cells, points = (chain.cells, chain.points) if chain is not None else ([], {})
        grid = chain.grid if cells and chain is not None else cell_tokens(self._host.page)
        # Only a prompt of less than a cell has nothing but the digest of its end: behind a hole that is no help.
        covered, missing = (len(cells) * grid, grid) if cells or end >= grid else (max(points, default=0), 1)
        if end - covered >= missing:
            self._gaps.here(
                event.seq, f"event {event.seq} follows a path for a prompt whose digests do not reach as far"
            )

    def _compare(self, path: tuple[ev.PathNode, ...], chain: Chain | None, moment: ft.Moment) -> None:
        """The tree's own word on what is in L1, against what the events say: where they differ, some are missing."""
        for since, what in self._tree.contradictions(path, chain, moment):
            self._gaps.since(self._gaps.before if since is None else since, moment.seq, what)

    def _prior(self, chain: Chain | None) -> tuple[str | None, int, int]:
        """The earlier request that shares the longest prefix with a sequence."""
        if chain is not None:
            for index in range(len(chain.cells) - 1, -1, -1):
                seen = self._seen_cells.get(chain.cells[index])
                if seen is not None:
                    return seen[0], (index + 1) * chain.grid, seen[1]
        return None, 0, 0

    def _decided(self, event: ev.LoadBackDecided, moment: ft.Moment) -> None:
        request = self._request(event.req, moment)
        if request is not None and request.admitted is None:
            if request.decision is not None:
                self._gaps.here(event.seq, f"two load-back decisions for one match of {request.rid}")
            request.decision = ft.DecisionFact(
                moment, event.node, event.promised, event.loaded, event.wanted, event.reason
            )

    def _admission(self, event: ev.Admission, moment: ft.Moment) -> None:
        request = self._request(event.req, moment)
        if request is not None and event.admitted and request.admitted is None:
            request.admitted, request.admitted_prefix = moment, event.prefix

    def _prefill(self, event: ev.Prefill, moment: ft.Moment) -> None:
        request = self._request(event.req, moment)
        if request is not None:
            request.chunks.append(OpenChunk(moment, event.batch, event.start, event.end, bool(event.last)))

    def _prefill_done(self, event: ev.PrefillDone, moment: ft.Moment) -> None:
        request = self._request(event.req, moment)
        if request is None:
            return
        for chunk in request.chunks:
            if chunk.batch == event.batch and chunk.done is None:
                chunk.done, chunk.output_tokens = moment, event.output_tokens
                return
        # It may be of another request with this id; nobody can tell which of the other events are.
        request.shared_id = True
        self._gaps.here(event.seq, f"the result of a prefill of {request.rid} that was not launched, or not once more")

    def _released(self, event: ev.Released, moment: ft.Moment) -> None:
        request = self._request(event.req, moment)
        if request is not None and request.released is None:
            request.released, request.state = moment, event.state
            request.output_tokens = event.output_tokens
            request.cached = (
                event.cached_total,
                _told(event.cached_device),
                _told(event.cached_host),
                _told(event.cached_storage),
            )

    def _aborted(self, event: ev.AbortedInQueue, moment: ft.Moment) -> None:
        request = self._request(event.req, moment)
        if request is not None and request.released is None:
            request.released, request.state = moment, ev.ReleaseState.ABORTED

    # --- L1 ------------------------------------------------------------------------------------------

    def _inserted(self, event: ev.Inserted, moment: ft.Moment) -> None:
        request = self._request(event.req, moment)
        if self._nameless(event):
            return
        computed = request.computed() if request is not None and request.released is None else None
        if computed is not None and self._epochs and computed.moment.seq < self._epochs[-1].begin.seq:
            computed = None  # Computed into a cache that was emptied since.
        chain = self._chain(event.req)
        self._copied_while_inserting(event, chain)
        self._undigested(event, chain)
        self._tree.inserted(event.path, chain, self._name(event.req), computed, moment)
        self._compare(event.path, chain, moment)
        if chain is not None and chain.grid:
            for digest in chain.cells[: event.key_tokens // chain.grid]:
                self._seen_cells[digest] = (chain.rid, self._epoch)

    def _copied_while_inserting(self, event: ev.Inserted, chain: Chain | None) -> None:
        """A new node is backed up inside the insert that makes it: only the insert's end says whose prefix it holds."""
        for step in event.path if self._inserting else ():
            req, content = self._inserting.get(step.node, (0, None))
            if content is not None and req == event.req and (step.start, step.end) == (content.start, content.end):
                content.chain = chain
        self._inserting.clear()

    def _evict_begin(self, event: ev.EvictBegin, moment: ft.Moment) -> None:
        rids = tuple(self._texts.get(number, f"#{number}") for number in event.reqs)
        self._l1_evictions.begin(event, self._epoch, rids, moment)

    def _evicted(self, event: ev.EvictedL1, moment: ft.Moment) -> None:
        if event.how in _LEFT_L1:
            wrong = self._tree.impossible(event.node, event.start, event.end)
            if wrong is not None:
                self._gaps.here(event.seq, wrong)
        owner = self._tree.evicted(event.node, event.start, event.end, event.how, event.call, moment)
        self._l1_evictions.victim(event, owner, moment)
        plain = event.how in (ev.Eviction.DEMOTED, ev.Eviction.DROPPED) and event.start >= 0
        if plain and event.tokens not in (0, event.end - event.start):
            self._gaps.here(
                event.seq, f"node {event.node} was evicted with {event.tokens} tokens, it has other positions"
            )

    # --- L2 ------------------------------------------------------------------------------------------

    def _backup_queued(self, event: ev.BackupQueued, moment: ft.Moment) -> None:
        chain = self._tree.owner(event.node)
        content = Content("backup", event.seq, self._epoch, chain, event.node, event.start, event.end)
        if chain is None and not event.write_back:
            self._inserting[event.node] = (event.req, content)
        backup = OpenBackup(event, self._epoch, self._name(event.req), content, moment)
        self._backups.append(backup)
        self._backup_nodes[event.seq] = event.node
        self._transfers.backup_queued(backup)
        if event.start < 0 or event.end - event.start != event.tokens:
            self._gaps.here(event.seq, f"the positions of backup {event.seq} are not known")
        elif self._tree.elsewhere(event.node, event.start, event.end):
            self._gaps.here(event.seq, f"backup {event.seq} is of other positions than node {event.node} has")
        elif not self._host.written(event.slots, content):
            self._gaps.here(
                event.seq, f"the slots of backup {event.seq} were not allocated for it, or do not cover its tokens"
            )
        self._lost_while_copying(event.slots)

    def _load_queued(self, event: ev.LoadQueued, moment: ft.Moment) -> None:
        rid = self._name(event.req)
        request = self._request(event.req, moment)
        segments: tuple[ft.LoadSegment, ...] = ()
        covered = sum(run.length for run in event.slots)
        if event.start >= 0 and covered == event.tokens == event.end - event.start and self._host.whole(event.slots):
            segments = self._host.segments(event.slots, event.start, event.end, self._chain(event.req))
        else:
            self._gaps.here(event.seq, f"the slots or positions of load {event.seq} are not known")
        path: tuple[ev.PathNode, ...] = ()
        if request is None or request.match is None:
            self._gaps.here(event.seq, "a load-back was queued for a request that was not matched")
        else:
            path = request.match.path
            # What only passes through host memory is in no node until it is in L1.
            found = tiles(path, event.start, event.end) or self._described.now.transit_mode is not None
            if request.admitted is not None or not found:
                self._gaps.here(event.seq, "a load-back was queued for tokens that its request's match did not find")
        segments = tuple(self._with_tail(segment, path) for segment in segments)
        load = OpenLoad(event, self._epoch, rid, moment, segments, path)
        filled = [s for s in segments if s.origin == "prefetch" and s.usable and s.aligned and s.same_prefix]
        stored = [(s.start, s.end) for s in filled]
        self._tree.loading(event.start, event.end, path, event.seq, moment, stored)
        self._loads.append(load)
        self._copying[event.seq] = load
        self._transfers.load_queued(load)
        if request is not None:
            request.loads.append(event.seq)

    def _with_tail(self, segment: ft.LoadSegment, path: tuple[ev.PathNode, ...]) -> ft.LoadSegment:
        """Where the digests do not reach the segment's end, the radix match must lead to the node that was written."""
        found = segment.origin == "snapshot"
        if segment.same_prefix is not True or (segment.digest_to >= segment.end and not found):
            return segment
        written = self._backup_nodes.get(segment.origin_id)
        # Nobody saw the slots of a node that was found being written: the match must lead to all of it.
        begin = segment.start if found else max(segment.digest_to, segment.start)
        if written is not None and self._tree.came_from(written, begin, segment.end, path):
            return segment
        return msgspec.structs.replace(segment, same_prefix=None)

    def _load_done(self, event: ev.LoadDone, moment: ft.Moment) -> None:
        for load in self._transfers.load_done(event, moment):
            self._copying.pop(load.queued.seq, None)
            if load.epoch == self._epoch:
                queued = load.queued
                self._tree.loaded(queued.start, queued.end, load.rid, queued.seq, moment)

    def _load_waited(self, event: ev.LoadWaited, moment: ft.Moment) -> None:
        loads = [load for load in self._loads if load.transfer == event.transfer]
        if not loads or any(load.waited is not None for load in loads):
            self._gaps.here(event.seq, f"how transfer {event.transfer} was read was told for no load, or not once")
            for load in loads:
                load.read_early = True  # Which of the two is true is not known.
            return
        for load in loads:
            load.waited, load.waited_layers = moment, event.layers
            load.read_early = bool(event.early) or load.epoch != self._epoch

    def _host_alloc(self, event: ev.HostAlloc, moment: ft.Moment) -> None:
        if event.pool != ANCHOR_POOL:
            self._states.taken(event, self._epoch, moment)
        else:
            taken = sum(run.length for run in event.slots)
            self._check_count(event, -taken)
            self._host.taken(event.slots)
            self._lost_while_copying(event.slots)

    def _host_free(self, event: ev.HostFree, moment: ft.Moment) -> None:
        if event.pool != ANCHOR_POOL:
            self._states.freed(event, moment)
            return
        self._check_count(event, sum(run.length for run in event.slots))
        closed = len(self._residencies)
        self._host.freed(event.slots, moment)
        self._l2_evictions.freed(event.slots, self._residencies[closed:], moment)
        self._lost_while_copying(event.slots)

    def _lost_while_copying(self, slots: tuple[ev.Run, ...] | None) -> None:
        """Slots (None: all) were given back or taken for something else: a read of them under way is worth nothing."""
        for load in self._copying.values():
            if slots is None or overlap(load.queued.slots, slots):
                load.freed = True

    def _check_count(self, event: ev.HostAlloc | ev.HostFree, change: int) -> None:
        wrong = self._host.count(event.available, change)
        if wrong is not None:
            self._gaps.since(self._counted, event.seq, wrong)
        self._counted = event.seq

    def _host_clear(self, event: ev.HostClear, moment: ft.Moment) -> None:
        if event.pool != ANCHOR_POOL:
            self._states.cleared(event.pool, moment)
        else:
            self._host.finish(moment)
            self._host.count(event.available, 0)
            self._lost_while_copying(None)
            self._counted = event.seq

    def _backup_rejected(self, event: ev.BackupRejected, moment: ft.Moment) -> None:
        owner, start, end = self._tree.holds(event.node)
        rid = self._name(event.req)
        self._rejections.append(
            ft.Rejection(moment, self._epoch, rid, owner or rid, event.node, start, end, event.tokens, event.available)
        )

    def _evict_host(self, event: ev.EvictHost, moment: ft.Moment) -> None:
        self._l2_evictions.end(event, self._epoch, self._name(event.req), moment)

    # --- L3 ------------------------------------------------------------------------------------------

    def _prefetch_asked(self, event: ev.PrefetchAsked, moment: ft.Moment) -> None:
        self._storage.asked(event, moment)
        rid = self._name(event.req)
        if rid is not None and event.issued:
            self._asked[rid] = moment

    def _prefetch_revoked(self, event: ev.PrefetchRevoked, moment: ft.Moment) -> None:
        self._storage.revoked(event, moment)
        self._asked.pop(self._name(event.req) or "", None)

    def _prefetch_done(self, event: ev.PrefetchDone, moment: ft.Moment) -> None:
        self._storage.done(event, moment)
        rid = self._name(event.req)
        prefetch = ft.Prefetch(
            rid,
            self._epoch,
            event.start,
            event.completed,
            event.existing,
            event.loaded,
            bool(event.deadline),
            event.slots,
            self._asked.pop(rid or "", None),
            moment,
        )
        self._prefetches.append(prefetch)
        if sum(run.length for run in event.slots) != event.completed:
            self._gaps.here(event.seq, f"the slots of prefetch {event.seq} are not those of its tokens")
        if not event.loaded:
            return
        # The copies of what L2 held already were freed; the rest is new L2 content from storage.
        begin = event.start + event.existing
        kept = skip(event.slots, event.existing)
        content = Content("prefetch", event.seq, self._epoch, self._chain(event.req), -1, begin, begin + event.loaded)
        if self._described.now.transit_mode is None:
            content.usable = moment
        if not self._host.written(kept, content):
            self._gaps.here(event.seq, f"the slots of prefetch {event.seq} do not cover its tokens")

    # --- attached to a running server ----------------------------------------------------------------

    def _snapshot_begin(self, event: ev.SnapshotBegin, _: ft.Moment) -> None:
        if not self._attached.begin():
            self._gaps.here(event.seq, "what was there before was looked at twice")
        wrong = self._host.count(event.available, 0)
        if wrong is not None:
            self._gaps.since(self._counted, event.seq, wrong)
        self._counted = event.seq

    def _snapshot_end(self, _: ev.SnapshotEnd, __: ft.Moment) -> None:
        self._attached.end()

    def _outside(self, event: ev.Event) -> bool:
        """Something is told that only a look at attach can find, and there is none."""
        wrong = self._attached.outside(event)
        if wrong is not None:
            self._gaps.here(event.seq, wrong)
        return wrong is not None

    def _in_flight(self, event: ev.InFlight, _: ft.Moment) -> None:
        self._outside(event)
        self._transfers.in_flight(event)

    def _waiting_at_attach(self, event: ev.WaitingAtAttach, moment: ft.Moment) -> None:
        self._queued(event, moment)

    def _resident_digests(self, event: ev.ResidentDigests, _: ft.Moment) -> None:
        self._attached.digests(event)

    def _resident_node(self, event: ev.ResidentNode, moment: ft.Moment) -> None:
        if self._outside(event):
            return
        again = f"node {event.node} was found twice" if self._attached.found_before(event.node) else None
        chain = self._attached.chain_of(event)
        wrong = self._tree.seen_at_attach(event, chain, moment) or again
        slots: tuple[ev.Run, ...] = ()
        if wrong is None and event.l2 == ev.AtAttach.RESIDENT:
            content = Content("snapshot", event.seq, self._epoch, chain, event.node, event.start, event.end, moment)
            if self._host.found(event.slots, content):
                slots = event.slots
                self._backup_nodes[event.seq] = event.node
            else:
                wrong = f"the slots that node {event.node} is said to have are taken, or are not its tokens"
        if wrong is not None:
            self._gaps.here(event.seq, wrong)
            self._attached.unsound(event.node)
        self._found.append(
            ft.Found(event.seq, self._epoch, event.node, event.start, event.end, event.l1, event.l2, slots, moment)
        )

    # --- result --------------------------------------------------------------------------------------

    def _checked(self, load: ft.Load, backups: Mapping[int, ft.Backup]) -> ft.Load:
        layers = self._described.now.instance.layers
        checks = self._pages.checks(load, backups, self._host.page, layers)
        return msgspec.structs.replace(load, checks=checks) if checks else load

    def facts(self, journal: Recorded, traceparents: Mapping[str, str] | None = None) -> ft.InstanceFacts:
        """What is known after the events so far. ``traceparents``: request id -> W3C context (HTTP process)."""
        traceparents = traceparents or {}
        backups = {b.queued.seq: b.freeze() for b in self._backups}
        gaps = [(gap.first, gap.last, gap.cause) for gap in journal.gaps] + self._gaps.found
        for first in self._l1_evictions.without_end():
            gaps.append((first, self._gaps.before, "the end of an eviction was not recorded"))
        for first in self._renamed:
            gaps.append((first, self._gaps.before, "a text's number was given a second meaning"))
        return ft.InstanceFacts(
            instance=journal.instance,
            role=journal.role,
            pid=journal.pid,
            monotonic_ns=journal.monotonic_ns,
            wall_ns=journal.wall_ns,
            facts=self._described.now,
            hooks=self._described.hooks,
            hook_failures=dict(self._failures),
            requests=tuple(r.freeze(traceparents.get(r.rid)) for r in self._requests),
            backups=tuple(backups.values()),
            evictions=self._l1_evictions.freeze(),
            host_evictions=self._l2_evictions.freeze(),
            loads=tuple(self._checked(load.freeze(), backups) for load in self._loads),
            prefetches=tuple(self._prefetches),
            residencies=(*self._residencies, *self._tree.open(), *self._host.open()),
            found=tuple(self._found),
            chains=dict(self._chains),
            rejections=tuple(self._rejections),
            storage=self._storage.freeze(),
            states=self._states.freeze(),
            epochs=tuple(self._epochs),
            gaps=tuple(gaps),
            anomalies=(*journal.anomalies, *self._anomalies),
            closed=journal.closed,
            first_seq=self._first,
            last_seq=self._gaps.before,
            last_ns=journal.monotonic_ns if self._last_ns is None else self._last_ns,
            remembers_from=self._remembers_from,
            context=frozenset(self._context),
            remembers_from_ns=journal.wall_ns + self._remembers_from_ns - journal.monotonic_ns
            if self._remembers_from
            else 0,
        )

    # --- records without an end ----------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The last event's number."""
        return self._gaps.before

    @property
    def remembers_from(self) -> int:
        """See :attr:`~kvwitness.tracer.ledger.facts.InstanceFacts.remembers_from`."""
        return self._remembers_from

    def rids(self) -> frozenset[str]:
        """The requests that are remembered."""
        return frozenset(request.rid for request in self._requests)

    def settled(self, before: int) -> frozenset[str]:
        """Requests that ended before event ``before``."""
        running = {r.rid for r in self._requests if r.released is None or r.last.seq >= before}
        return self.rids() - running

    def forget(self, rids: frozenset[str], before: int) -> None:
        """Drop these requests (of those :meth:`settled` says), and what happened before ``before`` but to others.

        A request whose prefix a tier still holds stays as what others were built on, and is not judged any more.
        What is claimed of those that are left is what would have been claimed: they, what a tier holds and what is
        under way keep all that their chains rest on. Why something was *not* reused may lie before:
        :attr:`~kvwitness.tracer.ledger.facts.InstanceFacts.remembers_from`.
        """
        if before > self._remembers_from:
            self._remembers_from, self._remembers_from_ns = before, self._time_of(before)
        self._tree.forget({content.node for content in self._host.contents()})
        self._context.update(r.queued.seq for r in self._requests if r.rid in rids)
        judged = [r for r in self._requests if r.queued.seq not in self._context]
        live = self._live()
        gone = self.rids() - live - {r.rid for r in judged}
        self._requests = [r for r in self._requests if r.rid not in gone]
        self._context &= {r.queued.seq for r in self._requests}
        for rid in gone:
            for by_rid in (self._chains, self._attempts, self._open, self._asked):
                by_rid.pop(rid, None)
        self._seen_cells = {digest: seen for digest, seen in self._seen_cells.items() if seen[0] not in gone}
        for number in [number for number, text in self._texts.items() if text in gone]:
            del self._texts[number]
            self._texts_forgotten.add(number)
        keep: set[str | None] = {*live, *(r.rid for r in self._requests)}
        told = self._tree.loads()
        for request in self._requests:
            told.update(request.loads)
            nodes = request.match.nodes if request.match is not None else ()
            told.update(node.load for node in nodes if node.load is not None)
        self._loads = [
            load
            for load in self._loads
            if load.moment.seq >= before or load.rid in keep or load.moment.seq in told or not load.is_over(self._epoch)
        ]
        used = {segment.origin_id for load in self._loads for segment in load.segments}
        used.update(content.id for content in self._host.contents())
        self._backups = [
            backup
            for backup in self._backups
            if backup.moment.seq >= before
            or backup.moment.seq in used
            or keep & {backup.rid, backup.owner}
            or not backup.is_over(self._epoch)
        ]
        # Whose prefill a copy goes back to, also when nothing else of that request is left.
        keep.update(backup.owner for backup in self._backups if backup.moment.seq in used)
        ids = used.union(backup.moment.seq for backup in self._backups)
        self._backup_nodes = {number: node for number, node in self._backup_nodes.items() if number in ids}
        self._l1_evictions.forget(keep, judged, before)
        self._l2_evictions.forget(keep, before)
        self._rejections = [one for one in self._rejections if one.moment.seq >= before or one.owner in keep]
        self._prefetches = [
            one for one in self._prefetches if one.done.seq >= before or one.done.seq in used or one.rid in keep
        ]
        # In place: the tiers add to this very list.
        self._residencies[:] = [
            one for one in self._residencies if one.until is None or one.until.seq >= before or one.owner in keep
        ]
        copies = {b.transfer for b in self._backups} | {load.transfer for load in self._loads}
        self._pages.forget(copies, before)
        self._storage.forget(keep, before)
        self._states.forget(keep, before)
        self._transfers.compact()
        self._texts_forgotten.compact()

    def _time_of(self, seq: int) -> int:
        """A monotonic time that is not before an event's."""
        while len(self._times) > 1 and self._times[0][0] < seq:
            self._times.popleft()
        return self._times[0][1]

    def _live(self) -> set[str]:
        """Whose prefixes a tier holds, or is about to."""
        return {*self._tree.owners(), *(c.chain.rid for c in self._host.contents() if c.chain is not None)}


def _told(tokens: int) -> int | None:
    """A number that the server told; SGLang before 0.5.9 does not tell tokens by tier (negative)."""
    return None if tokens < 0 else tokens


def derive(journal: Journal, traceparents: Mapping[str, str] | None = None) -> ft.InstanceFacts:
    """The facts of one scheduler's journal. ``traceparents``: request id -> W3C context (HTTP process)."""
    ledger = Ledger()
    ledger.take(journal.events)
    return ledger.facts(journal, traceparents)


def traceparents_of(journals: list[Journal]) -> dict[str, str]:
    """Request id -> W3C trace context, from the journals of the HTTP processes."""
    found: dict[str, str] = {}
    for journal in journals:
        texts = {event.id: event.text for event in journal.events if isinstance(event, ev.Text)}
        for event in journal.events:
            if isinstance(event, ev.HttpRequest) and event.req in texts:
                found[texts[event.req]] = event.traceparent
    return found
