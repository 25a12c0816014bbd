"""The relations between the events of one journal: who asked, what was copied, which slots, which node, when.

Built once from the events, as plain lists and dictionaries. Nothing is judged here: what a relation has to look like
is said by the rules (``record_rules``, ``claim_rules``). Written from docs/evidence-model.md and the event schema.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from kvwitness.patches.schema import events as ev
from soundness.things import Call, Copy, Fetch, Found, Launch, Sighting, Snapshot, Stay, Touch, Use

E = TypeVar("E", bound=ev.Event)
GONE = (ev.Eviction.DEMOTED, ev.Eviction.DROPPED, ev.Eviction.DROPPED_HOST_PRESSURE)
TOO_LONG = 1 << 22
"""Runs of more slots than this are not taken apart: no pool is that large."""
OF_A_REQUEST: tuple[type[ev.Event], ...] = (
    ev.Queued,
    ev.WaitingAtAttach,
    ev.PrefixDigests,
    ev.PrefixPoint,
    ev.Matched,
    ev.LoadBackDecided,
    ev.Admission,
    ev.Prefill,
    ev.PrefillDone,
    ev.Released,
    ev.AbortedInQueue,
    ev.Inserted,
    ev.LoadQueued,
    ev.PrefetchAsked,
    ev.PrefetchDone,
    ev.PrefetchRevoked,
    ev.PrefetchStopped,
    ev.StorageLookedUp,
    ev.StorageFailed,
)
"""Events of which the request that they name is the subject."""
_SUBJECTS = frozenset(OF_A_REQUEST)
Fact = tuple[int, dict[str, Any]]


class Relations:
    """One journal. ``lanes`` are its events in the order in which each thread wrote them."""

    def __init__(self, lanes: Sequence[Sequence[ev.Event]]) -> None:
        self.lanes = lanes
        self.events = _ordered(lanes)
        self.last = self.events[-1].seq if self.events else 0
        self._kinds: dict[type[ev.Event], list[Any]] = defaultdict(list)
        for event in self.events:
            self._kinds[type(event)].append(event)
        self.resets = [event.seq for event in self.of(ev.Reset)]
        self.emptied = [event.seq for event in self.of(ev.HostClear) if event.pool == 0]
        self.pool_events: list[ev.HostAlloc | ev.HostFree | ev.HostClear | ev.SnapshotBegin] = [
            e
            for e in self.events
            if isinstance(e, ev.SnapshotBegin)
            or (isinstance(e, ev.HostAlloc | ev.HostFree | ev.HostClear) and e.pool == 0)
        ]
        """What tells how many host slots are free."""
        self.texts: dict[int, list[ev.Text]] = defaultdict(list)
        for text in self.of(ev.Text):
            self.texts[text.id].append(text)
        self.coverage: list[tuple[int, list[dict[str, Any]]]] = []
        self.instance_facts: list[Fact] = []
        self.process_facts: list[Fact] = []
        self.unreadable: list[ev.Facts] = []
        self._read_facts()
        self.facts: dict[str, Any] = self.instance_facts[0][1] if self.instance_facts else {}
        self.process: dict[str, Any] = self.process_facts[0][1] if self.process_facts else {}
        self.page = _positive(self.facts.get("page_size")) or 1
        self.bytes_per_token = _positive(self.facts.get("bytes_per_token"))
        self.grid = -(-16 // self.page) * self.page
        """What the digests' cells have to be: the smallest multiple of the page size that is at least 16."""
        self.uses: list[Use] = []
        self.stays: list[Stay] = []
        self.stay_of: dict[int, Stay] = {}
        """By number of an event of a request."""
        self.use_of: dict[int, Use] = {}
        self._numbers: dict[object, int] = {}
        self._requests()
        for use in self.uses:
            self._weigh_digests(use)
        self.backups: list[Copy] = []
        self.loads: list[Copy] = []
        self.launches: list[Launch] = []
        self.fetches: list[Fetch] = []
        self.found: list[Found] = []
        self.snapshots: list[Snapshot] = []
        self.homeless: list[ev.InFlight | ev.ResidentNode | ev.SnapshotEnd] = []
        """Told of a snapshot when nobody was looking."""
        self.host: dict[int, list[Touch]] = defaultdict(list)
        """By host page."""
        self.calls: list[Call] = []
        self.stray: list[ev.EvictedL1 | ev.EvictEnd] = []
        """Victims and ends outside an eviction."""
        self._copies_and_slots()
        self.sightings: dict[tuple[int, int], list[Sighting]] = defaultdict(list)
        """By epoch and node."""
        self.split_from: dict[tuple[int, int], int] = {}
        self._nodes()
        self.evicted_by_node: dict[tuple[int, int], list[ev.EvictedL1]] = defaultdict(list)
        for gone in self.of(ev.EvictedL1):
            if gone.how in GONE:
                self.evicted_by_node[(self.epoch(gone.seq), gone.node)].append(gone)
        self.doubtful = [
            gone
            for gone in self.of(ev.EvictedL1)
            if gone.how in GONE and not self._known(self.epoch(gone.seq), gone.node, gone.seq)
        ]
        """Of nodes that left L1, those of which no digests say what they held."""
        self.backups_of: dict[int, list[Copy]] = defaultdict(list)
        for copy in self.backups:
            self.backups_of[copy.queued.node].append(copy)
        self._alike: dict[int, dict[int, list[Use]]] = {}

    def of(self, kind: type[E]) -> list[E]:
        """All events of a kind, in order."""
        return self._kinds.get(kind, [])

    def epoch(self, seq: int) -> int:
        return bisect_left(self.resets, seq)

    def reset_between(self, first: int, last: int) -> bool:
        return bisect_left(self.resets, first + 1) < bisect_left(self.resets, last)

    def emptied_between(self, first: int, last: int) -> bool:
        return any(first < seq < last for seq in self.emptied)

    def name(self, number: int, seq: int) -> str | None:
        """The text behind a number at event ``seq``; None: it has none yet, or two."""
        told = self.texts.get(number)
        if told is None or told[0].seq > seq:
            return None
        if len(told) > 1 and any(text.text != told[0].text for text in told if text.seq < seq):
            return None
        return told[0].text

    def alike(self, use: Use, position: int) -> list[Use]:
        """The sequences (requests and found nodes) that the digests show to begin like ``use``, but for less than a
        cell."""
        cell = position // use.grid if use.grid else 0
        if cell > len(use.cells) or not use.grid:
            return [use]
        if cell not in self._alike:
            table: dict[int, list[Use]] = defaultdict(list)
            for other in (*self.uses, *(found.use for found in self.found)):
                if not other.wrong and other.grid == self.grid and len(other.cells) >= cell:
                    table[other.cells[cell - 1] if cell else 0].append(other)
            self._alike[cell] = table
        same = self._alike[cell].get(use.cells[cell - 1] if cell else 0, [])
        return same if use in same else [use, *same]

    def _known(self, epoch: int, node: int, seq: int) -> bool:
        return any(s.seq <= seq and s.use.cells and not s.use.wrong for s in self.sightings.get((epoch, node), ()))

    def lineage(self, epoch: int, node: int) -> list[int]:
        """A node, and what it was split off from, and that from what, as far as the record shows it."""
        line = [node]
        while (origin := self.split_from.get((epoch, line[-1]))) is not None and origin not in line:
            line.append(origin)
        return line

    # --- how they are built --------------------------------------------------------------------------

    def _read_facts(self) -> None:
        into = {ev.FactKind.INSTANCE: self.instance_facts, ev.FactKind.PROCESS: self.process_facts}
        for event in self.of(ev.Facts):
            try:
                told = json.loads(event.json)
            except (ValueError, RecursionError):
                told = None
            if not isinstance(told, dict):
                self.unreadable.append(event)
            elif event.kind == ev.FactKind.COVERAGE:
                hooks = told.get("hooks")
                self.coverage.append((event.seq, hooks if isinstance(hooks, list) else []))
            elif event.kind in into:
                into[event.kind].append((event.seq, told))

    def _requests(self) -> None:
        current: dict[str, Stay] = {}
        unqueued: dict[str, Use] = {}
        for event in self.events:
            if type(event) not in _SUBJECTS or not event.req:  # type: ignore[attr-defined]
                continue
            rid = self.name(event.req, event.seq)  # type: ignore[attr-defined]
            if rid is None:
                continue
            stay = current.get(rid)
            if isinstance(event, ev.Queued | ev.WaitingAtAttach):
                if event.retracted and stay is not None:
                    use = stay.use
                elif event.retracted and rid in unqueued:
                    # Back after a retraction, the queueing before was not recorded: its digests were.
                    use = unqueued.pop(rid)
                else:
                    use = Use(rid)
                    self.uses.append(use)
                before, stay = stay, Stay(use, event, before=stay)
                if before is not None:
                    before.after = stay
                current[rid] = stay
                use.stays.append(stay)
                self.stays.append(stay)
                self.stay_of[event.seq], self.use_of[event.seq] = stay, use
                continue
            if stay is not None:
                use = stay.use
                stay.events.append(event)
                self.stay_of[event.seq] = stay
            elif rid in unqueued:
                use = unqueued[rid]
            else:
                use = unqueued[rid] = Use(rid)
                self.uses.append(use)
            self.use_of[event.seq] = use
            if isinstance(event, ev.PrefixDigests):
                use.told.append(event)
                use.grid = use.grid or event.grid
                if event.first_cell == len(use.cells) and event.grid == use.grid:
                    self._continue(use.cells, event.digests)
                    use.digests.extend(event.digests)
            elif isinstance(event, ev.PrefixPoint):
                use.told.append(event)
                if event.digests and event.position not in use.points:
                    cell = min(event.position // use.grid, len(use.cells)) if use.grid else 0
                    behind = use.cells[cell - 1] if cell else 0
                    use.points[event.position] = self._number((behind, event.position, event.digests[0]))
            elif isinstance(event, ev.Inserted):
                use.inserts.append(event)
                use.steps += [(event.seq, step) for step in event.path]
            elif isinstance(event, ev.Matched):
                use.steps += [(event.seq, step) for step in event.path]

    def _number(self, what: object) -> int:
        return self._numbers.setdefault(what, len(self._numbers) + 1)

    def _continue(self, cells: list[int], digests: Iterable[bytes]) -> None:
        """Digests are chained: one number stands for a digest and all those before it."""
        for digest in digests:
            cells.append(self._number((cells[-1] if cells else 0, digest)))

    def _weigh_digests(self, use: Use) -> None:
        """Whether the digests of a request say something: grid, first cell, page size and prompt length fit one
        another. What was told before the first match is the prompt; what does not fit later says nothing more."""
        cells: list[bytes] = []
        points: dict[int, bytes] = {}
        matches = use.first.of(ev.Matched) if use.stays else []
        matched = matches[0].seq if matches else None
        prompt: int | None = None
        for told in use.told:
            if matched is not None and prompt is None and told.seq > matched:
                prompt = len(cells)
            why = self._no_digest(told, cells, points)
            if why and (prompt is None or not use.stays):
                use.wrong = why
                return
            if why and use.later is None:
                use.later = told.seq, why
            elif isinstance(told, ev.PrefixDigests) and not why:
                cells += told.digests
        if matched is not None and not use.first.queued.retracted:
            prompt = len(cells) if prompt is None else prompt
            if prompt != use.first.queued.prompt_tokens // self.grid:
                use.wrong = f"{prompt} digests of a prompt of {use.first.queued.prompt_tokens} tokens"

    def _no_digest(self, told: ev.PrefixDigests | ev.PrefixPoint, cells: list[bytes], points: dict[int, bytes]) -> str:
        """Why digests say nothing, after those that were told before."""
        if isinstance(told, ev.PrefixDigests):
            if told.grid != self.grid:
                return f"digests of a grid of {told.grid}, pages of {self.page}"
            return "" if told.first_cell == len(cells) else "digests that do not continue those before"
        if not told.digests:
            return ""
        cell, rest = divmod(told.position, self.grid)
        known = cells[cell - 1] if not rest and 0 < cell <= len(cells) else told.digests[0]
        if len(told.digests) == 1 and points.setdefault(told.position, told.digests[0]) == told.digests[0] == known:
            return ""
        return "two digests of one prefix"

    def host_pages(self, slots: Iterable[ev.Run]) -> list[int]:
        """The host pages of runs of slots, in order; those that are not whole pages are left out."""
        page = self.page
        found: list[int] = []
        for run in slots:
            if run.length <= TOO_LONG and not run.start % page and not run.length % page:
                found += range(run.start // page, (run.start + run.length) // page)
        return found

    def touched(self, slots: Iterable[ev.Run]) -> Iterator[int]:
        """The host pages that runs of slots have a part in."""
        for run in slots:
            if 0 < run.length <= TOO_LONG:
                yield from range(run.start // self.page, -(-(run.start + run.length) // self.page))

    def _copies_and_slots(self) -> None:
        waiting: dict[int, list[Copy]] = {ev.Direction.D2H: [], ev.Direction.H2D: []}
        unseen: dict[int, list[ev.InFlight]] = {ev.Direction.D2H: [], ev.Direction.H2D: []}
        since = {ev.Direction.D2H: 0, ev.Direction.H2D: 0}
        running: dict[int, Launch] = {}
        digests: dict[int, ev.ResidentDigests] = {}
        nodes: dict[int, Found] = {}
        stack: list[Call] = []
        looking: Snapshot | None = None
        for event in self.events:
            match event:
                case ev.HostAlloc() | ev.HostFree():
                    if event.pool == 0:
                        what = "alloc" if isinstance(event, ev.HostAlloc) else "free"
                        for number in self.touched(event.slots):
                            self.host[number].append(Touch(event.seq, what, None, None))
                case ev.BackupQueued() | ev.LoadQueued():
                    stay = self.stay_of.get(event.seq) if isinstance(event, ev.LoadQueued) else None
                    copy = Copy(event, stay, self.host_pages(event.slots))
                    if isinstance(event, ev.LoadQueued):
                        self.loads.append(copy)
                        waiting[ev.Direction.H2D].append(copy)
                        if stay is not None:
                            stay.loads.append(copy)
                    else:
                        self.backups.append(copy)
                        waiting[ev.Direction.D2H].append(copy)
                        self._write(event.seq, event.slots, copy, event.start, copy.pages)
                case ev.TransferStarted():
                    way = event.direction
                    launch = Launch(event, waiting.get(way, []), unseen.get(way, []), since.get(way, event.seq))
                    self.launches.append(launch)
                    running[event.transfer] = launch
                    for copy in launch.copies:
                        copy.launch = launch
                    if way in waiting:
                        waiting[way], unseen[way], since[way] = [], [], event.seq
                case ev.BackupAcked():
                    carrier = running.get(event.transfer)
                    known = [c for c in carrier.copies if c.queued.node == event.node] if carrier is not None else []
                    early = [c for c in waiting[ev.Direction.D2H] if c.queued.node == event.node]
                    for copy in known:
                        copy.acks.append(event)
                    for copy in early:
                        copy.premature = event
                        waiting[ev.Direction.D2H].remove(copy)
                case ev.LoadDone():
                    carrier = running.get(event.transfer)
                    if carrier is not None:
                        for copy in carrier.copies:
                            copy.acks.append(event)
                case ev.PrefetchDone():
                    fetch = self._fetch(event)
                    self.fetches.append(fetch)
                    skip = event.existing // self.page
                    for at, number in enumerate(fetch.pages):
                        if at >= skip:
                            position = event.start + at * self.page
                            self.host[number].append(Touch(event.seq, "write", fetch, position))
                case ev.EvictBegin():
                    stack.append(Call(event))
                    self.calls.append(stack[-1])
                case ev.EvictedL1():
                    if stack and stack[-1].begin.call == event.call:
                        stack[-1].victims.append(event)
                    else:
                        self.stray.append(event)
                case ev.EvictEnd():
                    if stack and stack[-1].begin.call == event.call:
                        stack.pop().end = event
                    else:
                        self.stray.append(event)
                case ev.SnapshotBegin():
                    looking = Snapshot(event)
                    self.snapshots.append(looking)
                case ev.InFlight():
                    if not event.launched and event.direction in unseen:
                        unseen[event.direction].append(event)
                    if looking is None:
                        self.homeless.append(event)
                    else:
                        looking.under_way.append(event)
                case ev.ResidentDigests():
                    digests[event.node] = event
                case ev.ResidentNode():
                    told = digests.pop(event.node, None)
                    there = Found(
                        event,
                        Use(f"found {event.node}"),
                        self.host_pages(event.slots),
                        told,
                        nodes.get(event.parent),
                        looking is not None,
                    )
                    self.found.append(there)
                    nodes[event.node] = there
                    if looking is None:
                        self.homeless.append(event)
                    else:
                        looking.nodes.append(there)
                    if event.l2 == ev.AtAttach.RESIDENT:
                        for at, number in enumerate(there.pages):
                            position = event.start + at * self.page
                            self.host[number].append(Touch(event.seq, "found", there, position))
                case ev.SnapshotEnd():
                    if looking is None:
                        self.homeless.append(event)
                    else:
                        looking.end, looking = event, None
                case ev.Reset():
                    for way in waiting:
                        waiting[way].clear()
                        unseen[way].clear()
                    running.clear()
                    digests.clear()
                    nodes.clear()

    def _write(self, seq: int, slots: tuple[ev.Run, ...], copy: Copy, start: int, pages: list[int]) -> None:
        whole = set(pages)
        for at, number in enumerate(pages):
            self.host[number].append(Touch(seq, "write", copy, start + at * self.page))
        for number in self.touched(slots):
            if number not in whole:
                self.host[number].append(Touch(seq, "write", copy, None))

    def _fetch(self, done: ev.PrefetchDone) -> Fetch:
        stay = self.stay_of.get(done.seq)
        before = [e for e in stay.events if e.seq < done.seq] if stay is not None else []
        asked = next((e for e in reversed(before) if isinstance(e, ev.PrefetchAsked)), None)
        every = [e for e in before if isinstance(e, ev.PrefetchDone | ev.PrefetchRevoked)]
        ends = [e for e in every if asked is not None and e.seq > asked.seq]
        # A thread looks up: its answer may be recorded before the call that asked for it returns.
        over = every[-1].seq if every else 0
        since = [e for e in before if e.seq > over]
        told = [e for e in since if isinstance(e, ev.StorageLookedUp)]
        failed = [e for e in since if isinstance(e, ev.StorageFailed) and e.work != ev.StorageWork.WRITE]
        return Fetch(
            done,
            stay,
            self.host_pages(done.slots),
            asked,
            told[-1] if told else None,
            len(ends),
            failed[0] if failed else None,
        )

    def _nodes(self) -> None:
        starts: dict[tuple[int, int], int] = {}
        begin_alike: dict[tuple[int, int, object], set[int]] = defaultdict(set)
        paths: list[tuple[int, Use, tuple[ev.PathNode, ...]]] = [
            (seq, self.use_of[seq], event.path)
            for event in [*self._kinds[ev.Matched], *self._kinds[ev.Inserted]]
            if (seq := event.seq) in self.use_of and event.path
        ]
        for there in self.found:
            e = there.event
            self._describe(there)
            paths.append((e.seq, there.use, (ev.PathNode(e.node, e.start, e.end, int(e.l1 == 1)),)))
        paths.sort(key=lambda entry: entry[0])
        left = [e for e in self._kinds[ev.EvictedL1] if e.start >= 0]
        for seq, use, path in paths:
            epoch, numbers = self.epoch(seq), {step.node for step in path}
            while left and left[0].seq < seq:
                self._left_as(left.pop(0), starts, begin_alike)
            for step in path:
                key = (epoch, step.node)
                if key not in self.sightings:
                    self._split(epoch, use, step, numbers, starts, begin_alike)
                starts[key] = step.start
                self._begins(begin_alike, epoch, step.node, step.start, use)
                self.sightings[key].append(Sighting(seq, use, step))

    def _left_as(
        self,
        e: ev.EvictedL1,
        starts: dict[tuple[int, int], int],
        begin_alike: dict[tuple[int, int, object], set[int]],
    ) -> None:
        """A node that leaves L1 says where it begins by now: what was in front of it was split off unseen."""
        epoch = self.epoch(e.seq)
        key = (epoch, e.node)
        if starts.get(key, e.start) < e.start and self.sightings[key][-1].step.end == e.end:
            starts[key] = e.start
            for seen in {sighting.use for sighting in self.sightings[key]}:
                self._begins(begin_alike, epoch, e.node, e.start, seen)

    def _begins(
        self, begin_alike: dict[tuple[int, int, object], set[int]], epoch: int, node: int, start: int, use: Use
    ) -> None:
        for alike in (self._first_page(use, start), use):
            if alike is not None:
                begin_alike[(epoch, start, alike)].add(node)

    def _first_page(self, use: Use, start: int) -> int | None:
        """The cell that shows which page begins at ``start``: the first one that has all of it."""
        if not use.grid or use.wrong:
            return None
        cell = -(-(start + self.page) // use.grid)
        return use.cells[cell - 1] if cell <= len(use.cells) else None

    def _split(
        self,
        epoch: int,
        use: Use,
        step: ev.PathNode,
        path: set[int],
        starts: dict[tuple[int, int], int],
        begin_alike: dict[tuple[int, int, object], set[int]],
    ) -> None:
        """A new number on a path: the part in front of a node that began there, if the record shows which.

        The path goes on through that node, or both begin with one page: no two children of a node do, so they cannot
        have been there together, and the later one counts.
        """
        alike = begin_alike.get((epoch, step.start, self._first_page(use, step.start)), ())
        own = begin_alike.get((epoch, step.start, use), ())
        candidates: list[tuple[int, int]] = []
        for node in {*path, *alike, *own}:
            key = (epoch, node)
            if node == step.node or starts.get(key) != step.start or not self.sightings.get(key):
                continue
            last = self.sightings[key][-1]
            if last.step.end > step.end:
                candidates.append((last.seq, node))
        if candidates:
            node = max(candidates)[1]
            self.split_from[(epoch, step.node)] = node
            starts[(epoch, node)] = step.end
            for seen in {sighting.use for sighting in self.sightings[(epoch, node)]}:
                self._begins(begin_alike, epoch, node, step.end, seen)

    def _describe(self, there: Found) -> None:
        """The digests of a node that was found continue those of its parent."""
        told, above, event = there.digests, there.parent, there.event
        if event.parent < 0:
            cells: list[int] | None = [] if event.start == 0 else None
        else:
            cells = list(above.use.cells) if above is not None and above.event.end == event.start else None
        if told is None or cells is None or (above is not None and above.wrong):
            there.wrong = "the prefix of a node that was found was not recorded"
        elif told.grid != self.grid:
            there.wrong = "the digests of a node that was found are of another grid than the page size gives"
        elif len(cells) != told.first_cell or told.first_cell != event.start // told.grid:
            there.wrong = "the digests of a node that was found do not continue its parent's"
        elif len(cells) + len(told.digests) != event.end // told.grid:
            there.wrong = "the digests of a node that was found do not reach its end"
        else:
            self._continue(cells, told.digests)
            there.use.grid, there.use.cells = told.grid, cells
        held = sum(run.length for run in event.slots)
        if event.l2 == ev.AtAttach.RESIDENT and not there.wrong:
            if held != event.end - event.start or len(there.pages) * self.page != held:
                there.wrong = "the slots of a node that was found are not whole pages of its tokens"
            elif len(set(there.pages)) != len(there.pages):
                there.wrong = "a node that was found has a host page twice"
        if not there.looking:
            there.wrong = there.wrong or "a node that was found when nobody was looking"
        there.use.wrong = there.wrong


def _positive(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _ordered(lanes: Sequence[Sequence[ev.Event]]) -> list[ev.Event]:
    by_seq: dict[int, ev.Event] = {}
    for lane in lanes:
        for event in lane:
            by_seq.setdefault(event.seq, event)
    return [by_seq[seq] for seq in sorted(by_seq)]
