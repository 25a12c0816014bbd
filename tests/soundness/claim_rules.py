"""What has to be true of "tier T served tokens [low, high) of this request", each rule by itself, in plain words.

The rules of a list are asked in its order, and each may presume those before it. A rule yields why it refuses, and the
events that it refuses by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from kvwitness.patches.schema import events as ev
from soundness.blocks import Birth, Block, Move
from soundness.relations import Copy, Fetch, Found, Relations, Stay, Touch, agree
from soundness.stay_rules import admission_of, doubts, loaded, match_of, most_tokens

TREE_FAMILY = {"HiRadixCache": "hiradix", "UnifiedRadixCache": "unified"}
LINKS = {
    "L1": ("born", "resident_l1", "left_l1", "used", "epoch"),
    "L2": ("born", "backed_up", "left_l1", "resident_l2", "read", "used", "epoch"),
    "L3": ("prefetched", "resident_l2", "read", "used", "epoch"),
    "prefetched": ("prefetched",),
    "content": ("content",),
}
S = TypeVar("S")
Why = tuple[Any, ...]
"""Why it is refused, and the events."""


class Refusal(NamedTuple):
    """A rule's no."""

    rule: str
    why: str
    events: tuple[int, ...]

    def __str__(self) -> str:
        numbers = f" (events {', '.join(map(str, self.events))})" if self.events else ""
        return f"{self.why}{numbers} [{self.rule}]"


class Rules(Generic[S]):
    """A list of rules about one kind of thing."""

    def __init__(self, about: str) -> None:
        self.about = about
        self.all: list[Callable[[S], Iterator[Why]]] = []

    def __call__(self, predicate: Callable[[S], Iterator[Why]]) -> Callable[[S], Iterator[Why]]:
        self.all.append(predicate)
        return predicate

    def refusal(self, subject: S) -> Refusal | None:
        """The first no."""
        for predicate in self.all:
            for why, *events in predicate(subject):
                seqs = tuple(sorted({e.seq for e in events if e is not None}))
                return Refusal(predicate.__name__, why, seqs)
        return None


# --- what a claim is about ---------------------------------------------------------------------------


@dataclass(eq=False)
class Served:
    """One stay of a request, as the subject of claims."""

    r: Relations
    stay: Stay

    @cached_property
    def admission(self) -> ev.Admission | None:
        return admission_of(self.stay)

    @cached_property
    def match(self) -> ev.Matched | None:
        return match_of(self.stay, self.admission.seq) if self.admission is not None else None

    @cached_property
    def passes(self) -> list[ev.Prefill]:
        return self.stay.of(ev.Prefill)

    @cached_property
    def dones(self) -> list[ev.PrefillDone]:
        return self.stay.of(ev.PrefillDone)

    @cached_property
    def doubts(self) -> list[tuple[int, str, str]]:
        return doubts(self.stay)

    @property
    def processed(self) -> int:
        """When the result of the last pass was processed."""
        return self.dones[-1].seq

    @cached_property
    def loaded(self) -> int:
        assert self.match is not None and self.admission is not None
        return loaded(self.stay, self.match, self.admission)


@dataclass(eq=False)
class Page:
    """One page of a claim."""

    served: Served
    tier: str
    block: Block
    memory: dict[int, Served]
    """What is known of other stays."""

    @property
    def r(self) -> Relations:
        return self.served.r

    @property
    def match(self) -> ev.Matched:
        return self.block.match

    @property
    def low(self) -> int:
        return self.block.low

    @property
    def high(self) -> int:
        return self.block.high

    @cached_property
    def load(self) -> Copy | None:
        """The one load-back of it for the request."""
        assert self.served.admission is not None
        mine = [
            c
            for c in self.served.stay.loads
            if self.match.seq < c.queued.seq < self.served.admission.seq
            and c.queued.start < self.high
            and self.low < c.queued.end
        ]
        return mine[0] if len(mine) == 1 else None

    @cached_property
    def shared(self) -> Copy | None:
        """The load-back for another request that brought it: the last thing that put it into L1 before the match."""
        moves = [m for m in self.block.moves if m.seq < self.match.seq]
        for move in reversed(moves):
            if not move.there:
                return None
            if move.load is not None:
                return move.load if move.load.stay is not self.served.stay else None
        return None

    @cached_property
    def reading(self) -> Reading:
        load = self.load if self.load is not None else self.shared
        assert load is not None
        by = self.match.seq if load is self.load else load.queued.seq
        return Reading(self.r, self.block, load, by, self.memory)

    @cached_property
    def origin(self) -> Origin:
        return Origin(self.r, self.block, self.match.seq, self.memory)

    @cached_property
    def chain(self) -> list[ev.Event]:
        """The events that the claim rests on."""
        served = self.served
        assert served.admission is not None
        events: list[ev.Event] = [self.match, served.admission, *served.passes, *served.dones]
        if self.tier == "L1":
            return events + self.origin.chain
        events += self.reading.chain
        out = self.left
        if out is not None and self.tier == "L2":
            events += [e for e in self.r.of(ev.EvictedL1) if e.seq == out.seq]
            events += [out.found.event] if out.found is not None else []
        return events

    @cached_property
    def left(self) -> Move | None:
        """How it had left L1, when it had: the last move before the match (or before the shared load-back)."""
        before = self.match.seq if self.load is not None else self.reading.load.queued.seq
        moves = [m for m in self.block.moves if m.seq < before]
        return moves[-1] if moves and not moves[-1].there else None


@dataclass(eq=False)
class Reading:
    """A load-back's reading of the host page of a block. What it read has to have been there by event ``by``."""

    r: Relations
    block: Block
    load: Copy
    by: int
    memory: dict[int, Served]
    depth: int = 0
    chain: list[ev.Event] = field(default_factory=list)

    @cached_property
    def number(self) -> int | None:
        """The host page."""
        return self.load.page_of(self.block.low, self.r.page)

    @cached_property
    def touches(self) -> list[Touch]:
        """What happened to it until the read had ended."""
        assert self.load.ended is not None
        told = self.r.host.get(self.number, ()) if self.number is not None else ()
        return [t for t in told if t.seq < self.load.ended.seq]

    @cached_property
    def filled(self) -> Touch | None:
        """The last writing of it; where nothing was written, what was found in it at attach."""
        written = [t for t in self.touches if t.what != "found"]
        last = written[-1] if written else self.touches[-1] if self.touches else None
        return last if last is not None and last.source is not None else None

    @cached_property
    def taken(self) -> Touch | None:
        """Its allocation for that writing."""
        written = [t for t in self.touches if t.what != "found"]
        return written[-2] if len(written) > 1 and written[-2].what == "alloc" else None

    @property
    def source(self) -> Copy | Fetch | Found | None:
        """Who filled it last."""
        return self.filled.source if self.filled is not None else None

    @property
    def usable(self) -> int:
        """Since when it could be read."""
        match self.source:
            case Copy(acks=[ack, *_]):
                return ack.seq
            case Fetch(done=done):
                return done.seq
            case Found(event=event):
                return event.seq
        return self.by

    @property
    def backup(self) -> Copy:
        assert isinstance(self.source, Copy)
        return self.source

    @property
    def fetch(self) -> Fetch:
        assert isinstance(self.source, Fetch)
        return self.source

    @property
    def found(self) -> Found:
        assert isinstance(self.source, Found)
        return self.source


@dataclass(eq=False)
class Origin:
    """What put a block into L1 so that it was there at event ``at``."""

    r: Relations
    block: Block
    at: int
    memory: dict[int, Served]
    depth: int = 0
    carried: bool = False
    """Also by the insert that event ``at`` is a part of."""
    load: Copy | None = None
    """The load-back that it was, when it was one."""
    chain: list[ev.Event] = field(default_factory=list)

    @cached_property
    def moves(self) -> list[Move]:
        """The moves until then, the last one first."""
        before = [m for m in self.block.moves if m.seq < self.at]
        later = [m for m in self.block.moves if m.seq > self.at]
        if self.carried and later and (insert := later[0].insert) is not None and later[0].use is not None:
            birth = self.block.born(later[0].use, self.at)
            stay = self.r.stay_of.get(insert.seq)
            ended = birth is not None and birth.stay.released is not None and birth.stay.released.seq < self.at
            if birth is not None and birth.stay is stay and not ended:
                before.append(later[0])
        return before[::-1]


def served(memory: dict[int, Served], r: Relations, stay: Stay) -> Served:
    return memory.setdefault(id(stay), Served(r, stay))


COMPUTES = ("one_id_is_one_request_at_a_time", "digests_fit_pages_and_prompt", "passes_follow_one_another")
LOADS = (*COMPUTES[:2], "a_path_is_a_path", "loads_are_of_what_the_match_promised")
FETCHES = COMPUTES[:2]
"""The rules of a stay that what another request computed, loaded or fetched rests on."""


def in_doubt(
    memory: dict[int, Served], r: Relations, stay: Stay, until: int, of: tuple[str, ...]
) -> tuple[str, int] | None:
    """Why a stay's own events say nothing of what it did until event ``until``, by some of the rules."""
    for seq, why, name in served(memory, r, stay).doubts:
        if seq <= until and name in of:
            return why, seq
    return None


class At(NamedTuple):
    """An event that is known by its number alone."""

    seq: int


# --- a request that was served -----------------------------------------------------------------------

SERVED: Rules[Served] = Rules("a request of which something is claimed")


@SERVED
def its_own_events_are_in_order(s: Served) -> Iterator[Why]:
    """Nothing in the request's own stay contradicts (the rules of a stay)."""
    for seq, why, _ in s.doubts:
        yield why, At(seq)


@SERVED
def it_was_admitted_on_a_match(s: Served) -> Iterator[Why]:
    """The request was matched and then admitted, in one epoch."""
    if s.admission is None:
        yield "not admitted", s.stay.queued
    elif s.match is None:
        yield "no match before the admission", s.admission
    elif s.r.reset_between(s.match.seq, s.admission.seq):
        yield "reset between match and admission", s.match, s.admission


@SERVED
def the_admission_says_what_was_matched_and_loaded(s: Served) -> Iterator[Why]:
    """Admitted with the prefix that was matched in L1 and what was loaded behind it."""
    assert s.match is not None and s.admission is not None
    if s.admission.prefix != s.match.device + s.loaded:
        yield "admitted with another prefix than matched and loaded", s.match, s.admission
    decided = [e for e in s.stay.of(ev.LoadBackDecided) if s.match.seq < e.seq < s.admission.seq]
    if s.loaded and len(decided) != 1:
        yield "init_load_back did not return what was queued", s.admission


@SERVED
def it_computed_the_rest(s: Served) -> Iterator[Why]:
    """Prompt = device + loaded + computed: passes to the end of the prompt, the last of them called the last."""
    if not s.passes:
        yield "no prefill", s.admission
        return
    prompt = s.stay.queued.prompt_tokens
    end = s.passes[-1].end
    if end < prompt or end > most_tokens(s.stay) or (end > prompt and not s.stay.queued.retracted):
        yield "prompt is not device + loaded + recomputed", s.passes[-1]
    if not s.passes[-1].last:
        yield "the last pass is not the last", s.passes[-1]


@SERVED
def the_results_were_processed(s: Served) -> Iterator[Why]:
    """The result of every pass was processed, the last one gave a token."""
    if len(s.dones) != len(s.passes):
        yield "a pass whose result was never processed", s.passes[-1]
    elif s.dones[-1].output_tokens < 1:
        yield "the prefill had no result", s.dones[-1]


@SERVED
def it_was_not_given_up_before(s: Served) -> Iterator[Why]:
    """It was not aborted, nor retracted, before the result was processed."""
    for e in s.stay.of(ev.AbortedInQueue):
        yield "aborted in the queue", e
    for released in s.stay.of(ev.Released):
        if released.seq < s.processed and released.state != ev.ReleaseState.FINISHED:
            yield "aborted before the result", released


@SERVED
def it_was_not_reset_meanwhile(s: Served) -> Iterator[Why]:
    """No reset between the match and the last result."""
    assert s.match is not None
    if s.r.reset_between(s.match.seq, s.processed):
        yield "the cache was reset before the prefill had ended", s.match, s.dones[-1]


@SERVED
def the_server_says_the_same(s: Served) -> Iterator[Why]:
    """The server's own attribution, where it was recorded, is that of the match and the load (a first stay only: after
    a retraction the server adds up)."""
    assert s.match is not None
    e = s.stay.released
    if s.stay is not s.stay.use.first or e is None:
        return
    below = max(e.cached_host, 0) + max(e.cached_storage, 0)
    if e.cached_device >= 0 and (e.cached_device, below) != (s.match.device, s.loaded):
        yield "the server attributes it otherwise", e
    elif e.cached_device < 0 and e.cached_total != s.match.device + s.loaded:
        yield "the server counts other cached tokens", e


# --- a page of it ------------------------------------------------------------------------------------

PAGE: Rules[Page] = Rules("a page of tokens, whatever tier is claimed")


@PAGE
def one_node_of_the_path_holds_it(p: Page) -> Iterator[Why]:
    """A page lies in one node of the matched path."""
    if p.block.step is None:
        yield "no node of the matched path holds it", p.match


@PAGE
def it_is_a_page(p: Page) -> Iterator[Why]:
    """What is reused begins with a page and is whole pages."""
    if p.low % p.r.page or p.high % p.r.page:
        yield "not a whole page", p.match


@PAGE
def a_node_has_one_end_and_one_prefix(p: Page) -> Iterator[Why]:
    """The node was never seen with another end, nor on the path of another prefix."""
    assert p.block.step is not None
    seen = p.block.seen(p.block.step.node, p.match.seq)
    for s in seen:
        if s.step.end != p.block.step.end:
            yield f"node {s.step.node} was seen with two ends", At(s.seq), p.match
        elif agree(s.use, p.block.use, p.high) is False:
            yield f"node {s.step.node} was seen for two prefixes", At(s.seq), p.match


@PAGE
def it_was_not_computed(p: Page) -> Iterator[Why]:
    """The passes begin behind it."""
    if p.served.passes[0].start < p.high:
        yield "beyond the reused prefix", p.served.passes[0]


@PAGE
def it_stayed_in_l1_until_the_result(p: Page) -> Iterator[Why]:
    """From the match on (from the load-back on, where there is one) it did not leave L1 before the last result."""
    for move in p.block.moves:
        if not move.there and p.match.seq < move.seq < p.served.processed:
            yield "evicted from L1 before the prefill had ended", At(move.seq)


# --- L1 ----------------------------------------------------------------------------------------------

IN_L1: Rules[Page] = Rules("an L1 read of a page")


@IN_L1
def it_was_matched_in_l1(p: Page) -> Iterator[Why]:
    """The match found it in L1."""
    assert p.block.step is not None
    if not (p.high <= p.match.device and p.block.step.on_device):
        yield "not matched in L1", p.match


@IN_L1
def something_put_it_there(p: Page) -> Iterator[Why]:
    """An earlier request computed it and put it into the tree, or a load-back for another request had brought it
    completely before the first pass, or it was found there at attach; and nothing took it out since."""
    refused = ORIGIN.refusal(p.origin)
    if refused is not None:
        yield refused.why, *map(At, refused.events)


@IN_L1
def what_a_load_brought_was_there_before_the_first_pass(p: Page) -> Iterator[Why]:
    """A load-back that was not complete when the first pass began is an L2 read, and one of its own as well."""
    load = p.origin.load
    if load is None or load.ended is None:
        return
    if load.stay is p.served.stay:
        yield "its own load-back brought it: that is L2", load.queued
    elif load.ended.seq > p.served.passes[0].seq:
        yield "the load-back that brings it was not complete when it was used", load.ended


# --- L2 ----------------------------------------------------------------------------------------------

IN_L2: Rules[Page] = Rules("an L2 read of a page, by a load-back of its own or of another request")


@IN_L2
def it_was_matched_in_l2_or_on_its_way_from_there(p: Page) -> Iterator[Why]:
    """The match found it in L2; or in L1, and a load-back for another request was bringing it, and nothing else did."""
    assert p.block.step is not None
    in_l2 = p.match.device <= p.low and p.high <= p.match.device + p.match.host and not p.block.step.on_device
    on_its_way = p.high <= p.match.device and p.block.step.on_device and p.tier == "L2" and p.shared is not None
    if not in_l2 and not on_its_way:
        yield "not matched in L2", p.match
    elif on_its_way and p.shared is not None and p.shared.ended is not None and p.shared.ended.seq < p.match.seq:
        yield "the load-back that brought it was complete at the match: that is L1", p.shared.ended
    elif in_l2 and p.load is None:
        yield "not one load-back of it was queued for the request", p.match


@IN_L2
def it_was_launched_before_the_first_pass(p: Page) -> Iterator[Why]:
    """The copy to L1 was launched before the first pass that uses it."""
    launch = p.reading.load.launch
    if launch is None:
        yield "the load-back was not launched", p.reading.load.queued
    elif launch.event.seq > p.served.passes[0].seq:
        yield "the copy to L1 was launched after the first pass that uses it", launch.event, p.served.passes[0]


@IN_L2
def it_was_read(p: Page) -> Iterator[Why]:
    """The load-back read a host page that held the block (the rules of a reading)."""
    refused = READING.refusal(p.reading)
    if refused is not None:
        yield refused.why, *map(At, refused.events)


@IN_L2
def it_stayed_until_the_copy_had_ended(p: Page) -> Iterator[Why]:
    """From the load-back on until its end was seen it did not leave L1."""
    load = p.reading.load
    assert load.ended is not None
    for move in p.block.moves:
        if not move.there and load.queued.seq < move.seq < load.ended.seq:
            yield "evicted from L1 during the load-back", At(move.seq), load.ended


@IN_L2
def threads_copied_before_it_was_read(p: Page) -> Iterator[Why]:
    """Where threads copy, the pass that the load was for went on to each layer after that layer's copy."""
    launch = p.reading.load.launch
    if not p.r.facts.get("copy_threads") or launch is None:
        return
    told = [e for e in p.r.of(ev.LoadWaited) if e.transfer == launch.event.transfer]
    if len(told) != 1 or told[0].early or told[0].layers != p.r.facts.get("layers"):
        yield "the forward pass did not wait for the load-back in every layer", launch.event
    elif not p.served.passes[0].seq < told[0].seq < p.served.dones[0].seq:
        yield "another pass waited for it", told[0]
    else:
        p.reading.chain.append(told[0])


BELOW_L2: Rules[Page] = Rules("an L2 read alone")


@BELOW_L2
def no_prefetch_of_its_own_brought_it(p: Page) -> Iterator[Why]:
    """What a prefetch for this very request brought from storage is an L3 read."""
    source = p.reading.source
    if isinstance(source, Fetch) and source.stay is p.served.stay:
        yield "its own prefetch from storage brought it: that is L3", source.done


@BELOW_L2
def it_had_left_l1_by_demotion(p: Page) -> Iterator[Why]:
    """It left L1 by demotion after its copy in L2 could be used, and was not back until the load-back."""
    if p.left is None:
        yield "it had not left L1 at the match", p.match
    elif p.left.how != ev.Eviction.DEMOTED or p.left.seq < p.reading.usable:
        yield "it did not leave L1 by demotion after its backup was acknowledged", At(p.left.seq)


FROM_L3: Rules[Page] = Rules("an L3 read of a page, beside those of the load-back that brought it to L1")


@FROM_L3
def a_prefetch_of_its_own_filled_the_slots(p: Page) -> Iterator[Why]:
    """The slots that the request's load-back read were filled by a prefetch for this stay in the queue."""
    source = p.reading.source
    if not isinstance(source, Fetch) or source.stay is not p.served.stay:
        yield "no prefetch for this request filled the slots that were read", p.reading.load.queued
    elif source.asked is None or source.asked.seq < p.served.stay.queued.seq:
        yield "the prefetch was not asked for while the request waited", source.done


# --- what put a block into L1 ------------------------------------------------------------------------

ORIGIN: Rules[Origin] = Rules("how a block came into L1")
DEPTH = 6
"""How often what was loaded may have been backed up from what was loaded."""


def most_computed(stay: Stay, before: int) -> int:
    """Up to where the tokens of a stay can be in L1 at event ``before``: reused, computed by launched passes, decoded."""
    passes = [e for e in stay.of(ev.Prefill) if e.seq < before]
    end = passes[-1].end if passes else 0
    if passes and passes[-1].last and stay.released is not None and stay.released.seq > before:
        end = max(end, stay.queued.prompt_tokens + stay.released.output_tokens)
    return end


def _no_birth(o: Origin, birth: Birth, insert: ev.Inserted) -> tuple[str, int] | None:
    """Why an insert does not say that what was computed is in L1: only what was computed or decoded is inserted, on a
    path without a hole that ends where it does."""
    position = 0
    for step in insert.path:
        if step.start != position or step.end <= step.start:
            break
        position = step.end
    if position != insert.key_tokens or insert.path[-1].node != insert.node:
        return "the path of an insert is not what was inserted", insert.seq
    if not 0 <= insert.existing <= insert.key_tokens:
        return "more was there before than was inserted", insert.seq
    if insert.key_tokens > most_computed(birth.stay, insert.seq):
        return "more was inserted than was computed", insert.seq
    return in_doubt(o.memory, o.r, birth.stay, insert.seq, COMPUTES)


@ORIGIN
def it_came_into_l1_and_did_not_leave(o: Origin) -> Iterator[Why]:
    """Looking back: an insert of what the request itself had computed; or what was found at attach; or a load-back (the
    rules of a reading). An insert that says that it was there already is no beginning."""
    birth: Birth | None = None
    insert: ev.Inserted | None = None
    why, events = "nothing recorded put it into L1", []
    for move in o.moves:
        if not move.there:
            if birth is None:
                why, events = f"{why} after it had left", [At(move.seq)]
            break
        if move.insert is not None and move.use is not None:
            computed = o.block.born(move.use, move.insert.seq)
            if computed is not None and (doubt := _no_birth(o, computed, move.insert)):
                why, events = doubt[0], [At(doubt[1])]
                computed = None
            if computed is not None and (birth is None or computed.launched.seq > birth.launched.seq):
                birth, insert = computed, move.insert
            if birth is not None and birth is computed and move.insert.existing <= o.block.low:
                break
        elif move.found is not None:
            o.chain = [move.found.event]
            return
        elif move.load is not None:
            if birth is not None and birth.launched.seq > move.seq:
                break
            if o.depth > DEPTH:
                yield "loaded and backed up too often to follow", At(move.seq)
                return
            reading = Reading(o.r, o.block, move.load, move.load.queued.seq, o.memory, o.depth + 1)
            refused = READING.refusal(reading)
            if refused is not None:
                yield refused.why, *map(At, refused.events)
            o.load, o.chain = move.load, reading.chain
            return
    if birth is None or insert is None:
        yield why, *events
    else:
        o.chain = [*birth.events, insert]


# --- what a load-back read ---------------------------------------------------------------------------

READING: Rules[Reading] = Rules("what a load-back read")


@READING
def it_was_launched_and_it_completed(g: Reading) -> Iterator[Why]:
    """The load-back was launched, and its transfer ended once, with as many tokens and bytes as it began with."""
    start = g.load.launch.event if g.load.launch is not None else None
    if start is None or g.load.ended is None:
        yield "the load-back was not seen to start and complete", g.load.queued
        return
    for end in g.load.acks:
        assert isinstance(end, ev.LoadDone)
        if (end.tokens, end.bytes, sorted(end.nodes)) != (start.tokens, start.bytes, sorted(start.nodes)):
            yield "the copy ended with other tokens than it began with", start, end
    if len(g.load.acks) > 1:
        yield "the copy ended twice", *g.load.acks


def _whole(copy: Copy, page: int) -> bool:
    """Positions, tokens and slots are equal in number and whole pages, none of them twice."""
    q = copy.queued
    held = sum(run.length for run in q.slots)
    return held == q.tokens == q.end - q.start == len(copy.pages) * page and len(set(copy.pages)) == len(copy.pages)


@READING
def it_read_whole_pages(g: Reading) -> Iterator[Why]:
    """Positions, tokens and slots of the load-back are equal in number and whole pages, none of them twice."""
    if not _whole(g.load, g.r.page) or g.number is None:
        yield "positions, tokens and slots of the load-back are not the same whole pages", g.load.queued


@READING
def it_was_in_one_epoch(g: Reading) -> Iterator[Why]:
    """The load-back was queued, and ended, in the epoch of the match."""
    assert g.load.ended is not None
    if g.r.epoch(g.load.queued.seq) != g.block.epoch or g.r.epoch(g.load.ended.seq) != g.block.epoch:
        yield "reset before or during the load-back", g.load.queued, g.load.ended


@READING
def its_request_was_in_order(g: Reading) -> Iterator[Why]:
    """Nothing contradicts in the stay that the load-back was queued for, up to then."""
    if g.load.stay is None:
        yield "a load-back for nobody known", g.load.queued
    elif doubt := in_doubt(g.memory, g.r, g.load.stay, g.load.queued.seq, LOADS):
        yield doubt[0], At(doubt[1])


@READING
def the_slots_held_what_was_written_to_the_end_of_the_read(g: Reading) -> Iterator[Why]:
    """The host page was free, then allocated, then written once, and nothing happened to it until the read had ended;
    or it was found in use at attach, and nothing happened to it at all."""
    assert g.load.ended is not None
    if g.filled is None or g.touches[-1].what not in ("write", "found"):
        yield "the slots did not hold what one backup wrote, from the backup to the end of the read", g.load.queued
        return
    since = g.filled.seq
    if g.filled.what == "write":
        if g.taken is None:
            yield "the slots were not allocated for what was written", At(g.filled.seq)
            return
        since = g.taken.seq
        before = [t for t in g.touches if t.seq < since]
        if before and before[-1].what != "free" and not g.r.emptied_between(before[-1].seq, since):
            yield "the slots were allocated while they were in use", At(before[-1].seq), At(since)
    if g.r.emptied_between(since, g.load.ended.seq) or g.r.reset_between(since, g.load.ended.seq):
        yield "the host pool was emptied in between", At(since), g.load.ended


@READING
def it_was_written_for_these_positions(g: Reading) -> Iterator[Why]:
    """Whoever wrote or found the host page since its allocation, wrote or found it for the position that it is read
    as, before the load-back was queued."""
    assert g.filled is not None
    since = g.taken.seq if g.taken is not None else 0
    for touch in g.touches:
        if touch.source is not None and touch.seq > since:
            if touch.position != g.block.low:
                yield "the slots were written or found for other positions", At(touch.seq), g.load.queued
    if g.filled.seq > g.load.queued.seq:
        yield "written after the read was queued", At(g.filled.seq), g.load.queued


@READING
def what_it_held_was_this_prefix(g: Reading) -> Iterator[Why]:
    """A backup, a prefetch or the snapshot accounts for what was in the slots (their own rules)."""
    rules = {Copy: BACKED_UP, Fetch: FETCHED, Found: WAS_FOUND}[type(g.source)]
    refused = rules.refusal(g)
    if refused is not None:
        yield refused.why, *map(At, refused.events)
        return
    assert g.load.launch is not None and g.load.ended is not None
    g.chain += [At(g.taken.seq)] if g.taken is not None else []  # type: ignore[list-item]
    g.chain += [g.load.queued, g.load.launch.event, g.load.ended]


BACKED_UP: Rules[Reading] = Rules("a backup of which a load-back read a page")


@BACKED_UP
def the_backup_was_acknowledged_in_time(g: Reading) -> Iterator[Why]:
    """It was queued, launched and acknowledged, once, by the transfer that took it, before what was matched rests on
    it."""
    b = g.backup
    if not _whole(b, g.r.page):
        yield "positions, tokens and slots of the backup are not the same whole pages", b.queued
    elif g.r.epoch(b.queued.seq) != g.block.epoch:
        yield "a backup of another epoch", b.queued
    elif b.launch is None or b.premature is not None or not b.acks or b.acks[0].seq > g.by:
        yield "the backup was not launched and acknowledged in time", b.queued
    elif len(b.acks) > 1:
        yield "the backup was acknowledged twice", *b.acks


@BACKED_UP
def one_backup_of_the_node_was_under_way(g: Reading) -> Iterator[Why]:
    """The node was not queued again before its acknowledgement: nobody could tell of which one that is."""
    b = g.backup
    for other in g.r.backups:
        if other is not b and other.queued.node == b.queued.node:
            if b.queued.seq < other.queued.seq < b.acks[0].seq:
                yield "queued again while it was being copied", b.queued, other.queued


@BACKED_UP
def it_was_written_of_this_prefix(g: Reading) -> Iterator[Why]:
    """The node that was written holds this block: by the paths through it and their digests, and with one end."""
    queued = g.backup.queued
    for s in g.block.seen(queued.node, g.block.match.seq):
        if s.step.end != queued.end:
            yield "the node that was written was seen with another end", queued, At(s.seq)
        elif agree(s.use, g.block.use, g.block.high) is False:
            yield "the slots were written for another prefix", queued, At(s.seq)
    if not g.block.is_held_by(queued.node):
        yield "nothing says for whose prefix the slots were written", queued


@BACKED_UP
def it_was_in_l1_from_queue_to_acknowledgement(g: Reading) -> Iterator[Why]:
    """While it was copied the block was in L1: computed by passes that were launched before the backup was queued (each
    chunk by its own), found at attach, or loaded; and it did not leave until the acknowledgement. The device slots are
    somebody else's otherwise."""
    b = g.backup
    for move in g.block.moves:
        if not move.there and b.queued.seq < move.seq < b.acks[0].seq:
            yield "it left L1 while it was copied to L2", b.queued, At(move.seq)
    origin = Origin(g.r, g.block, b.queued.seq, g.memory, g.depth, carried=True)
    refused = ORIGIN.refusal(origin)
    if refused is not None:
        yield f"copied to L2, and not in L1: {refused.why}", b.queued, *map(At, refused.events)
    else:
        assert b.launch is not None
        g.chain += [*origin.chain, b.queued, b.launch.event, b.acks[0]]


FETCHED: Rules[Reading] = Rules("a prefetch from storage of which a load-back read a page")


@FETCHED
def it_was_asked_for(g: Reading) -> Iterator[Why]:
    """It was asked for these tokens, for a request that waited from then on until it had ended, and ended once."""
    f, done = g.fetch, g.fetch.done
    if f.stay is None or f.asked is None or not f.asked.issued:
        yield "a prefetch that was not asked for", done
        return
    if f.ends:
        yield "a prefetch that ends twice", done
    if done.start != f.asked.start or done.completed > f.asked.tokens:
        yield "a prefetch of other tokens than were asked for", f.asked, done
    admission = admission_of(f.stay)
    if (admission is not None and admission.seq < done.seq) or any(e.seq < done.seq for e in f.stay.of(ev.Released)):
        yield "a prefetch for a request that did not wait any more", done
    if doubt := in_doubt(g.memory, g.r, f.stay, done.seq, FETCHES):
        yield doubt[0], At(doubt[1])
    if g.r.epoch(f.asked.seq) != g.block.epoch or g.r.epoch(done.seq) != g.block.epoch:
        yield "a prefetch of another epoch", f.asked, done


@FETCHED
def it_was_looked_up(g: Reading) -> Iterator[Why]:
    """Before it ended the look-up for it found at least as many tokens as came, and nothing raised."""
    f = g.fetch
    if f.looked_up is None:
        yield "nothing was looked up in storage", f.asked, f.done
    elif f.looked_up.tokens < f.done.completed:
        yield "a prefetch of more tokens than storage had", f.looked_up, f.done
    if f.failed is not None:
        yield "the look-up or the transfer failed", f.failed, f.done


@FETCHED
def a_storage_was_attached(g: Reading) -> Iterator[Why]:
    """A storage backend was attached when it was asked for, and until it had ended."""
    assert g.fetch.asked is not None
    attached = bool(g.r.facts.get("storage"))
    for change in g.r.of(ev.StorageChanged):
        if change.ok and change.seq < g.fetch.done.seq:
            if change.seq > g.fetch.asked.seq and not change.attach:
                yield "the storage was detached before the prefetch had ended", change
            attached = bool(change.attach) if change.seq < g.fetch.asked.seq else attached
    if not attached:
        yield "no storage was attached when the prefetch was asked for", g.fetch.asked


@FETCHED
def it_filled_the_slots_with_this_prefix(g: Reading) -> Iterator[Why]:
    """Tokens and slots are equal in number, whole pages and none twice; the digests show the prefix, but for less than a
    cell, and there both requests' paths lead to one node."""
    f, done = g.fetch, g.fetch.done
    held = sum(run.length for run in done.slots)
    if not done.completed == done.existing + done.loaded == held == len(f.pages) * g.r.page:
        yield "tokens and slots of the prefetch are not the same whole pages", done
    elif len(set(f.pages)) != len(f.pages) or done.existing % g.r.page:
        yield "a page twice, or a part of a page", done
    elif done.seq > g.by:
        yield "the prefetch had not ended in time", done
    assert f.stay is not None
    block = g.block
    same = agree(f.stay.use, block.use, block.high)
    if same is None and f.stay.use in block.alike:
        nodes = block.lineage
        same = any(
            done.seq < seq <= block.match.seq and s.node in nodes and s.start <= block.low and block.high <= s.end
            for seq, s in f.stay.use.steps
        )
    if not same:
        yield "the slots were filled for another prefix", done
    else:
        assert f.asked is not None
        g.chain += [f.asked, done, *([f.looked_up] if f.looked_up is not None else [])]


WAS_FOUND: Rules[Reading] = Rules("a node that was found at attach and of which a load-back read a page")


@WAS_FOUND
def it_was_found_in_use_in_time(g: Reading) -> Iterator[Why]:
    """L2 held the node when it was looked at, before what was matched rests on it; its digests and the path say that it
    holds this block."""
    there = g.found
    if there.wrong:
        yield there.wrong, there.event
    elif there.event.l2 != ev.AtAttach.RESIDENT or there.event.seq > g.by:
        yield "found too late, or without a usable copy", there.event
    elif not g.block.was(there):
        yield "nothing says that the node that was found holds this prefix", there.event
    else:
        g.chain.append(there.event)


# --- the record that a claim rests on ----------------------------------------------------------------

OWN = ("tree.match_prefix", "request.next_round", "policy.add_one_req", "results.prefill", "scheduler.run_batch")
"""Hooks that see what a request does: a failure for one request is none for another that is over or not there yet."""
OFTEN = 4
"""From this failure of a hook on, not every one leaves an event."""


@dataclass(eq=False)
class Span:
    """The stretch of a record that a claim rests on."""

    r: Relations
    tier: str
    stay: Stay
    first: int
    last: int
    links: tuple[str, ...]
    flaws: list[Any]

    def hooks(self, told: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """The hooks for these links in a report of what is installed, by name."""
        facts = self.r.facts
        family = facts.get("family") or TREE_FAMILY.get(facts.get("tree_class", ""), "")
        found: dict[str, list[dict[str, Any]]] = {}
        for hook in told:
            if hook.get("family", "common") in ("common", family):
                found.setdefault(str(hook.get("name")), []).append(hook)
        return {
            name: variants
            for name, variants in found.items()
            if any(link in hook.get("links", ()) for hook in variants for link in self.links)
        }


RECORDED: Rules[Span] = Rules("the record that a claim rests on, from its first event to its last")


@RECORDED
def the_instance_was_described_before(s: Span) -> Iterator[Why]:
    """Page size and bytes per token of the instance are told before the first event that counts."""
    if not s.r.instance_facts or s.r.instance_facts[0][0] > s.first:
        yield ("no facts of the instance",)
    elif not s.r.facts.get("page_size") or not s.r.bytes_per_token:
        yield ("no page size, or no bytes per token",)


@RECORDED
def host_memory_is_a_tier(s: Span) -> Iterator[Why]:
    """Host memory keeps what is written to it (mode ``cache``)."""
    if s.tier != "L1" and (s.r.facts.get("host_memory_mode") or "cache") != "cache":
        yield ("host memory is transit here",)


@RECORDED
def the_hooks_were_there_all_the_time(s: Span) -> Iterator[Why]:
    """Every hook that serves a link of the claim was installed before the first event that counts, and stayed so."""
    before = [told for told in s.r.coverage if told[0] < s.first]
    if not before:
        yield ("which hooks were there is not known",)
        return
    for seq, told in [before[-1], *(c for c in s.r.coverage if s.first < c[0] <= s.last)]:
        hooks = s.hooks(told)
        for link in s.links:
            if not any(link in hook.get("links", ()) for each in hooks.values() for hook in each):
                yield f"no hook records {link}", At(seq)
        for name, variants in hooks.items():
            if not any(hook.get("status") == "installed" for hook in variants):
                yield f"{name} was not installed", At(seq)


@RECORDED
def no_hook_failed_meanwhile(s: Span) -> Iterator[Why]:
    """No call of such a hook failed between the first event that counts and the last; of a hook that sees one request
    alone, since that request was queued."""
    names = {name for _, told in s.r.coverage for name in s.hooks(told)}
    for event in s.r.of(ev.HookFailed):
        name = s.r.name(event.hook, event.seq)
        since = s.stay.queued.seq if name in OWN else s.first
        if (name is None or name in names) and event.seq < s.last and (event.seq > since or event.count >= OFTEN):
            yield f"{name} failed", event


@RECORDED
def nothing_of_it_is_in_doubt(s: Span) -> Iterator[Why]:
    """No rule of the record is broken between the first event that counts and the last."""
    for flaw in s.flaws:
        if flaw.first <= s.last and s.first <= flaw.last:
            yield (f"events {flaw.first} to {flaw.last}: {flaw.why} ({flaw.rule})",)
