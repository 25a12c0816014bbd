"""What happened, as plain lists: the recorded events of one scheduler, replayed from the start.

Written from the evidence model and the event schema alone, as the oracle's ground. Everything is kept with
the sequence number at which it happened; nothing is concluded here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvwitness.patches.schema import events as ev

TREE_FAMILY = {"HiRadixCache": "hiradix", "UnifiedRadixCache": "unified"}


@dataclass(eq=False)
class Use:
    """One use of a request id, over its retractions: one token sequence with its digests."""

    rid: str
    grid: int = 0
    cells: list[bytes] = field(default_factory=list)
    points: dict[int, bytes] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)


def reach(a: Use, b: Use) -> tuple[int, int | None]:
    """Up to where the digests show two sequences to be equal, and from where on they show a difference."""
    if not a.grid or a.grid != b.grid:
        return 0, None
    known = [((i + 1) * a.grid, x == y) for i, (x, y) in enumerate(zip(a.cells, b.cells, strict=False))]
    known += [(at, digest == b.points[at]) for at, digest in a.points.items() if at in b.points]
    different = min((at for at, equal in known if not equal), default=None)
    # Equal behind a difference: no honest record; the difference counts.
    return max((at for at, equal in known if equal and (different is None or at < different)), default=0), different


@dataclass(eq=False)
class Attempt:
    """One stay in the queue, and the request's own events until the next one."""

    use: Use
    queued: ev.Queued | ev.WaitingAtAttach
    events: list[ev.Event] = field(default_factory=list)
    interrupted: bool = False
    """The same id was queued again although this attempt had not ended."""


@dataclass(eq=False)
class Copy:
    """A backup (host slots written) or a load-back (host slots read)."""

    queued: ev.BackupQueued | ev.LoadQueued
    use: Use | None
    attempt: Attempt | None
    epoch: int
    started: ev.TransferStarted | None = None
    ended: ev.BackupAcked | ev.LoadDone | None = None
    wrong: str = ""

    def page_of(self, position: int, page: int) -> int | None:
        """The host page that holds (or is read as) the page of tokens at ``position``."""
        offset = position - self.queued.start
        for run in self.queued.slots:
            if offset < run.length:
                return (run.start + offset) // page
            offset -= run.length
        return None


@dataclass(eq=False)
class Fetch:
    """What a prefetch from storage put into host slots, and for which stay of which request in the queue."""

    done: ev.PrefetchDone
    use: Use | None
    attempt: Attempt | None
    epoch: int
    asked: ev.PrefetchAsked | None
    looked_up: ev.StorageLookedUp | None
    wrong: str = ""

    def page_of(self, position: int, page: int) -> int | None:
        """The host page that was filled with the page of tokens at ``position``."""
        offset = position - self.done.start
        if not self.done.existing <= offset < self.done.completed:
            return None
        for run in self.done.slots:
            if offset < run.length:
                return (run.start + offset) // page
            offset -= run.length
        return None


@dataclass
class Sighting:
    """A request's path went through a node."""

    seq: int
    use: Use
    step: ev.PathNode


@dataclass(eq=False)
class Found:
    """A node that was there when the recorder was attached. Its prefix is a sequence like a request's."""

    event: ev.ResidentNode
    use: Use
    epoch: int
    wrong: str = ""

    def page_of(self, position: int, page: int) -> int | None:
        """The host page that held the page of tokens at ``position``."""
        slots = [slot for run in self.event.slots for slot in range(run.start, run.start + run.length)]
        offset = position - self.event.start
        return slots[offset] // page if 0 <= offset < len(slots) else None


@dataclass
class PageEvent:
    """Something happened to a host page: alloc, free, write (a backup, or storage); or it was found in use."""

    seq: int
    what: str
    copy: Copy | None = None
    found: Found | None = None
    fetch: Fetch | None = None


class Timeline:
    """The whole journal. ``lanes`` are the events in the order in which each thread wrote them."""

    def __init__(self, lanes: Sequence[Sequence[ev.Event]]) -> None:
        self.bad: list[tuple[int, int, str]] = []
        """Between these two numbers something is wrong: nothing that rests on that stretch is established."""
        self.instance: dict[str, Any] = {}
        self.hooks: list[dict[str, Any]] | None = None
        self.failed: set[str] = set()
        self.uses: list[Use] = []
        self.epoch_of: dict[int, int] = {}
        self.resets: list[int] = []
        self.copies: list[Copy] = []
        self.pages: dict[int, list[PageEvent]] = defaultdict(list)
        self.found: list[Found] = []
        self.fetches: list[Fetch] = []
        self.storage: list[tuple[int, bool]] = []
        """When a storage backend was attached or detached, as far as that took effect."""
        self._node_digests: dict[int, ev.ResidentDigests] = {}
        self._unseen: dict[int, list[tuple[tuple[int, ...], int]]] = {ev.Direction.D2H: [], ev.Direction.H2D: []}
        """Copies that were queued and not launched at the attaching: nodes, tokens."""
        self.emptied: list[int] = []
        """When all of the host pool was emptied."""
        self.sightings: dict[tuple[int, int], list[Sighting]] = defaultdict(list)
        self.inserts: list[tuple[int, ev.Inserted, Use]] = []
        self.evicted: list[tuple[int, ev.EvictedL1]] = []
        self._texts: dict[int, str] = {}
        self._redefined: set[int] = set()
        self._current: dict[str, Attempt] = {}
        self._epoch = 0
        self._waiting: dict[int, list[Copy]] = {ev.Direction.D2H: [], ev.Direction.H2D: []}
        self._last_start = {ev.Direction.D2H: 0, ev.Direction.H2D: 0}
        self._running: dict[int, list[Copy]] = {}
        self._transfers: set[int] = set()
        self._available: int | None = None
        self._last_pool = 0
        self._calls: list[tuple[ev.EvictBegin, int]] = []
        self._unqueued: dict[str, Use] = {}
        self._starts: dict[tuple[int, int], int] = {}
        self.split_from: dict[tuple[int, int], int] = {}
        self.events = self._in_order(lanes)
        for event in self.events:
            self.epoch_of[event.seq] = self._epoch
            handler = getattr(self, "_on_" + type(event).__name__, None)
            if handler is not None:
                handler(event)
        for begin, _ in self._calls:
            self.bad.append((begin.seq, self.events[-1].seq, "an eviction that does not end"))

    @property
    def page(self) -> int:
        return int(self.instance.get("page_size") or 1)

    def _in_order(self, lanes: Sequence[Sequence[ev.Event]]) -> list[ev.Event]:
        by_seq: dict[int, ev.Event] = {}
        for lane in lanes:
            seq = clock = 0
            for event in lane:
                if event.seq <= seq:
                    self.bad.append((event.seq, seq, "repeated or out of order"))
                if event.t_ns < clock:
                    self.bad.append((min(seq, event.seq), max(seq, event.seq), "the clock runs backwards"))
                if event.seq in by_seq:
                    self.bad.append((event.seq, event.seq, "repeated"))
                seq, clock = max(seq, event.seq), max(clock, event.t_ns)
                by_seq.setdefault(event.seq, event)
        ordered = [by_seq[seq] for seq in sorted(by_seq)]
        before = 0
        for event in ordered:
            if event.seq != before + 1:
                self.bad.append((before + 1, event.seq - 1, "missing"))
            before = event.seq
        return ordered

    # --- names ---------------------------------------------------------------------------------------

    def _on_Text(self, event: ev.Text) -> None:
        if event.id in self._texts and self._texts[event.id] != event.text:
            self._redefined.add(event.id)
            self.bad.append((event.seq, event.seq, "a number gets a second meaning"))
        self._texts[event.id] = event.text

    def _rid(self, number: int) -> str | None:
        return None if number in self._redefined else self._texts.get(number)

    def _attempt(self, event: Any) -> Attempt | None:
        rid = self._rid(event.req) if event.req else None
        attempt = self._current.get(rid) if rid is not None else None
        if attempt is not None:
            attempt.events.append(event)
        return attempt

    def _on_Facts(self, event: ev.Facts) -> None:
        facts = json.loads(event.json)
        if event.kind == ev.FactKind.COVERAGE:
            self.hooks = facts.get("hooks")
        elif event.kind == ev.FactKind.INSTANCE:
            self.instance = facts

    def _on_HookFailed(self, event: ev.HookFailed) -> None:
        self.failed.add(self._texts.get(event.hook, "?"))

    # --- requests ------------------------------------------------------------------------------------

    def _on_Queued(self, event: ev.Queued | ev.WaitingAtAttach) -> None:
        rid = self._rid(event.req)
        if rid is None:
            return
        before, cut = self._current.get(rid), False
        if (
            before is not None
            and not event.retracted
            and not any(isinstance(e, ev.Released | ev.AbortedInQueue) for e in before.events)
        ):
            before.interrupted = cut = True
        if event.retracted and before is not None:
            use = before.use
        else:
            # Back after a retraction, and the queueing before was not recorded: the digests then may have been.
            use = self._unqueued.pop(rid, Use(rid)) if event.retracted else Use(rid)
            self.uses.append(use)
        attempt = Attempt(use, event, interrupted=cut)
        use.attempts.append(attempt)
        self._current[rid] = attempt

    _on_WaitingAtAttach = _on_Queued

    def _use(self, event: Any) -> Use | None:
        """Whose tokens an event speaks of, also where the queueing was not recorded."""
        attempt = self._attempt(event)
        if attempt is not None:
            return attempt.use
        rid = self._rid(event.req) if event.req else None
        return None if rid is None else self._unqueued.setdefault(rid, Use(rid))

    def _on_PrefixDigests(self, event: ev.PrefixDigests) -> None:
        use = self._use(event)
        if use is None:
            return
        use.grid = use.grid or event.grid
        if event.grid != use.grid or event.first_cell != len(use.cells):
            self.bad.append((event.seq, event.seq, "digests do not continue"))
        else:
            use.cells.extend(event.digests)

    def _on_PrefixPoint(self, event: ev.PrefixPoint) -> None:
        use = self._use(event)
        if use is not None and event.digests:
            use.points[event.position] = event.digests[0]

    def _on_Matched(self, event: ev.Matched) -> None:
        use = self._use(event)
        if use is not None:
            self._see(event.seq, use, event.path)

    def _see(self, seq: int, use: Use, path: tuple[ev.PathNode, ...]) -> None:
        numbers = {step.node for step in path}
        for step in path:
            if (self._epoch, step.node) not in self.sightings:
                self._split_from(use, step, numbers)
            self._starts[(self._epoch, step.node)] = step.start
            self.sightings[(self._epoch, step.node)].append(Sighting(seq, use, step))

    def _split_from(self, use: Use, step: ev.PathNode, path: set[int]) -> None:
        """A new number on a path: the part in front of a node that began there, if the record shows which.

        The path goes on through that node, or the digests say it: no two children of a node begin with the same
        page, so one equal page behind the common start is enough. Two that do cannot have been there together: the
        later one took the place of the earlier one.
        """
        found: list[tuple[int, int]] = []
        for (epoch, node), start in self._starts.items():
            if epoch != self._epoch or start != step.start:
                continue
            seen = self.sightings[(epoch, node)]
            if seen[-1].step.end > step.end and any(
                node in path or s.use is use or reach(s.use, use)[0] >= start + self.page for s in seen
            ):
                gone = [event.seq for when, event in self.evicted if when == epoch and event.node == node]
                found.append((max([seen[-1].seq, *gone]), node))
        if found:
            _, node = max(found)
            self.split_from[(self._epoch, step.node)] = node
            self._starts[(self._epoch, node)] = step.end

    def _bytes_fit(self, event: ev.TransferStarted) -> bool:
        """Tokens times bytes per token; state of further pools comes on top."""
        per_token = int(self.instance.get("bytes_per_token") or 0)
        if per_token <= 0:
            return False
        if len(self.instance.get("pools") or ()) > 1:
            return event.bytes >= event.tokens * per_token
        return event.bytes == event.tokens * per_token

    def ancestors(self, epoch: int, node: int) -> set[int]:
        """What a node was split off from, and that from what, as far as the record shows it."""
        found: set[int] = set()
        while (epoch, node) in self.split_from and self.split_from[(epoch, node)] not in found:
            node = self.split_from[(epoch, node)]
            found.add(node)
        return found

    def _plain(self, event: Any) -> None:
        self._attempt(event)

    _on_LoadBackDecided = _on_Admission = _on_Prefill = _on_PrefillDone = _plain
    _on_Released = _on_AbortedInQueue = _on_PrefetchAsked = _on_StorageLookedUp = _on_PrefetchRevoked = _plain

    # --- L1 ------------------------------------------------------------------------------------------

    def _on_Inserted(self, event: ev.Inserted) -> None:
        use = self._use(event)
        if use is not None:
            self._see(event.seq, use, event.path)
            self.inserts.append((self._epoch, event, use))

    def _on_EvictBegin(self, event: ev.EvictBegin) -> None:
        self._calls.append((event, 0))

    def _on_EvictedL1(self, event: ev.EvictedL1) -> None:
        self.evicted.append((self._epoch, event))
        if not self._calls or self._calls[-1][0].call != event.call:
            self.bad.append((event.seq, event.seq, "evicted outside an eviction"))
        else:
            begin, tokens = self._calls[-1]
            self._calls[-1] = (begin, tokens + event.tokens)
        plain = event.how in (ev.Eviction.DEMOTED, ev.Eviction.DROPPED) and event.start >= 0
        if plain and event.tokens not in (0, event.end - event.start):
            self.bad.append((event.seq, event.seq, "evicted tokens are not the node's"))

    def _on_EvictEnd(self, event: ev.EvictEnd) -> None:
        if not self._calls or self._calls[-1][0].call != event.call:
            self.bad.append((event.seq, event.seq, "an eviction that did not begin"))
            return
        begin, tokens = self._calls.pop()
        if tokens != event.freed:
            self.bad.append((begin.seq, event.seq, "an eviction freed other tokens than its victims had"))

    def _on_Reset(self, event: ev.Reset) -> None:
        self._epoch += 1
        self.resets.append(event.seq)
        for waiting in self._waiting.values():
            waiting.clear()
        for unseen in self._unseen.values():
            unseen.clear()
        self._running.clear()
        self._node_digests.clear()

    # --- L2 ------------------------------------------------------------------------------------------

    def _count(self, event: Any, change: int) -> None:
        if event.pool != 0:
            return
        if self._available is not None and self._available + change != event.available:
            self.bad.append((self._last_pool, event.seq, "the host pool counts otherwise"))
        self._available, self._last_pool = event.available, event.seq

    def _each_page(self, slots: tuple[ev.Run, ...]) -> list[int]:
        return [n for run in slots for n in range(run.start // self.page, -(-(run.start + run.length) // self.page))]

    def _on_HostAlloc(self, event: ev.HostAlloc) -> None:
        self._count(event, -sum(run.length for run in event.slots))
        self._touch(event, "alloc")

    def _on_HostFree(self, event: ev.HostFree) -> None:
        self._count(event, sum(run.length for run in event.slots))
        self._touch(event, "free")

    def _touch(self, event: ev.HostAlloc | ev.HostFree, what: str) -> None:
        if event.pool == 0:
            for number in self._each_page(event.slots):
                self.pages[number].append(PageEvent(event.seq, what))

    def _on_HostClear(self, event: ev.HostClear) -> None:
        if event.pool == 0:
            self.emptied.append(event.seq)
            self._available, self._last_pool = event.available, event.seq

    def _queue(self, event: ev.BackupQueued | ev.LoadQueued, direction: int) -> Copy:
        attempt = self._attempt(event)
        copy = Copy(event, attempt.use if attempt else None, attempt, self._epoch)
        numbers = self._each_page(event.slots)
        held = sum(run.length for run in event.slots)
        if not held == event.tokens == event.end - event.start:
            copy.wrong = "positions, tokens and slots differ in number"
        elif any(run.start % self.page or run.length % self.page for run in event.slots):
            copy.wrong = "slots that are not pages"
        elif len(set(numbers)) != len(numbers):
            copy.wrong = "a page twice"
        self._waiting[direction].append(copy)
        self.copies.append(copy)
        return copy

    def _on_BackupQueued(self, event: ev.BackupQueued) -> None:
        copy = self._queue(event, ev.Direction.D2H)
        for number in self._each_page(event.slots):
            self.pages[number].append(PageEvent(event.seq, "write", copy))

    def _on_LoadQueued(self, event: ev.LoadQueued) -> None:
        self._queue(event, ev.Direction.H2D)

    def _on_TransferStarted(self, event: ev.TransferStarted) -> None:
        if event.direction not in self._waiting:
            self.bad.append((event.seq, event.seq, "a transfer in no known direction"))
            return
        waiting = self._waiting[event.direction]
        since, self._last_start[event.direction] = self._last_start.get(event.direction, 0), event.seq
        unseen = self._unseen[event.direction]
        before = [node for nodes, _ in unseen for node in nodes]
        wrong = ""
        if event.transfer in self._transfers:
            wrong = "the transfer's number is taken"
        elif sorted(event.nodes) != sorted([*before, *(c.queued.node for c in waiting)]):
            wrong = "the transfer's nodes are not those that wait"
        elif event.tokens != sum(c.queued.tokens for c in waiting) + sum(tokens for _, tokens in unseen):
            wrong = "the transfer's tokens do not add up"
        elif not self._bytes_fit(event):
            wrong = "the transfer's bytes do not add up"
        elif len(set(event.nodes)) != len(event.nodes):
            wrong = "a node twice in one transfer"
        if wrong:
            self.bad.append((since, event.seq, wrong))
        self._transfers.add(event.transfer)
        self._running[event.transfer] = list(waiting)
        for copy in waiting:
            copy.started = event
        waiting.clear()
        unseen.clear()

    def _on_BackupAcked(self, event: ev.BackupAcked) -> None:
        waiting = self._waiting[ev.Direction.D2H]
        for copy in [c for c in waiting if c.queued.node == event.node]:
            self.bad.append((copy.queued.seq, event.seq, "a copy that was acknowledged without being launched"))
            waiting.remove(copy)
        for copy in self._running.get(event.transfer, []):
            if isinstance(copy.queued, ev.BackupQueued) and copy.queued.node == event.node and copy.ended is None:
                copy.ended = event

    def _on_LoadDone(self, event: ev.LoadDone) -> None:
        for copy in self._running.get(event.transfer, []):
            start = copy.started
            if start is None or not isinstance(copy.queued, ev.LoadQueued) or copy.ended is not None:
                continue
            if (event.tokens, event.bytes, sorted(event.nodes)) == (start.tokens, start.bytes, sorted(start.nodes)):
                copy.ended = event

    # --- L3 ------------------------------------------------------------------------------------------

    def _on_StorageChanged(self, event: ev.StorageChanged) -> None:
        if event.ok:
            self.storage.append((event.seq, bool(event.attach)))

    def _on_PrefetchDone(self, event: ev.PrefetchDone) -> None:
        attempt = self._attempt(event)
        before = attempt.events if attempt is not None else []
        asked = [e for e in before if isinstance(e, ev.PrefetchAsked)]
        told = [e for e in before if isinstance(e, ev.StorageLookedUp)]
        ends = [e for e in before if isinstance(e, ev.PrefetchDone | ev.PrefetchRevoked)]
        fetch = Fetch(
            event,
            attempt.use if attempt else None,
            attempt,
            self._epoch,
            asked[-1] if asked else None,
            told[-1] if told else None,
        )
        numbers = self._each_page(event.slots)
        if not event.completed == event.existing + event.loaded == sum(run.length for run in event.slots):
            fetch.wrong = "tokens and slots differ in number"
        elif any(run.start % self.page or run.length % self.page for run in event.slots):
            fetch.wrong = "slots that are not pages"
        elif len(set(numbers)) != len(numbers) or event.existing % self.page:
            fetch.wrong = "a page twice, or a part of a page"
        elif fetch.asked is None or not fetch.asked.issued:
            fetch.wrong = "a prefetch that was not asked for"
        elif any(end.seq > fetch.asked.seq for end in ends[:-1]):
            fetch.wrong = "a prefetch that ends twice"
        elif event.start != fetch.asked.start or event.completed > fetch.asked.tokens:
            fetch.wrong = "a prefetch of other tokens than were asked for"
        elif fetch.looked_up is not None and event.completed > fetch.looked_up.tokens:
            fetch.wrong = "a prefetch of more tokens than storage had"
        self.fetches.append(fetch)
        for number in numbers[event.existing // self.page :]:
            self.pages[number].append(PageEvent(event.seq, "write", fetch=fetch))

    # --- what was there before -----------------------------------------------------------------------

    def _on_SnapshotBegin(self, event: ev.SnapshotBegin) -> None:
        if self._available is not None and self._available != event.available:
            self.bad.append((self._last_pool, event.seq, "the host pool counts otherwise"))
        self._available, self._last_pool = event.available, event.seq

    def _on_InFlight(self, event: ev.InFlight) -> None:
        if event.launched:
            if event.transfer in self._transfers:
                self.bad.append((event.seq, event.seq, "the transfer's number is taken"))
            self._transfers.add(event.transfer)
        elif event.direction in self._unseen:
            self._unseen[event.direction].append((event.nodes, event.tokens))

    def _on_ResidentDigests(self, event: ev.ResidentDigests) -> None:
        self._node_digests[event.node] = event

    def _on_ResidentNode(self, event: ev.ResidentNode) -> None:
        found = Found(event, Use(f"found {event.node}"), self._epoch)
        told = self._node_digests.pop(event.node, None)
        above = next((f for f in reversed(self.found) if f.epoch == self._epoch and f.event.node == event.parent), None)
        if event.parent < 0:
            cells: list[bytes] | None = [] if event.start == 0 else None
        else:
            cells = list(above.use.cells) if above is not None and above.event.end == event.start else None
        if told is None or told.grid <= 0 or cells is None or (above is not None and above.wrong):
            found.wrong = "its prefix was not recorded"
        elif above is not None and above.use.grid != told.grid:
            found.wrong = "its digests are of another grid than its parent's"
        elif len(cells) != told.first_cell or told.first_cell != event.start // told.grid:
            found.wrong = "its digests do not continue its parent's"
        elif len(cells) + len(told.digests) != event.end // told.grid:
            found.wrong = "its digests do not reach its end"
        else:
            found.use.grid, found.use.cells = told.grid, [*cells, *told.digests]
        self.found.append(found)
        key = (self._epoch, event.node)
        self._starts[key] = event.start
        self.sightings[key].append(
            Sighting(event.seq, found.use, ev.PathNode(event.node, event.start, event.end, int(event.l1 == 1)))
        )
        if event.l2 != ev.AtAttach.RESIDENT:
            return
        numbers = self._each_page(event.slots)
        held = sum(run.length for run in event.slots)
        if held != event.end - event.start or len(set(numbers)) != len(numbers):
            found.wrong = found.wrong or "its slots are not its tokens"
        elif any(run.start % self.page or run.length % self.page for run in event.slots):
            found.wrong = found.wrong or "slots that are not pages"
        for number in numbers:
            self.pages[number].append(PageEvent(event.seq, "found", found=found))
