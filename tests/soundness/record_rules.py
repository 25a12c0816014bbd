"""What holds in every healthy record of one scheduler, each rule by itself: one predicate, in plain words.

A rule yields what contradicts it: the stretch of event numbers that is in doubt, and why. Whoever claims something that
rests on events of such a stretch is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from kvwitness.patches.schema import events as ev
from soundness.relations import TOO_LONG, Relations
from soundness.things import Launch, Snapshot


class Flaw(NamedTuple):
    """Events ``first`` to ``last`` are in doubt."""

    rule: str
    first: float
    last: float
    why: str


Doubt = tuple[float, float, str]
Rule = Callable[[Relations], Iterator[Doubt]]
EVERYTHING = (-math.inf, math.inf)
RECORD: list[Rule] = []
"""The rules, in the order in which they are asked."""


def rule(predicate: Rule) -> Rule:
    RECORD.append(predicate)
    return predicate


def flaws(record: Relations) -> list[Flaw]:
    """Everything in the record that contradicts a rule."""
    return [Flaw(told.__name__, *doubt) for told in RECORD for doubt in told(record)]


def _all_or_each(wrong: list[ev.Event], of: int, why: str) -> Iterator[Doubt]:
    """When nothing fits a fact, the fact is wrong; else the events that do not fit it are."""
    if wrong and len(wrong) == of:
        yield (*EVERYTHING, why)
    else:
        yield from ((event.seq, event.seq, why) for event in wrong)


# --- the journal itself ------------------------------------------------------------------------------


@rule
def numbers_have_no_hole(r: Relations) -> Iterator[Doubt]:
    """Event numbers begin with 1 and have no hole."""
    before = 0
    for event in r.events:
        if event.seq != before + 1:
            yield before + 1, event.seq - 1, "events are missing"
        before = event.seq


@rule
def numbers_rise_in_every_thread(r: Relations) -> Iterator[Doubt]:
    """Each thread writes rising numbers, and no number is written twice."""
    seen: set[int] = set()
    for lane in r.lanes:
        top = 0
        for event in lane:
            if event.seq <= top:
                yield event.seq, top, "events are repeated or out of order"
            elif event.seq in seen:
                yield event.seq, event.seq, "an event is repeated"
            seen.add(event.seq)
            top = max(top, event.seq)


@rule
def clocks_do_not_run_backwards(r: Relations) -> Iterator[Doubt]:
    """Within a thread no event is older than the one before it."""
    for lane in r.lanes:
        seq = clock = 0
        for event in lane:
            if event.t_ns < clock:
                yield min(seq, event.seq), max(seq, event.seq), "the clock runs backwards"
            seq, clock = max(seq, event.seq), max(clock, event.t_ns)


@rule
def texts_have_one_meaning(r: Relations) -> Iterator[Doubt]:
    """The number of a text is not given to another text."""
    for told in r.texts.values():
        if len(told) > 1:
            yield from ((t.seq, t.seq, "a number gets a second meaning") for t in told if t.text != told[0].text)


# --- facts -------------------------------------------------------------------------------------------

CONSTANT = (
    "ranks",
    "family",
    "tree_class",
    "tree_core",
    "page_size",
    "bytes_per_token",
    "layers",
    "pools",
    "host_memory_mode",
    "device_tokens",
    "host_tokens",
    "copy_threads",
    "write_policy",
)
"""What an instance is for all its life; a write policy may come with a storage that is attached."""


@rule
def facts_can_be_read(r: Relations) -> Iterator[Doubt]:
    """What is told of the instance, its process and its hooks is an object."""
    for event in r.unreadable:
        if event.kind in (ev.FactKind.COVERAGE, ev.FactKind.INSTANCE, ev.FactKind.PROCESS):
            yield (*EVERYTHING, f"the facts of event {event.seq} cannot be read")


@rule
def facts_do_not_change(r: Relations) -> Iterator[Doubt]:
    """What an instance or its process is does not change: a later fact that says otherwise contradicts."""
    attached = any(change.attach and change.ok for change in r.of(ev.StorageChanged))
    for told, names in ((r.instance_facts, CONSTANT), (r.process_facts, ("role", "sglang", "start", "host", "key"))):
        known: dict[str, Any] = {}
        for seq, facts in told:
            for name in names:
                value = facts.get(name)
                changes = value is not None and known.setdefault(name, value) != value
                if changes and not (name == "write_policy" and attached):
                    yield (*EVERYTHING, f"the facts of event {seq} take back {name}")


@rule
def slots_are_whole_pages_of_the_pool(r: Relations) -> Iterator[Doubt]:
    """Host slots are taken, given back, written and read in whole pages, and lie in the pool."""
    total = r.facts.get("host_tokens")
    limit = total if isinstance(total, int) else TOO_LONG
    kinds: tuple[Any, ...] = (ev.HostAlloc, ev.HostFree, ev.BackupQueued, ev.LoadQueued, ev.ResidentNode)
    events = [e for kind in kinds for e in r.of(kind) if getattr(e, "pool", 0) == 0 and e.slots]
    page = r.page
    wrong = [
        e
        for e in events
        if any(s.start % page or s.length % page or s.length < 1 or s.start + s.length > limit for s in e.slots)
    ]
    yield from _all_or_each(wrong, len(events), "slots that are not whole pages of the pool")


@rule
def nodes_are_whole_pages(r: Relations) -> Iterator[Doubt]:
    """A node of the tree begins and ends with a page."""
    kinds: tuple[Any, ...] = (ev.Matched, ev.Inserted)
    events = [e for kind in kinds for e in r.of(kind) if e.path]
    wrong = [e for e in events if any(step.start % r.page or step.end % r.page for step in e.path)]
    yield from _all_or_each(wrong, len(events), "nodes that are not whole pages")


def _bytes_fit(r: Relations, event: ev.TransferStarted) -> bool:
    per_token = r.bytes_per_token
    if len(r.facts.get("pools") or ()) > 1:
        return event.bytes >= event.tokens * per_token > 0
    return event.bytes == event.tokens * per_token > 0


@rule
def bytes_are_those_of_the_tokens(r: Relations) -> Iterator[Doubt]:
    """A transfer moves tokens times bytes per token; state of further pools comes on top."""
    wrong = [launch for launch in r.launches if not _bytes_fit(r, launch.event)]
    if wrong and len(wrong) == len(r.launches) > 1:
        yield (*EVERYTHING, "no transfer moves the bytes per token that the facts name")
    for launch in wrong:
        yield launch.since, launch.event.seq, "a transfer's bytes are not those of its tokens"


# --- the host pool -----------------------------------------------------------------------------------


@rule
def the_pool_counts_alike(r: Relations) -> Iterator[Doubt]:
    """The pool's own count of free slots follows the allocations and releases."""
    available: int | None = None
    last = 0
    total = r.facts.get("host_tokens")
    for event in r.pool_events:
        told = event.available
        if isinstance(event, ev.HostClear):
            available, last = told, event.seq
            if isinstance(total, int) and told != total:
                yield event.seq, event.seq, "an emptied pool is not free"
            continue
        change = 0
        if isinstance(event, ev.HostAlloc):
            change = -sum(run.length for run in event.slots)
        elif isinstance(event, ev.HostFree):
            change = sum(run.length for run in event.slots)
        if available is not None and available + change != told:
            yield last, event.seq, "the host pool counts otherwise"
        if told < 0 or (isinstance(total, int) and told > total):
            yield event.seq, event.seq, "the host pool has less than no free slots, or more than slots"
        available, last = told, event.seq


# --- L1 evictions ------------------------------------------------------------------------------------


@rule
def evictions_begin_and_end(r: Relations) -> Iterator[Doubt]:
    """An eviction ends, has a number of its own, and has freed what its victims held."""
    numbers: Counter[int] = Counter()
    for call in r.calls:
        numbers[call.begin.call] += 1
        if numbers[call.begin.call] > 1:
            yield call.begin.seq, call.begin.seq, "an eviction began twice"
        if call.end is None:
            yield call.begin.seq, r.last, "an eviction that does not end"
        elif sum(victim.tokens for victim in call.victims) != call.end.freed:
            yield call.begin.seq, call.end.seq, "an eviction freed other tokens than its victims had"


@rule
def what_leaves_l1_leaves_in_an_eviction(r: Relations) -> Iterator[Doubt]:
    """A node leaves L1 within an eviction; an eviction that ends has begun."""
    for event in r.stray:
        yield event.seq, event.seq, f"{type(event).__name__} of an eviction that did not begin"


@rule
def victims_are_what_they_are_told_to_be(r: Relations) -> Iterator[Doubt]:
    """A node that leaves L1 frees its own tokens; when it was demoted, all of them were backed up."""
    for gone in r.of(ev.EvictedL1):
        plain = gone.how in (ev.Eviction.DEMOTED, ev.Eviction.DROPPED)
        if plain and gone.start >= 0 and gone.tokens not in (0, gone.end - gone.start):
            yield gone.seq, gone.seq, "evicted tokens are not the node's"
        elif gone.how == ev.Eviction.DEMOTED and gone.unbacked:
            yield gone.seq, gone.seq, "demoted, and without a host copy"
        elif not 0 <= gone.unbacked <= max(gone.tokens, 0):
            yield gone.seq, gone.seq, "more tokens without a host copy than tokens"


# --- copies ------------------------------------------------------------------------------------------


def _carries_otherwise(launch: Launch) -> str:
    event = launch.event
    if event.direction not in (ev.Direction.D2H, ev.Direction.H2D):
        return "a transfer in no known direction"
    queued = [copy.queued.node for copy in launch.copies] + [n for i in launch.unseen for n in i.nodes]
    tokens = sum(copy.queued.tokens for copy in launch.copies) + sum(i.tokens for i in launch.unseen)
    if len(set(event.nodes)) != len(event.nodes):
        return "a node twice in one transfer"
    if sorted(event.nodes) != sorted(queued):
        return "a transfer's nodes are not those that wait"
    return "" if event.tokens == tokens else "a transfer's tokens are not those that wait"


@rule
def transfers_take_what_waits(r: Relations) -> Iterator[Doubt]:
    """A transfer has a number of its own and takes exactly what was queued since the last one in its direction."""
    numbers = {i.transfer for i in r.of(ev.InFlight) if i.launched}
    for launch in r.launches:
        why = _carries_otherwise(launch)
        if launch.event.transfer in numbers:
            why = "a transfer's number is taken"
        numbers.add(launch.event.transfer)
        if why:
            yield launch.since, launch.event.seq, why


@rule
def nothing_is_acknowledged_before_it_is_launched(r: Relations) -> Iterator[Doubt]:
    """A backup is acknowledged after its launch."""
    for copy in r.backups:
        if copy.premature is not None:
            yield copy.queued.seq, copy.premature.seq, "a copy that was acknowledged without being launched"


# --- what was there at attach ------------------------------------------------------------------------


def _snapshot_wrong(look: Snapshot, r: Relations) -> Iterator[str]:
    end = look.end
    if end is not None:
        found = [there.event for there in look.nodes]
        l1 = sum(e.end - e.start for e in found if e.l1 == ev.AtAttach.RESIDENT)
        l2 = sum(e.end - e.start for e in found if e.l2 == ev.AtAttach.RESIDENT)
        if (end.nodes, end.l1_tokens, end.l2_tokens) != (len(found), l1, l2):
            yield "the snapshot counts otherwise than it found"
    numbers = Counter(there.event.node for there in look.nodes)
    if any(count > 1 for count in numbers.values()):
        yield "a node was found twice"
    for flight in look.under_way:
        for there in look.nodes:
            e = there.event
            tier = e.l2 if flight.direction == ev.Direction.D2H else e.l1
            if e.node in flight.nodes and tier == ev.AtAttach.RESIDENT and not _ended(r, flight, e):
                yield "a copy of a node is under way into the tier that is said to hold it"


def _ended(r: Relations, flight: ev.InFlight, there: ev.ResidentNode) -> bool:
    """Was the end of a copy that was under way seen before the node was looked at?"""
    ends: Iterable[Any] = r.of(ev.BackupAcked) if flight.direction == ev.Direction.D2H else r.of(ev.LoadDone)
    launched = [e.transfer for e in r.of(ev.TransferStarted) if flight.seq < e.seq < there.seq]
    numbers = {flight.transfer} if flight.launched else set(launched)
    return any(e.transfer in numbers and flight.seq < e.seq < there.seq for e in ends)


@rule
def a_snapshot_does_not_contradict_itself(r: Relations) -> Iterator[Doubt]:
    """A snapshot finds each node once, counts what it found, and calls nothing resident that is still being copied."""
    for look in r.snapshots:
        for why in _snapshot_wrong(look, r):
            yield look.begin.seq, look.end.seq if look.end is not None else r.last, why


@rule
def what_was_there_is_told_while_looking(r: Relations) -> Iterator[Doubt]:
    """Nodes and copies under way are told between the beginning and the end of a snapshot."""
    for event in r.homeless:
        yield event.seq, event.seq, f"{type(event).__name__} when nobody was looking"
