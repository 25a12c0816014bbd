"""Rules of what was there when kvwitness was attached to a running server."""

from __future__ import annotations

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.chains import cell_tokens
from kvwitness.tracer.ledger.hostpool import Content
from kvwitness.tracer.ledger.state import State
from kvwitness.tracer.rules.declare import Broken, Rules, always
from kvwitness.tracer.rules.l2 import size

ATTACHED = Rules()


@ATTACHED.guard(ev.SnapshotBegin, "begins once")
def _looks_once(s: State, e: ev.SnapshotBegin) -> str | None:
    """A record has one look at what was there, before anything else of the cache."""
    return "what was there before was looked at twice" if s.attached.begun else None


@ATTACHED.guard(ev.SnapshotBegin, "is counted")
def _look_is_counted(s: State, e: ev.SnapshotBegin) -> Broken | None:
    """By the pool's own count as much is free as the events say, and no more than it has."""
    wrong = s.host.miscounted(e.available, 0)
    total = s.told.instance.host_tokens
    if wrong is None and (e.available < 0 or (total is not None and e.available > total)):
        wrong = f"the host pool has {e.available} free slots of {total}"
    return None if wrong is None else Broken(wrong, since=s.counted)


@ATTACHED.effect(ev.SnapshotBegin)
def _the_look_begins(s: State, e: ev.SnapshotBegin, _: ft.Moment) -> None:
    """What is found from here on stands in for what nobody saw."""
    s.attached.begun, s.attached.looking = e.seq, True
    s.host.count(e.available)
    s.counted = e.seq


def _outside(s: State, seq: int) -> str | None:
    return None if s.attached.looking else f"event {seq} tells what was found, and nobody was looking"


@ATTACHED.guard(ev.InFlight, "within the look")
def _flight_within_the_look(s: State, e: ev.InFlight) -> str | None:
    """What is found is found while somebody looks."""
    return _outside(s, e.seq)


@ATTACHED.guard(ev.InFlight, "is a copy")
def _flight_is_a_copy(s: State, e: ev.InFlight) -> str | None:
    """A copy under way has a number of its own, or none while it is queued; it goes one of two ways."""
    if e.direction not in s.transfers.launched or e.launched not in (0, 1) or bool(e.transfer) != bool(e.launched):
        return f"a copy was found under way that is none (event {e.seq})"
    if e.launched and e.transfer in s.transfers.numbers:
        return f"transfer {e.transfer} has the number of an earlier one"
    return "a copy of nothing was found under way" if not e.nodes or e.tokens < 0 else None


@ATTACHED.guard(ev.InFlight, "moves what is not resident yet")
def _flight_not_resident(s: State, e: ev.InFlight) -> Broken | None:
    """A node whose copy to a tier was under way was not resident there."""
    for found in s.found:
        there = found.l1 if e.direction == ev.Direction.H2D else found.l2
        if found.node in e.nodes and there == ev.AtAttach.RESIDENT:
            return Broken(f"node {found.node} was found resident, and its copy under way", since=found.id)
    return None


@ATTACHED.effect(ev.InFlight, also="transfer direction tokens launched nodes")
def _a_copy_is_under_way(s: State, e: ev.InFlight, _: ft.Moment) -> None:
    """Nothing is claimed of it, and its end is not a sign of missing events."""
    s.transfers.numbers.add(e.transfer)
    s.attached.under_way(e)


@ATTACHED.guard(ev.ResidentDigests, "within the look")
def _digests_within_the_look(s: State, e: ev.ResidentDigests) -> str | None:
    """What is found is found while somebody looks."""
    return _outside(s, e.seq)


@ATTACHED.guard(ev.ResidentDigests, "grid fits the page")
def _resident_grid(s: State, e: ev.ResidentDigests) -> str | None:
    """A cell is the smallest number of whole pages that has at least 16 tokens."""
    if not s.told.instance_at or e.grid == cell_tokens(s.told.page):
        return None
    return f"digests of cells of {e.grid} tokens, pages have {s.told.page}"


@ATTACHED.guard(ev.ResidentDigests, "are followed by their node")
def _digests_before_their_node(s: State, e: ev.ResidentDigests) -> str | None:
    """The node whose digests were told comes next, and was not found before."""
    waiting = s.attached.waiting_digests()
    if waiting is not None or s.attached.found_before(e.node) or e.first_cell < 0 or not e.digests:
        return f"the digests of node {e.node} are not followed by it"
    return None


@ATTACHED.effect(ev.ResidentDigests, also="node grid first_cell digests")
def _a_node_s_prefix_is_known(s: State, e: ev.ResidentDigests, _: ft.Moment) -> None:
    """The node that comes next has this prefix, behind its parent's."""
    s.attached.digests(e)


ATTACHED.within(ev.ResidentNode, ev.AtAttach.ABSENT, ev.AtAttach.UNDER_WAY, "l1", "l2")


@ATTACHED.guard(ev.ResidentNode, "within the look")
def _found_within_the_look(s: State, e: ev.ResidentNode) -> str | None:
    """What is found is found while somebody looks."""
    return _outside(s, e.seq)


@ATTACHED.guard(ev.ResidentNode, "is found once")
def _found_once(s: State, e: ev.ResidentNode) -> str | None:
    """A look comes to each node once."""
    return f"node {e.node} was found twice" if s.attached.found_before(e.node) else None


@ATTACHED.guard(ev.ResidentNode, "is below its parent")
def _below_its_parent(s: State, e: ev.ResidentNode) -> str | None:
    """It holds whole pages, from where its parent ends (a parent that was not found may have gone meanwhile)."""
    page, end = s.told.page, s.attached.end_of(e.parent)
    if e.end <= e.start or e.start % page or e.end % page or e.start < 0 or e.parent == e.node:
        return f"node {e.node} was found to hold tokens {e.start} to {e.end}"
    return (
        f"node {e.node} begins at {e.start}, its parent ends at {end}" if end is not None and end != e.start else None
    )


@ATTACHED.guard(ev.ResidentNode, "has its own digests")
def _has_its_own_digests(s: State, e: ev.ResidentNode) -> str | None:
    """Digests that were told just before are its own: of all its cells, behind its parent's."""
    waiting = s.attached.waiting_digests()
    if waiting is not None and waiting != e.node:
        return f"the digests of node {waiting} are not followed by it"
    if waiting is not None and s.attached.chain_of(e) is None and s.attached.end_of(e.parent) == e.start:
        grid, _ = s.attached.before(e.parent)
        return f"the digests of node {e.node} do not continue those of its parent" if grid or e.parent < 0 else None
    return None


@ATTACHED.guard(ev.ResidentNode, "stands for one prefix")
def _found_prefix_is_one(s: State, e: ev.ResidentNode) -> Broken | None:
    """A digest covers all tokens before it: it is never at another place, nor behind another digest."""
    chain = s.attached.chain_of(e)
    if chain is None:
        return None
    first = e.start // chain.grid
    if s.prefixes.elsewhere(chain.grid, first, chain.cells[:first], chain.cells[first:]) is None:
        return None
    return always(f"the digests of node {e.node} stand for another prefix")


@ATTACHED.guard(ev.ResidentNode, "is as the events since left it")
def _as_the_events_left_it(s: State, e: ev.ResidentNode) -> str | None:
    """What happened to it since the hooks stand was seen."""
    return s.tree.unfit(e)


@ATTACHED.guard(ev.ResidentNode, "is not under way")
def _not_under_way(s: State, e: ev.ResidentNode) -> Broken | None:
    """A node whose copy to a tier was under way was not resident there."""
    to_l1 = e.l1 == ev.AtAttach.RESIDENT and s.attached.moves(ev.Direction.H2D, e.node)
    to_l2 = e.l2 == ev.AtAttach.RESIDENT and s.attached.moves(ev.Direction.D2H, e.node)
    return Broken(f"node {e.node} was found resident, and its copy under way", since=0) if to_l1 or to_l2 else None


@ATTACHED.guard(ev.ResidentNode, "holds its slots")
def _holds_its_slots(s: State, e: ev.ResidentNode) -> str | None:
    """What is resident in L2 has a slot for each token, which nothing else was written to; what is not has none."""
    content = Content("snapshot", e.seq, s.epoch, None, e.node, e.start, e.end)
    if e.l2 == ev.AtAttach.RESIDENT:
        if s.host.contested(e.slots, content) or s.host.beyond(e.slots, s.told.instance.host_tokens):
            return f"the slots that node {e.node} is said to have are taken, or are not its tokens"
        return None
    return f"node {e.node} is not in L2, and has {size(e.slots)} slots" if e.slots else None


@ATTACHED.effect(ev.ResidentNode)
def _a_node_is_there(s: State, e: ev.ResidentNode, m: ft.Moment) -> None:
    """It is in the tiers that hold it, from here on; nobody knows since when."""
    if not s.attached.looking:
        return
    again = s.attached.found_before(e.node)
    chain = s.attached.chain_of(e)
    content = Content("snapshot", e.seq, s.epoch, chain, e.node, e.start, e.end, m)
    wrong = again or s.tree.unfit(e) is not None or _not_under_way(s, e) is not None
    resident = e.l2 == ev.AtAttach.RESIDENT
    wrong = wrong or (resident and s.host.contested(e.slots, content))
    s.attached.found(e, chain)
    s.tree.seen_at_attach(e, chain, m)
    if resident and not wrong:
        s.host.found(e.slots, content)
        s.backup_nodes[e.seq] = e.node
    if wrong:
        s.attached.unsound(e.node)
    elif chain is not None:
        first = e.start // chain.grid
        s.prefixes.learn(chain.grid, first, chain.cells[:first], chain.cells[first:])
    slots = e.slots if resident and not wrong else ()
    s.found.append(ft.Found(e.seq, s.epoch, e.node, e.start, e.end, e.l1, e.l2, slots, m, s.attached.begun))


ATTACHED.within(ev.SnapshotEnd, 0, 1, "complete")


@ATTACHED.guard(ev.SnapshotEnd, "ends the look")
def _ends_the_look(s: State, e: ev.SnapshotEnd) -> str | None:
    """What ends has begun."""
    return _outside(s, e.seq)


@ATTACHED.guard(ev.SnapshotEnd, "counts what was found")
def _counts_what_was_found(s: State, e: ev.SnapshotEnd) -> Broken | None:
    """The nodes and the tokens of each tier are those that were found."""
    l1, l2 = s.attached.found_tokens
    if (e.nodes, e.l1_tokens, e.l2_tokens) == (s.attached.nodes, l1, l2):
        return None
    told = f"{e.nodes} nodes with {e.l1_tokens} and {e.l2_tokens} tokens were found"
    return Broken(f"{told}, those recorded are {s.attached.nodes} with {l1} and {l2}", since=0)


@ATTACHED.effect(ev.SnapshotEnd)
def _the_look_ends(s: State, _: ev.SnapshotEnd, __: ft.Moment) -> None:
    """From here on everything has an event of its own."""
    s.attached.looking = False
