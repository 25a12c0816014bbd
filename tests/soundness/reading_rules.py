"""How a block came into L1, and what a load-back read: rules that rest on one another.

What was loaded had been copied to L2 while it was in L1, and what was in L1 may have been loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvwitness.patches.schema import events as ev
from soundness.blocks import Birth
from soundness.rules import At, Refusal, Rules, Why
from soundness.stay_rules import admission_of
from soundness.subjects import COMPUTES, FETCHES, LOADS, Origin, Reading, in_doubt
from soundness.things import Copy, Fetch, Found, agree

# --- what put a block into L1 ------------------------------------------------------------------------

ORIGIN: Rules[Origin] = Rules("how a block came into L1")
DEPTH = 6
"""How often what was loaded may have been backed up from what was loaded."""


@dataclass(eq=False)
class Put:
    """What a request computed, and the insert that put it into the tree."""

    birth: Birth
    insert: ev.Inserted


INSERTED: Rules[Put] = Rules("an insert of what a request computed")


@INSERTED
def an_insert_is_what_its_path_holds(i: Put) -> Iterator[Why]:
    """Its path has no hole and ends where what was inserted ends; no more was there before than was inserted."""
    insert, position = i.insert, 0
    for step in insert.path:
        if step.start != position or step.end <= step.start:
            break
        position = step.end
    if position != insert.key_tokens or insert.path[-1].node != insert.node:
        yield "the path of an insert is not what was inserted", insert
    elif not 0 <= insert.existing <= insert.key_tokens:
        yield "more was there before than was inserted", insert


@INSERTED
def only_what_was_computed_is_inserted(i: Put) -> Iterator[Why]:
    """What is inserted was reused, computed by passes that were launched before, or decoded: of as many tokens as the
    request was released with."""
    stay, seq = i.birth.stay, i.insert.seq
    passes = [e for e in stay.of(ev.Prefill) if e.seq < seq]
    end = passes[-1].end if passes else 0
    decoding = bool(passes) and passes[-1].last and end >= stay.queued.prompt_tokens
    if decoding and stay.released is not None and stay.released.seq > seq:
        end = max(end, stay.queued.prompt_tokens + stay.released.output_tokens)
    if i.insert.key_tokens > end:
        yield "more was inserted than was computed", i.insert


def _no_birth(o: Origin, birth: Birth, insert: ev.Inserted) -> Refusal | None:
    """Why an insert does not say that what was computed is in L1."""
    refused = INSERTED.refusal(Put(birth, insert))
    return refused or in_doubt(o.memory, o.r, birth.stay, insert.seq, COMPUTES)


@ORIGIN
def it_came_into_l1_and_did_not_leave(o: Origin) -> Iterator[Why]:
    """Looking back: an insert of what the request itself had computed; or what was found at attach; or a load-back (the
    rules of a reading). An insert that says that it was there already is no beginning."""
    birth: Birth | None = None
    insert: ev.Inserted | None = None
    why: Why = ("nothing recorded put it into L1",)
    for move in o.moves:
        if not move.there:
            if birth is None:
                why = why if isinstance(why[0], Refusal) else (f"{why[0]} after it had left", At(move.seq))
            break
        if move.insert is not None and move.use is not None:
            computed = o.block.born(move.use, move.insert.seq)
            if computed is not None and (doubt := _no_birth(o, computed, move.insert)) is not None:
                why = (doubt,)
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
                yield (refused,)
            o.load, o.chain = move.load, reading.chain
            return
    if birth is None or insert is None:
        yield why
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
def its_request_was_in_order(g: Reading) -> Iterator[Why]:
    """Nothing contradicts in the stay that the load-back was queued for, up to then."""
    if g.load.stay is None:
        yield "a load-back for nobody known", g.load.queued
    elif doubt := in_doubt(g.memory, g.r, g.load.stay, g.load.queued.seq, LOADS):
        yield (doubt,)


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
        before = [t for t in g.touches if t.seq < since and t.what != "write"]
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
        if touch.source is not None and touch.seq > since and touch.position != g.block.low:
            yield "the slots were written or found for other positions", At(touch.seq), g.load.queued
    if g.filled.seq > g.load.queued.seq:
        yield "written after the read was queued", At(g.filled.seq), g.load.queued


@READING
def what_it_held_was_this_prefix(g: Reading) -> Iterator[Why]:
    """A backup, a prefetch or the snapshot accounts for what was in the slots (their own rules)."""
    rules = {Copy: BACKED_UP, Fetch: FETCHED, Found: WAS_FOUND}[type(g.source)]
    refused = rules.refusal(g)
    if refused is not None:
        yield (refused,)
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
    for other in g.r.backups_of[b.queued.node]:
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
        yield (refused._replace(why=f"copied to L2, and not in L1: {refused.why}"),)
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
        yield (doubt,)
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
    """Tokens and slots are equal in number, whole pages and none twice; the digests show the prefix, but for less than
    a cell, and there both requests' paths lead to one node."""
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
