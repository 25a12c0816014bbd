"""An independent judge of claims, slow and obvious: brute force over the list of events.

It answers one question, per page of tokens: do the recorded events establish that this tier served them? It
was written from docs/evidence-model.md and the event schema, and shares no code with the ledger or the verdicts.
Where the model leaves room it takes the stricter reading.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvwitness.patches.schema import events as ev
from soundness.timeline import TREE_FAMILY, Attempt, Copy, Fetch, Found, Timeline, Use, reach

LINKS = {
    "L1": ("born", "resident_l1", "left_l1", "used", "epoch"),
    "L2": ("born", "backed_up", "left_l1", "resident_l2", "read", "used", "epoch"),
    "L3": ("prefetched", "resident_l2", "read", "used", "epoch"),
    "prefetched": ("prefetched",),
    "content": ("content",),
}
EDGES: dict[type[ev.Event], tuple[str, ...]] = {
    ev.Matched: ("device", "host"),
    ev.LoadBackDecided: ("promised", "loaded"),
    ev.Admission: ("prefix", "end"),
    ev.Prefill: ("start", "end"),
    ev.EvictedL1: ("start", "end"),
    ev.BackupQueued: ("start", "end"),
    ev.LoadQueued: ("start", "end"),
    ev.Queued: ("prompt_tokens",),
    ev.WaitingAtAttach: ("prompt_tokens",),
    ev.ResidentNode: ("start", "end"),
}
"""Fields that are positions."""
GONE = (ev.Eviction.DEMOTED, ev.Eviction.DROPPED, ev.Eviction.DROPPED_HOST_PRESSURE)


class Refused(Exception):
    """The events do not establish the claim; the argument says why."""


@dataclass
class L1Event:
    """Something that put a block into L1 or took it out."""

    seq: int
    there: bool
    how: int = 0
    insert: ev.Inserted | None = None
    use: Use | None = None
    load: Copy | None = None
    found: Found | None = None


class Oracle:
    """Checks claims about one scheduler's journal."""

    def __init__(self, lanes: Sequence[Sequence[ev.Event]]) -> None:
        self.line = Timeline(lanes)
        self.page = self.line.page
        self._reach: dict[tuple[int, int], tuple[int, int | None]] = {}
        self._edges: list[int] | None = None

    def same(self, a: Use, b: Use, position: int) -> bool | None:
        """Are the first ``position`` tokens of two sequences equal? None: the digests do not say."""
        if a is b:
            return True
        key = (id(a), id(b))
        if key not in self._reach:
            self._reach[key] = reach(a, b)
        equal, different = self._reach[key]
        if different is not None and different <= position:
            return False
        return True if position <= equal else None

    def attempts(self) -> Iterator[Attempt]:
        """The attempt that counts of every use of a request id: the last one. In the order of queueing."""
        for use in self.line.uses:
            yield use.attempts[-1]

    def refusal(self, attempt: Attempt, tier: str, start: int, end: int) -> str | None:
        """Why the events do not establish that ``tier`` served ``[start, end)``; None when they do."""
        try:
            if start >= end:
                raise Refused("an empty range")
            self._instance(tier)
            for low in self._samples(start, end):
                self._page(attempt, tier, low, min(low + self.page, end))
        except Refused as why:
            return str(why)
        return None

    def _samples(self, start: int, end: int) -> list[int]:
        """The pages to look at: every one that differs from its neighbour in any way that could matter."""
        if self._edges is None:
            self._edges = sorted(self._all_edges())
        found: list[int] = []
        before: object = None
        for low in range(start, end, self.page):
            kind = (bisect_right(self._edges, low), bisect_left(self._edges, low + self.page), self._slots_at(low))
            if kind != before or low + self.page >= end:
                found.append(low)
            before = kind
        return found

    def _all_edges(self) -> set[int]:
        edges: set[int] = set()
        for event in self.line.events:
            for name in EDGES.get(type(event), ()):
                edges.add(getattr(event, name))
            if isinstance(event, ev.Matched):
                edges.add(event.device + event.host)
            if isinstance(event, ev.PrefetchDone):
                edges.update((event.start, event.start + event.existing, event.start + event.completed))
            for step in getattr(event, "path", ()):
                edges.update((step.start, step.end))
        for a, b in combinations([*self.line.uses, *(found.use for found in self.line.found)], 2):
            edges.update(at for at in reach(a, b) if at is not None)
        return edges

    def _slots_at(self, low: int) -> object:
        """What happened to the host pages that were ever read as this position, and whether they were written so."""
        found = []
        for load in self.line.copies:
            if isinstance(load.queued, ev.LoadQueued) and load.queued.start <= low < load.queued.end:
                number = load.page_of(low, self.page)
                told = self.line.pages.get(number, []) if number is not None else []
                found.append(
                    [
                        (
                            e.seq,
                            e.what,
                            any(c.page_of(low, self.page) == number for c in (e.copy, e.found, e.fetch) if c),
                        )
                        for e in told
                    ]
                )
        return found

    # --- the instance --------------------------------------------------------------------------------

    def _instance(self, tier: str) -> None:
        line = self.line
        if line.hooks is None:
            raise Refused("no coverage: which hooks were there is not known")
        facts = line.instance
        if not facts.get("page_size") or not facts.get("bytes_per_token"):
            raise Refused("no facts of the instance")
        if tier in ("L2", "L3") and (facts.get("host_memory_mode") or "cache") != "cache":
            raise Refused("host memory is transit here")
        ranks = facts.get("ranks") or {}
        if (ranks.get("attn_tp_size") or ranks.get("tp_size") or 1) * (ranks.get("pp_size") or 1) != 1:
            raise Refused("other ranks were not recorded")
        family = facts.get("family") or TREE_FAMILY.get(facts.get("tree_class", ""), "")
        for link in LINKS.get(tier, ()):
            hooks = [h for h in line.hooks if h.get("family", "common") in ("common", family)]
            if not any(link in h["links"] for h in hooks):
                raise Refused(f"no hook records {link}")
            # One name may stand for several places of which a release has one.
            for name in {hook["name"] for hook in hooks if link in hook["links"]}:
                if not any(hook["status"] == "installed" for hook in hooks if hook["name"] == name):
                    raise Refused(f"{name} was not installed")
                if name in line.failed:
                    raise Refused(f"{name} failed")

    # --- one page ------------------------------------------------------------------------------------

    def _page(self, attempt: Attempt, tier: str, low: int, high: int) -> None:
        needed: list[ev.Event] = []
        match, admission = self._admitted(attempt)
        epoch = self.line.epoch_of[match.seq]
        step = next((n for n in match.path if n.start <= low and high <= n.end), None)
        if step is None:
            raise Refused("no node of the matched path holds it")
        needed += [match, admission]
        chunks = self._used(attempt, match, admission, high)
        needed += [e for pair in chunks for e in pair]
        first, last = chunks[0][0].seq, max(done.seq for _, done in chunks)
        if any(match.seq < seq < last for seq in self.line.resets):
            raise Refused("the cache was reset before the prefill had ended")
        history = self._history(attempt.use, match, epoch, low, high)
        for entry in history:
            if not entry.there and match.seq < entry.seq < last:
                raise Refused("evicted from L1 before the prefill had ended")
        if tier == "L1":
            if not (high <= match.device and step.on_device):
                raise Refused("not matched in L1")
            needed += self._in_l1(attempt, match, history, first, low, high)
        else:
            if not (match.device <= low and high <= match.device + match.host and not step.on_device):
                raise Refused("not matched in L2")
            from_below = self._from_l2 if tier == "L2" else self._from_l3
            needed += from_below(attempt, match, admission, epoch, history, low, high)
        self._whole(needed)
        self._witness(attempt, match, admission)

    def _admitted(self, attempt: Attempt) -> tuple[ev.Matched, ev.Admission]:
        if attempt.interrupted:
            raise Refused("the request's id was in use twice at a time")
        admission = next((e for e in attempt.events if isinstance(e, ev.Admission) and e.admitted), None)
        if admission is None:
            raise Refused("not admitted")
        matches = [
            e
            for e in attempt.events
            if isinstance(e, ev.Matched) and e.purpose == ev.MatchPurpose.ADMISSION and e.seq < admission.seq
        ]
        if not matches:
            raise Refused("no match before the admission")
        if any(isinstance(e, ev.AbortedInQueue) for e in attempt.events):
            raise Refused("aborted in the queue")
        if any(isinstance(e, ev.Released) and e.state == ev.ReleaseState.ABORTED for e in attempt.events):
            raise Refused("aborted")
        match = matches[-1]
        if self.line.epoch_of[match.seq] != self.line.epoch_of[admission.seq]:
            raise Refused("reset between match and admission")
        position = 0
        for step in match.path:
            if step.start != position or step.end <= step.start:
                raise Refused("the matched path has a hole")
            position = step.end
        if position < match.device + match.host:
            raise Refused("the matched path is shorter than what was matched")
        return match, admission

    def _loads(self, attempt: Attempt, match: ev.Matched, admission: ev.Admission) -> list[Copy]:
        return [
            c
            for c in self.line.copies
            if c.attempt is attempt and isinstance(c.queued, ev.LoadQueued) and match.seq < c.queued.seq < admission.seq
        ]

    def _used(
        self, attempt: Attempt, match: ev.Matched, admission: ev.Admission, high: int
    ) -> list[tuple[ev.Prefill, ev.PrefillDone]]:
        """The passes that computed the rest: without a hole, from behind the range to the prompt's end."""
        passes = [e for e in attempt.events if isinstance(e, ev.Prefill)]
        dones = [e for e in attempt.events if isinstance(e, ev.PrefillDone)]
        if not passes:
            raise Refused("no prefill")
        if len({p.batch for p in passes}) != len(passes):
            raise Refused("a batch twice")
        loaded = sum(c.queued.tokens for c in self._loads(attempt, match, admission))
        position = match.device + loaded
        if admission.prefix != position:
            raise Refused("admitted with another prefix than matched and loaded")
        if high > position:
            raise Refused("beyond the reused prefix")
        pairs = []
        for number, prefill in enumerate(passes):
            if prefill.seq < admission.seq:
                raise Refused("computed before it was admitted")
            if prefill.start != position or prefill.end <= prefill.start:
                raise Refused("the passes leave a hole, or compute reused tokens")
            if bool(prefill.last) != (number == len(passes) - 1):
                raise Refused("the last pass is not the last")
            position = prefill.end
            done = [d for d in dones if d.batch == prefill.batch and d.seq > prefill.seq]
            if not done:
                raise Refused("a pass whose result was never processed")
            pairs.append((prefill, done[0]))
        last = max(done.seq for _, done in pairs)
        if len([d for d in dones if d.seq <= last]) != len(pairs):
            raise Refused("results of a batch twice, or of another batch")
        prompt = attempt.queued.prompt_tokens
        if position < prompt or (position > prompt and not attempt.queued.retracted):
            raise Refused("prompt is not device + loaded + recomputed")
        if pairs[-1][1].output_tokens < 1:
            raise Refused("the prefill had no result")
        return pairs

    # --- L1 ------------------------------------------------------------------------------------------

    def _is(
        self, use: Use, match: ev.Matched, epoch: int, node: int, low: int, high: int, until: int = 0
    ) -> bool | None:
        """Does ``node`` hold ``use``'s tokens up to ``high``? None: nothing recorded says so."""
        on_path = any(n.node == node and n.start <= low and high <= n.end for n in match.path)
        # What was seen of a node of the path after the match does not change what was matched.
        until = match.seq if on_path else max(until, match.seq)
        seen = [s for s in self.line.sightings.get((epoch, node), []) if s.seq <= until]
        answers = [self.same(s.use, use, high) for s in seen]
        if on_path and len({s.step.end for s in seen}) > 1:
            raise Refused(f"node {node} was seen with two ends")
        if on_path and False in answers:
            raise Refused(f"node {node} was seen for two prefixes")
        if False in answers:
            return False
        if on_path or True in answers:
            return True
        holders = [n.node for n in match.path if n.start <= low and high <= n.end]
        return True if any(node in self.line.ancestors(epoch, holder) for holder in holders) else None

    def _history(self, use: Use, match: ev.Matched, epoch: int, low: int, high: int) -> list[L1Event]:
        """Everything that put the block into L1 or took it out, in order."""
        found: list[L1Event] = []
        for when, insert, owner in self.line.inserts:
            for step in insert.path if when == epoch else ():
                if step.start <= low and high <= step.end and self._is(use, match, epoch, step.node, low, high):
                    if self.same(owner, use, high) is False:
                        continue
                    if self._coexisted(match, epoch, step.node, insert.seq, low):
                        continue
                    found.append(L1Event(insert.seq, bool(step.on_device), insert=insert, use=owner))
        for when, gone in self.line.evicted:
            if when != epoch or gone.how not in GONE:
                continue
            seen = [
                s.step for s in self.line.sightings.get((epoch, gone.node), []) if s.seq <= max(match.seq, gone.seq)
            ]
            if not seen and gone.seq < match.seq:
                # No path led through it, the matched one neither: a split leaves both parts on the path.
                continue
            known = gone.start >= 0 and gone.end > gone.start
            low_end = gone.start if known else min((s.start for s in seen), default=0)
            high_end = gone.end if known else max((s.end for s in seen), default=high)
            if not (low_end < high and low < high_end):
                continue
            ours = self._is(use, match, epoch, gone.node, low, high, gone.seq)
            if seen and self._coexisted(match, epoch, gone.node, gone.seq, low):
                continue
            if ours is not False:
                whole = low_end <= low and high <= high_end
                found.append(L1Event(gone.seq, False, how=gone.how if whole and seen else 0))
        for copy in self.line.copies:
            load = copy.queued
            if copy.epoch != epoch or not isinstance(load, ev.LoadQueued) or copy.use is None:
                continue
            if not (load.start <= low and high <= load.end):
                continue
            matches = [e for e in copy.attempt.events if isinstance(e, ev.Matched)] if copy.attempt else []
            nodes = [n.node for m in matches for n in m.path if n.start <= low and high <= n.end and m.seq < load.seq]
            ours = self._is(use, match, epoch, nodes[-1], low, high) if nodes else None
            if nodes and self._coexisted(match, epoch, nodes[-1], load.seq, low):
                continue
            if ours is not False:
                found.append(L1Event(load.seq, True, load=copy))
        for there in self.line.found:
            event = there.event
            if there.epoch != epoch or not (event.start <= low and high <= event.end):
                continue
            if not self._is(use, match, epoch, event.node, low, high) or not self._reaches(there, use, high):
                continue
            if self._coexisted(match, epoch, event.node, event.seq, low):
                continue
            if event.l1 == ev.AtAttach.RESIDENT:
                found.append(L1Event(event.seq, True, found=there))
            elif event.l1 == ev.AtAttach.ABSENT:
                usable = event.l2 == ev.AtAttach.RESIDENT
                found.append(L1Event(event.seq, False, how=ev.Eviction.DEMOTED if usable else 0, found=there))
        return sorted(found, key=lambda entry: entry.seq)

    def _reaches(self, found: Found, use: Use, high: int) -> bool:
        """Do the digests show the prefix of a node that was found to be ``use``'s, but for less than a cell?"""
        if found.wrong or not found.use.grid:
            return False
        equal, different = reach(found.use, use)
        if different is not None and different <= high:
            return False
        return equal >= high - high % found.use.grid

    def _coexisted(self, match: ev.Matched, epoch: int, other: int, seq: int, low: int) -> bool:
        """The node on the path that holds ``low`` was there beside ``other`` at event ``seq``: they are two.

        Whatever digests say of the other one: a tree has one node for a block.
        """
        on_path = [n.node for n in match.path if n.start <= low < n.end and n.node != other]
        held = {node for holder in on_path for node in (holder, *self.line.ancestors(epoch, holder))}
        if other in held or any(n.node == other for n in match.path):
            return False
        return any(
            s.seq < seq and s.step.start <= low < s.step.end
            for node in held
            for s in self.line.sightings.get((epoch, node), [])
        )

    def _born(self, use: Use, before: int, epoch: int, low: int, high: int) -> list[ev.Prefill]:
        """The passes in which ``use`` itself computed the block, or behind the last of which it generated it."""
        return [
            e
            for attempt in use.attempts
            for e in attempt.events
            if isinstance(e, ev.Prefill)
            and e.start <= low
            and (high <= e.end or self._generated(attempt, e, before))
            and e.seq < before
            and self.line.epoch_of[e.seq] == epoch
        ]

    def _generated(self, attempt: Attempt, last: ev.Prefill, before: int) -> bool:
        """Did the request decode behind this pass until ``before``? Decoding leaves no events of its own."""
        return bool(last.last) and any(
            isinstance(e, ev.PrefillDone) and e.batch == last.batch and e.output_tokens and last.seq < e.seq < before
            for e in attempt.events
        )

    def _in_l1(
        self, attempt: Attempt, match: ev.Matched, history: list[L1Event], first: int, low: int, high: int
    ) -> list[ev.Event]:
        epoch = self.line.epoch_of[match.seq]
        why = "nothing recorded put it into L1"
        best: list[ev.Event] = []
        fresh = False  # The tree itself said at the insert that nothing of the block was there.
        for entry in reversed([e for e in history if e.seq < match.seq]):
            if not entry.there:
                why = why if best else f"{why} after event {entry.seq} had taken it out"
                break
            if entry.insert is not None and entry.use is not None:
                computed = self._born(entry.use, entry.seq, epoch, low, high)
                if computed and (not best or computed[-1].seq > best[0].seq):
                    best = [computed[-1], entry.insert]
                    fresh = entry.insert.existing <= low
            elif entry.found is not None:
                # Nothing before it has to be known.
                best = best or [entry.found.event]
                break
            elif entry.load is not None:
                if best and (best[0].seq > entry.seq or fresh):
                    break
                # A load-back under way, or of other KV, makes everything after it doubtful.
                best = self._loaded(attempt, entry.load, match, first, low, high)
                break
        if not best:
            raise Refused(why)
        return best

    def _loaded(
        self, attempt: Attempt, load: Copy, match: ev.Matched, first: int, low: int, high: int
    ) -> list[ev.Event]:
        if load.attempt is attempt:
            raise Refused("its own load-back brought it: that is L2")
        if load.ended is None or load.ended.seq > first:
            raise Refused("the load-back that brings it was not complete when it was used")
        return self._copied(attempt.use, load, match, load.queued.seq, self.line.epoch_of[match.seq], low, high)

    # --- L2 ------------------------------------------------------------------------------------------

    def _from_l2(
        self,
        attempt: Attempt,
        match: ev.Matched,
        admission: ev.Admission,
        epoch: int,
        history: list[L1Event],
        low: int,
        high: int,
    ) -> list[ev.Event]:
        load, decided = self._load_of(attempt, match, admission, low, high)
        if any(fetch.attempt is attempt for fetch in self._fetched(load, low)):
            raise Refused("its own prefetch from storage brought it: that is L3")
        events = self._copied(attempt.use, load, match, match.seq, epoch, low, high)
        events += self._waited_for(attempt, load)
        acked = next(e for e in events if isinstance(e, ev.BackupAcked | ev.ResidentNode | ev.PrefetchDone))
        before = [entry for entry in history if entry.seq < match.seq]
        if not before or before[-1].there:
            raise Refused("it had not left L1 at the match")
        out = before[-1]
        if out.how != ev.Eviction.DEMOTED or out.seq < acked.seq:
            raise Refused("it did not leave L1 by demotion after its backup was acknowledged")
        if out.found is not None:
            events.append(out.found.event)
        return [*events, decided, *(e for _, e in self.line.evicted if e.seq == out.seq)]

    def _load_of(
        self, attempt: Attempt, match: ev.Matched, admission: ev.Admission, low: int, high: int
    ) -> tuple[Copy, ev.LoadBackDecided]:
        """The one load-back of the block for the request, and the decision that it came from."""
        loads = self._loads(attempt, match, admission)
        mine = [c for c in loads if c.queued.start < high and low < c.queued.end]
        if len(mine) != 1:
            raise Refused(f"{len(mine)} load-backs of it were queued for the request")
        decided = [e for e in attempt.events if isinstance(e, ev.LoadBackDecided) and match.seq < e.seq < admission.seq]
        if len(decided) != 1 or decided[0].loaded != sum(c.queued.tokens for c in loads):
            raise Refused("init_load_back did not return what was queued")
        return mine[0], decided[0]

    # --- L3 ------------------------------------------------------------------------------------------

    def _fetched(self, load: Copy, low: int) -> list[Fetch]:
        """The prefetch that filled the host page that is read as ``low``, when nothing was written to it since."""
        number = load.page_of(low, self.page)
        told = self.line.pages.get(number, []) if number is not None else []
        writes = [e for e in told if e.what in ("write", "found") and e.seq < load.queued.seq]
        return [e.fetch for e in writes[-1:] if e.fetch is not None]

    def _from_l3(
        self,
        attempt: Attempt,
        match: ev.Matched,
        admission: ev.Admission,
        epoch: int,
        history: list[L1Event],
        low: int,
        high: int,
    ) -> list[ev.Event]:
        """Storage filled the slots for this very request while it waited, and its load-back read them."""
        load, decided = self._load_of(attempt, match, admission, low, high)
        fetched = self._fetched(load, low)
        if not fetched or fetched[0].attempt is not attempt:
            raise Refused("no prefetch for this request filled the slots that were read")
        (fetch,) = fetched
        assert fetch.asked is not None or fetch.wrong
        events = self._copied(attempt.use, load, match, match.seq, epoch, low, high)
        events += self._waited_for(attempt, load)
        if fetch.asked is None or fetch.asked.seq < attempt.queued.seq:
            raise Refused("the prefetch was not asked for while the request waited")
        return [*events, decided]

    def _attached(self, seq: int) -> bool:
        """Was a storage backend attached at event ``seq``?"""
        changes = [attach for when, attach in self.line.storage if when < seq]
        return changes[-1] if changes else bool(self.line.instance.get("storage"))

    def _same_or_matched(
        self, filled: Use, use: Use, since: int, match: ev.Matched, epoch: int, low: int, high: int
    ) -> bool:
        """Digests show equality; or they do but for less than a cell, and both requests' paths lead to one node."""
        equal = self.same(filled, use, high)
        if equal is not None:
            return equal
        if not use.grid or reach(filled, use)[0] < high - high % use.grid:
            return False
        return any(
            s.use is filled and since < s.seq <= match.seq and s.step.start <= low and high <= s.step.end
            for node in match.path
            if node.start <= low and high <= node.end
            for holder in (node.node, *self.line.ancestors(epoch, node.node))
            for s in self.line.sightings.get((epoch, holder), [])
        )

    def _filled(
        self, use: Use, fetch: Fetch, match: ev.Matched, alloc: int, by: int, epoch: int, low: int, high: int
    ) -> list[ev.Event]:
        """The events by which storage filled a page with the block, when that is ``use``'s prefix."""
        self._instance("prefetched")
        if fetch.wrong or fetch.epoch != epoch:
            raise Refused(fetch.wrong or "a prefetch of another epoch")
        assert fetch.asked is not None
        if fetch.done.seq > by:
            raise Refused("the prefetch had not ended in time")
        if not alloc < fetch.done.seq or self.line.epoch_of[fetch.asked.seq] != epoch:
            raise Refused("asked for in another epoch")
        if not self._attached(fetch.asked.seq):
            raise Refused("no storage was attached when the prefetch was asked for")
        if fetch.use is None or not self._same_or_matched(fetch.use, use, fetch.done.seq, match, epoch, low, high):
            raise Refused("the slots were filled for another prefix")
        told = [fetch.looked_up] if fetch.looked_up is not None else []
        return [fetch.asked, fetch.done, *told]

    def _waited_for(self, attempt: Attempt, load: Copy) -> list[ev.Event]:
        """Where threads copy: the pass that the load was for read no layer before it was there."""
        if not self.line.instance.get("copy_threads"):
            return []
        assert load.started is not None
        told = [e for e in self.line.events if isinstance(e, ev.LoadWaited) and e.transfer == load.started.transfer]
        if len(told) != 1 or told[0].early or told[0].layers != self.line.instance.get("layers"):
            raise Refused("the forward pass did not wait for the load-back in every layer")
        passes = [e for e in attempt.events if isinstance(e, ev.Prefill)]
        dones = [e for e in attempt.events if isinstance(e, ev.PrefillDone)]
        if not passes or not dones or not passes[0].seq < told[0].seq < dones[0].seq:
            raise Refused("another pass waited for it")
        return [*told]

    def _copied(
        self, use: Use, load: Copy, match: ev.Matched, by: int, epoch: int, low: int, high: int
    ) -> list[ev.Event]:
        """A completed load-back of the block from slots that held it: backup acknowledged before event ``by``."""
        line = self.line
        if load.wrong or load.epoch != epoch:
            raise Refused(load.wrong or "a load-back of another epoch")
        if load.started is None or load.ended is None:
            raise Refused("the load-back was not seen to start and complete")
        if any(load.queued.seq < seq < load.ended.seq for seq in line.resets):
            raise Refused("reset during the load-back")
        number = load.page_of(low, self.page)
        if number is None or (low - load.queued.start) % self.page:
            raise Refused("not a page of the load-back")
        until = load.ended.seq
        stretch = [e for e in line.pages.get(number, []) if e.seq < until]
        if stretch and stretch[-1].found is not None:
            if any(e.what == "free" for e in stretch) or stretch[0].what == "alloc":
                raise Refused("found in slots that were given away or not written since the attaching")
            seen = self._any_found(use, [e.found for e in stretch if e.found], load, match, by, epoch, low, high)
            return [seen, load.queued, load.started, load.ended]
        # What was written since, or before it was looked at, is known better than by looking.
        if len(stretch) < 2 or (stretch[-2].what, stretch[-1].what) != ("alloc", "write"):
            raise Refused("the slots did not hold what one backup wrote, from the backup to the end of the read")
        write, alloc = stretch[-1], stretch[-2]
        if any(alloc.seq < seq < until for seq in line.emptied + line.resets):
            raise Refused("the host pool was emptied in between")
        taken = [e for e in line.events if e.seq == alloc.seq]
        if write.fetch is not None:
            if write.fetch.done.seq > load.queued.seq or write.fetch.page_of(low, self.page) != number:
                raise Refused("the slots were filled for other positions, or later")
            filled = self._filled(use, write.fetch, match, alloc.seq, by, epoch, low, high)
            return [*filled, *taken, load.queued, load.started, load.ended]
        backup = write.copy
        assert backup is not None
        if backup.queued.seq > load.queued.seq or backup.epoch != epoch or backup.wrong:
            raise Refused(backup.wrong or "written after the read was queued")
        if backup.page_of(low, self.page) != number or not backup.queued.start <= low < high <= backup.queued.end:
            raise Refused("the slots were written for other positions")
        if backup.started is None or backup.ended is None or backup.ended.seq > by:
            raise Refused("the backup was not acknowledged in time")
        born = self._written_for(use, backup, match, epoch, low, high)
        return [born, *taken, backup.queued, backup.started, backup.ended, load.queued, load.started, load.ended]

    def _any_found(
        self, use: Use, found: list[Found], load: Copy, match: ev.Matched, by: int, epoch: int, low: int, high: int
    ) -> ev.Event:
        """Of several looks at the same slots one is enough."""
        why = Refused("not found")
        for each in found:
            try:
                return self._found_there(use, each, load, match, by, epoch, low, high)
            except Refused as refused:
                why = refused
        raise why

    def _found_there(
        self, use: Use, found: Found, load: Copy, match: ev.Matched, by: int, epoch: int, low: int, high: int
    ) -> ev.Event:
        """The node that was found to hold the slots of the block, when that is ``use``'s prefix."""
        event = found.event
        if found.wrong or found.epoch != epoch:
            raise Refused(found.wrong or "found in another epoch")
        if event.l2 != ev.AtAttach.RESIDENT or event.seq > by or event.seq > load.queued.seq:
            raise Refused("found too late, or without a usable copy")
        if any(event.seq < seq < load.ended.seq for seq in self.line.emptied + self.line.resets if load.ended):
            raise Refused("the host pool was emptied in between")
        number = load.page_of(low, self.page)
        if found.page_of(low, self.page) != number or not event.start <= low < high <= event.end:
            raise Refused("the slots were found to hold other positions")
        if not self._is(use, match, epoch, event.node, low, high) or not self._reaches(found, use, high):
            raise Refused("nothing says that the node that was found holds this prefix")
        return event

    def _written_for(self, use: Use, backup: Copy, match: ev.Matched, epoch: int, low: int, high: int) -> ev.Event:
        """The prefill that computed what a backup wrote, when that is ``use``'s prefix."""
        queued = backup.queued
        seen = [s for s in self.line.sightings.get((epoch, queued.node), []) if s.seq <= match.seq]
        if any(s.step.end != queued.end for s in seen):
            raise Refused("the node that was written was seen with another end")
        if any(self.same(s.use, use, high) is False for s in seen):
            raise Refused("the slots were written for another prefix")
        # Where the digests end, the radix tree's own word counts: the request's path goes through that node.
        if not self._is(use, match, epoch, queued.node, low, high):
            raise Refused("nothing says for whose prefix the slots were written")
        births: list[ev.Event] = []
        for other in self.line.uses:
            computed = self._born(other, queued.seq, epoch, low, high)
            inserted = [
                insert
                for when, insert, owner in self.line.inserts
                if when == epoch
                and owner is other
                and any(
                    n.start <= low and high <= n.end and self._is(use, match, epoch, n.node, low, high)
                    for n in insert.path
                )
            ]
            if computed and inserted:
                births.append(computed[-1])
        births += [
            there.event
            for there in self.line.found
            if there.epoch == epoch
            and there.event.l1 == ev.AtAttach.RESIDENT
            and there.event.seq < queued.seq
            and there.event.start <= low
            and high <= there.event.end
            and self._is(use, match, epoch, there.event.node, low, high)
            and self._reaches(there, use, high)
        ]
        if births:
            return max(births, key=lambda e: e.seq)
        raise Refused("no recorded prefill computed it before it was written")

    # --- content -------------------------------------------------------------------------------------

    def unequal(self, attempt: Attempt, start: int, end: int, compared: int) -> str | None:
        """Why the events do not establish that ``compared`` pages of ``[start, end)``, read from L2, came back with the
        bytes that went out, and no other page with others; None when they do."""
        try:
            found = self._pages_compared(attempt, start, end)
            if any(differ for differ in found.values()):
                raise Refused("a page came back with other bytes")
            if not 0 < compared <= len(found):
                raise Refused(f"{len(found)} pages were digested at both ends")
        except Refused as why:
            return str(why)
        return None

    def intact(self, attempt: Attempt, start: int, end: int) -> str | None:
        """Why the events do not establish that a page of the range came back with other bytes; None when they do."""
        try:
            if any(self._pages_compared(attempt, start, end).values()):
                return None
        except Refused as why:
            return str(why)
        return "no page differs"

    def _pages_compared(self, attempt: Attempt, start: int, end: int) -> dict[int, bool]:
        """Pages (by their first token) that were digested at both ends, and whether the digests differ."""
        self._instance("content")
        match, admission = self._admitted(attempt)
        epoch = self.line.epoch_of[match.seq]
        found: dict[int, bool] = {}
        for low in range(start, end, self.page):
            high = min(low + self.page, end)
            load = next(c for c in self._loads(attempt, match, admission) if c.page_of(low, self.page) is not None)
            number = load.page_of(low, self.page)
            assert number is not None and load.started is not None
            writes = [e for e in self.line.pages.get(number, []) if e.what == "write" and e.seq < load.queued.seq]
            backup = writes[-1].copy if writes else None
            if backup is None or backup.started is None:
                continue
            slot = number * self.page
            out = self._digests(ev.BackupDigested, backup.started.transfer, slot)
            back = self._digests(ev.LoadDigested, load.started.transfer, slot)
            if not out or not back:
                continue
            if len(out) > 1 or len(back) > 1:
                raise Refused("a page was digested twice")
            if {len(out[0].digests), len(back[0].digests)} != {self.line.instance.get("layers")}:
                raise Refused("a digest is not of every layer")
            if not backup.started.seq < out[0].seq < back[0].seq or back[0].seq < load.started.seq:
                raise Refused("digested at another time")
            if any(load.started.seq < seq < back[0].seq for seq in self.line.resets):
                raise Refused("the cache was reset before the page was digested")
            for entry in self._history(attempt.use, match, epoch, low, high):
                if not entry.there and load.started.seq < entry.seq < back[0].seq:
                    raise Refused("the page had left L1 before it was digested")
            self._whole([load.queued, out[0], back[0]])
            found[low] = out[0].digests != back[0].digests
        return found

    def _digests(self, kind: type[ev.Event], transfer: int, slot: int) -> list[ev.BackupDigested | ev.LoadDigested]:
        return [
            e
            for e in self.line.events
            if isinstance(e, ev.BackupDigested | ev.LoadDigested)
            and type(e) is kind
            and (e.transfer, e.slot) == (transfer, slot)
        ]

    # --- the record ----------------------------------------------------------------------------------

    def _whole(self, needed: list[ev.Event]) -> None:
        first, last = min(e.seq for e in needed), max(e.seq for e in needed)
        for low, high, why in self.line.bad:
            if low <= last and first <= high:
                raise Refused(f"events {low} to {high}: {why}")

    def _witness(self, attempt: Attempt, match: ev.Matched, admission: ev.Admission) -> None:
        """The server's own attribution, where it was recorded."""
        if attempt is not attempt.use.attempts[0]:
            return  # After a retraction the server adds up.
        loaded = sum(c.queued.tokens for c in self._loads(attempt, match, admission))
        for event in [e for e in attempt.events if isinstance(e, ev.Released)][:1]:
            if isinstance(event, ev.Released):
                below = max(event.cached_host, 0) + max(event.cached_storage, 0)
                if event.cached_device >= 0 and (event.cached_device, below) != (match.device, loaded):
                    raise Refused("the server attributes it otherwise")
                if event.cached_device < 0 and event.cached_total != match.device + loaded:
                    raise Refused("the server counts other cached tokens")
