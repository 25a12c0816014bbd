"""Rules of the radix cache and L1: what a match finds, what an insert puts there, what an eviction takes."""

from __future__ import annotations

from collections.abc import Sequence

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.chains import cell_tokens
from kvwitness.tracer.ledger.state import State
from kvwitness.tracer.ledger.tree import Odd
from kvwitness.tracer.rules.declare import Broken, Rules, always
from kvwitness.tracer.rules.requests import undigested

L1 = Rules()

Path = Sequence[ev.PathNode]

LEFT = (ev.Eviction.DEMOTED, ev.Eviction.DROPPED, ev.Eviction.DROPPED_HOST_PRESSURE)
"""How a node leaves L1."""


def _odd(found: Odd | None) -> Broken | None:
    return None if found is None else Broken(found[1], since=found[0])


def shapeless(s: State, path: Path) -> str | None:
    """Why nodes are no path from the root; None when they are one."""
    position, page = 0, s.told.page
    for step in path:
        if step.start != position or step.end <= step.start or step.end % page or step.node < 0:
            return f"a path whose node {step.node} holds tokens {step.start} to {step.end}"
        if step.on_device not in (0, 1):
            return f"a path whose node {step.node} is in L1: {step.on_device}"
        position = step.end
    if len(path) > 1 and len({step.node for step in path}) != len(path):
        return "a path that goes through a node twice"
    return None


def on_device(path: Path) -> int:
    """Up to where a path is in L1 from its start on."""
    position = 0
    for step in path:
        if not step.on_device:
            break
        position = step.end
    return position


# --- what every path says ----------------------------------------------------------------------------


@L1.guard(ev.Matched, "its path leads from the root")
def _matched_path_is_one(s: State, e: ev.Matched) -> str | None:
    """The nodes of a path follow one another from the prompt's start, in whole pages, each once."""
    return shapeless(s, e.path)


@L1.guard(ev.Matched, "is for a known request")
def _matched_for_somebody(s: State, e: ev.Matched) -> str | None:
    """Whose tokens a path holds is known, and their digests reach as far as the path."""
    if s.nameless(e.req):
        return f"event {e.seq} is about a request without a name"
    if undigested(s, e.req, e.path[-1].end if e.path else 0):
        return f"event {e.seq} follows a path for a prompt whose digests do not reach as far"
    request = s.request(e.req)
    if request is None or e.purpose != ev.MatchPurpose.ADMISSION or request.attempt > 1 or request.found_waiting:
        return None
    if not request.chain.tells(request.prompt_tokens, cell_tokens(s.told.page)):
        return f"{request.rid} was matched before the digests of its prompt were told"
    return None


@L1.guard(ev.Matched, "is as long as its path")
def _as_long_as_its_path(s: State, e: ev.Matched) -> str | None:
    """What is in L1 comes first on the path, then what is in L2; both together are the path, and within the key."""
    end = e.path[-1].end if e.path else 0
    if (
        e.device + e.host != end
        or e.device != on_device(e.path)
        or any(n.on_device for n in e.path if n.start >= e.device)
    ):
        return f"a match of {e.device} tokens in L1 and {e.host} in L2, its path says otherwise"
    return f"a match of {end} tokens of a key of {e.key_tokens}" if end > e.key_tokens else None


@L1.guard(ev.Matched, "names the nodes of its path")
def _names_its_nodes(s: State, e: ev.Matched) -> str | None:
    """The deepest node is the path's last one, the deepest one in L1 the last of its L1 part."""
    if not e.path:
        return None if e.best_node == e.device_node else f"a match without a path that names two nodes (event {e.seq})"
    deepest = [step.node for step in e.path if step.on_device]
    if e.best_node != e.path[-1].node or (deepest and e.device_node != deepest[-1]):
        return f"a match that names nodes {e.device_node} and {e.best_node}, its path others"
    if not deepest and e.device_node in {step.node for step in e.path}:
        return f"a match whose node {e.device_node} is the deepest in L1, and outside it"
    return None


@L1.guard(ev.Matched, "finds only states that there are")
def _states_that_there_are(s: State, e: ev.Matched) -> str | None:
    """Without further pools there is no state beside full-attention KV to be found."""
    if not s.told.instance_at or not s.told.alone or not (e.swa_host or e.mamba_host):
        return None
    return f"a match of {e.swa_host} and {e.mamba_host} states that this instance does not have"


L1.within(ev.Matched, ev.MatchPurpose.OTHER, ev.MatchPurpose.ADMISSION, "purpose")
L1.within(ev.Matched, 0, None, "device", "host", "key_tokens", "swa_host", "mamba_host")


@L1.guard(ev.Matched, "is of a request that waits")
def _matched_while_waiting(s: State, e: ev.Matched) -> str | None:
    """A request is matched for its admission while it is in the queue."""
    request = s.request(e.req)
    if e.purpose != ev.MatchPurpose.ADMISSION or request is None:
        return None
    if request.released is not None:
        return f"request {request.rid} was matched after it had ended"
    return None


@L1.guard(ev.Matched, "asks for the request's tokens")
def _asks_for_its_tokens(s: State, e: ev.Matched) -> str | None:
    """The key of a request that waits for the first time is no longer than its prompt."""
    request = s.request(e.req)
    if request is None or not request.waits or request.attempt > 1 or e.key_tokens <= request.prompt_tokens:
        return None
    return f"a match of a key of {e.key_tokens} tokens, the prompt of {request.rid} has {request.prompt_tokens}"


@L1.guard(ev.Matched, "its nodes are where they were")
def _matched_nodes_stay(s: State, e: ev.Matched) -> Broken | None:
    """A node keeps its end, and its start but for a split, which gives its beginning to another node."""
    return _odd(s.tree.misplaced(e.path))


@L1.guard(ev.Matched, "its nodes have one prefix")
def _matched_nodes_have_one_prefix(s: State, e: ev.Matched) -> str | None:
    """A node is on the paths of one prefix."""
    return s.tree.strange(e.path, s.chain(e.req))


@L1.effect(ev.Matched)
def _the_matched_path_is_there(s: State, e: ev.Matched, _: ft.Moment) -> None:
    """The nodes of the path are in the tree; one that is new was split off from the one that it was part of."""
    s.tree.follow(e.path, None if s.nameless(e.req) else s.chain(e.req))


@L1.effect(ev.Matched)
def _the_answer_counts(s: State, e: ev.Matched, m: ft.Moment) -> None:
    """The admission that follows builds on this answer, and on what was known of its path."""
    request, chain = s.request(e.req), s.chain(e.req)
    if request is not None:
        request.probed = e.best_node, e.device + e.host
    if e.purpose != ev.MatchPurpose.ADMISSION or request is None:
        return
    request.touched(m)
    if request.admitted is None:
        request.prior = s.prefixes.prior(chain)
        nodes = s.tree.matched(e.path, chain)
        request.match = ft.MatchFact(
            m, e.device, e.host, e.key_tokens, e.best_node, e.path, nodes, e.swa_host, e.mamba_host
        )
        request.decision, request.loaded = None, 0
        # Matched in another epoch than it was queued in: what counts is the cache that answered.
        request.epoch = s.epoch


@L1.guard(ev.Matched, "nothing came back unseen")
def _matched_nothing_back(s: State, e: ev.Matched) -> Broken | None:
    """What left L1 is there again only by a load-back or an insert."""
    return _odd(s.tree.back_again(e.path))


@L1.guard(ev.Matched, "nothing left unseen")
def _matched_nothing_left(s: State, e: ev.Matched) -> Broken | None:
    """What is in L1, or is being loaded, is there until an eviction or a reset."""
    return _odd(s.tree.left_unseen(e.path))


@L1.guard(ev.Matched, "no two nodes begin alike")
def _matched_no_twins(s: State, e: ev.Matched) -> Broken | None:
    """No two children of a node begin with the same page."""
    return _odd(s.tree.beside(e.path, s.chain(e.req)))


@L1.effect(ev.Matched)
def _the_tree_s_word_on_a_match_counts(s: State, e: ev.Matched, m: ft.Moment) -> None:
    """Where the tree says otherwise than the events it is believed, and how it came about is not known."""
    s.tree.settle(e.path, s.chain(e.req), m)


# --- inserts -----------------------------------------------------------------------------------------

L1.within(ev.Inserted, 0, None, "key_tokens", "existing")


@L1.guard(ev.Inserted, "its path leads from the root")
def _inserted_path_is_one(s: State, e: ev.Inserted) -> str | None:
    """The nodes of a path follow one another from the prompt's start, in whole pages, each once."""
    return shapeless(s, e.path)


@L1.guard(ev.Inserted, "is for a known request")
def _inserted_for_somebody(s: State, e: ev.Inserted) -> str | None:
    """Whose tokens a path holds is known, and their digests reach as far as the path."""
    if s.nameless(e.req):
        return f"event {e.seq} is about a request without a name"
    if undigested(s, e.req, e.path[-1].end if e.path else 0):
        return f"event {e.seq} follows a path for a prompt whose digests do not reach as far"
    return None


@L1.guard(ev.Inserted, "is as long as its path")
def _inserted_its_path(s: State, e: ev.Inserted) -> str | None:
    """The path is the whole key, all of it is in L1, and the node that is named is its last one."""
    end = e.path[-1].end if e.path else 0
    if e.key_tokens != end or e.existing > e.key_tokens or not all(step.on_device for step in e.path):
        return f"an insert of {e.key_tokens} tokens ({e.existing} were there), its path says otherwise"
    if e.path and e.node != e.path[-1].node:
        return f"an insert that ends with node {e.node}, its path ends with {e.path[-1].node}"
    return None


@L1.guard(ev.Inserted, "knows what was there")
def _knows_what_was_there(s: State, e: ev.Inserted) -> str | None:
    """What was there ends with a node of the path, not before what is in L1 and not behind what is in the tree."""
    least = most = 0
    for step in e.path:
        node = s.tree.get(step.node)
        # The first node behind the known ones may be a part of what was there, whose rest this sequence does not have.
        if node is not None or (
            most >= step.start and not any(s.tree.get(n.node) for n in e.path if n.start >= step.end)
        ):
            most = step.end
        if least == step.start and node is not None and node.in_l1:
            least = step.end
    ends = {0, *(step.end for step in e.path)}
    if e.existing in ends and least <= e.existing <= most:
        return None
    return f"an insert into {e.existing} tokens that were there, {least} to {most} are known"


@L1.guard(ev.Inserted, "is of a request that runs")
def _inserted_while_running(s: State, e: ev.Inserted) -> str | None:
    """A request's tokens are put into the cache from its first pass to its release."""
    request = s.request(e.req)
    if request is None or not e.key_tokens:
        return None
    if request.released is not None:
        return f"tokens of {request.rid} were inserted after it had ended"
    return None if request.chunks else f"tokens of {request.rid} were inserted before any pass"


@L1.guard(ev.Inserted, "was computed")
def _inserted_was_computed(s: State, e: ev.Inserted) -> str | None:
    """No more is put into the cache than the launched passes computed; behind the last one what was generated."""
    request = s.request(e.req)
    computed = request.computed() if request is not None else None
    if request is None or computed is None or computed.end is None:
        return None
    last = request.chunks[-1].last
    if e.key_tokens > computed.end and not last:
        return f"{e.key_tokens} tokens of {request.rid} were inserted, {computed.end} were computed"
    return None


@L1.guard(ev.Inserted, "is what a pass computed")
def _inserted_what_a_pass_computed(s: State, e: ev.Inserted) -> str | None:
    """Until the last pass is processed an insert is of whole passes, cut to whole pages."""
    request, page = s.request(e.req), s.told.page
    if request is None or not request.chunks or request.chunks[-1].done is not None:
        return None
    if any(e.key_tokens == chunk.end // page * page for chunk in request.chunks):
        return None
    return f"{e.key_tokens} tokens of {request.rid} were inserted, no pass ends there"


@L1.guard(ev.Inserted, "its nodes are where they were")
def _inserted_nodes_stay(s: State, e: ev.Inserted) -> Broken | None:
    """A node keeps its end, and its start but for a split, which gives its beginning to another node."""
    return _odd(s.tree.misplaced(e.path))


@L1.guard(ev.Inserted, "its nodes have one prefix")
def _inserted_nodes_have_one_prefix(s: State, e: ev.Inserted) -> str | None:
    """A node is on the paths of one prefix."""
    return s.tree.strange(e.path, s.chain(e.req))


@L1.guard(ev.Inserted, "shows the nodes that were copied in it")
def _shows_what_was_copied(s: State, e: ev.Inserted) -> Broken | None:
    """A node that no event showed when its copy was queued is a new one of the next insert, in L1, for that request."""
    steps = {step.node: step for step in e.path} if s.inserting else {}
    for node, (req, backup) in s.inserting.items():
        step, content = steps.get(node), backup.content
        if step is None or req != e.req or (step.start, step.end) != (content.start, content.end) or not step.on_device:
            return Broken(f"a copy of node {node} was queued, which nothing shows to be in L1", since=content.id)
    return None


@L1.effect(ev.Inserted)
def _the_inserted_path_is_there(s: State, e: ev.Inserted, _: ft.Moment) -> None:
    """The nodes of the path are in the tree; a copy that was queued inside the insert is of this prefix."""
    chain = None if s.nameless(e.req) else s.chain(e.req)
    s.tree.follow(e.path, chain)
    for step in e.path if s.inserting else ():
        req, backup = s.inserting.get(step.node, (0, None))
        if backup is not None and req == e.req and (step.start, step.end) == (backup.content.start, backup.content.end):
            backup.content.chain = chain
            if step.on_device:
                s.tree.backing(step.node, step.start, step.end, 1)
                backup.in_l1 = True
    s.inserting.clear()


@L1.effect(ev.Inserted)
def _what_was_computed_is_in_l1(s: State, e: ev.Inserted, m: ft.Moment) -> None:
    """What the request's own passes computed is born in L1, each part by its own pass."""
    if s.nameless(e.req):
        return
    request, chain = s.request(e.req), s.chain(e.req)
    computed = request.computed() if request is not None and request.released is None else None
    if computed is not None and s.epochs and computed.passes[0][1].seq < s.epochs[-1].begin.seq:
        computed = None  # Computed into a cache that was emptied since.
    s.tree.inserted(e.path, chain, computed, e.existing, m)
    if request is not None:
        request.touched(m)
        request.inserted = max(request.inserted, e.key_tokens)


@L1.guard(ev.Inserted, "nothing came back unseen")
def _inserted_nothing_back(s: State, e: ev.Inserted) -> Broken | None:
    """What left L1 is there again only by a load-back or an insert."""
    return _odd(s.tree.back_again(e.path))


@L1.guard(ev.Inserted, "no two nodes begin alike")
def _inserted_no_twins(s: State, e: ev.Inserted) -> Broken | None:
    """No two children of a node begin with the same page."""
    return _odd(s.tree.beside(e.path, s.chain(e.req)))


@L1.effect(ev.Inserted)
def _the_tree_s_word_on_an_insert_counts(s: State, e: ev.Inserted, m: ft.Moment) -> None:
    """Where the tree says otherwise than the events it is believed; whose prefix is in the cache is remembered."""
    chain = s.chain(e.req)
    s.tree.settle(e.path, chain, m)
    if chain is not None and chain.grid:
        s.prefixes.cached(chain.cells[: e.key_tokens // chain.grid], chain.rid, s.epoch)


# --- evictions ---------------------------------------------------------------------------------------

L1.within(ev.EvictBegin, 1, None, "call")
L1.within(ev.EvictBegin, ev.Cause.UNKNOWN, ev.Cause.PREFETCH, "cause")
L1.within(ev.EvictBegin, 0, None, "asked", "asked_swa", "asked_mamba")


@L1.guard(ev.EvictBegin, "begins once")
def _begins_once(s: State, e: ev.EvictBegin) -> Broken | None:
    """The calls of the evictor are numbered upwards."""
    before = s.evictions.get(e.call)
    if before is not None:
        return Broken(f"eviction {e.call} began twice", since=before.moment.seq)
    return Broken(f"eviction {e.call} follows eviction {s.evictions.last}") if e.call < s.evictions.last else None


@L1.guard(ev.EvictBegin, "serves requests that are known")
def _serves_somebody(s: State, e: ev.EvictBegin) -> str | None:
    """The requests whose allocation it serves have names."""
    return f"eviction {e.call} serves a request without a name" if any(map(s.nameless, e.reqs)) else None


@L1.guard(ev.EvictBegin, "serves them for what they do")
def _serves_what_they_do(s: State, e: ev.EvictBegin) -> str | None:
    """A load-back is for one request that was matched and waits, a prefill for requests that have not ended, decoding
    for requests that have launched their last pass."""
    requests = [request for request in map(s.request, e.reqs) if request is not None]
    if e.cause == ev.Cause.LOAD_BACK:
        fits = all(request.waits and request.match is not None for request in requests) and len(requests) < 2
    elif e.cause == ev.Cause.PREFILL:
        fits = all(request.released is None for request in requests)
    elif e.cause == ev.Cause.DECODE:
        fits = all(request.chunks and request.chunks[-1].last for request in requests)
    else:
        fits = True
    return None if fits else f"eviction {e.call} is for a {ev.Cause.NAMES[e.cause]} that nobody waits for"


@L1.effect(ev.EvictBegin, also="cause asked")
def _an_eviction_begins(s: State, e: ev.EvictBegin, m: ft.Moment) -> None:
    """What leaves L1 until its end leaves for these requests."""
    rids = tuple(s.names.get(number) or f"#{number}" for number in e.reqs)
    s.evictions.begin(e, s.epoch, rids, m)


L1.within(ev.L1Room, -1, None, "free")


@L1.guard(ev.L1Room, "is told of the eviction that began")
def _room_of_this_call(s: State, e: ev.L1Room) -> str | None:
    """How much was free is told right after the call began, once."""
    call = s.evictions.innermost
    if call is None or call.begin.call != e.call or call.free is not None or call.victims:
        return f"the room before eviction {e.call} was told, which did not begin"
    size = s.told.instance.device_tokens
    return f"{e.free} tokens were free in L1, which has {size}" if size is not None and e.free > size else None


@L1.effect(ev.L1Room)
def _so_much_was_free(s: State, e: ev.L1Room, _: ft.Moment) -> None:
    """Room that was free before the eviction."""
    s.evictions.room(e.call, e.free)


L1.within(ev.EvictedL1, ev.Eviction.DEMOTED, ev.Eviction.DROPPED_HOST_PRESSURE, "how")
L1.within(ev.EvictedL1, 0, None, "tokens", "unbacked")


@L1.guard(ev.EvictedL1, "within the eviction that is going on")
def _within_the_call(s: State, e: ev.EvictedL1) -> str | None:
    """Nodes leave L1 within the innermost call of the evictor."""
    call = s.evictions.innermost
    return "a node was evicted outside a recorded eviction" if call is None or call.begin.call != e.call else None


@L1.guard(ev.EvictedL1, "has the node's positions")
def _has_its_positions(s: State, e: ev.EvictedL1) -> str | None:
    """The node has the positions that it had, and as many tokens."""
    if e.start < 0 and e.end < 0:
        return None
    if s.tree.elsewhere(e.node, e.start, e.end) or e.end <= e.start or e.start % s.told.page or e.end % s.told.page:
        return f"node {e.node} left L1 with other positions than it had"
    if e.how in (ev.Eviction.DEMOTED, ev.Eviction.DROPPED) and e.tokens not in (0, e.end - e.start):
        return f"node {e.node} was evicted with {e.tokens} tokens, it has other positions"
    return None


@L1.guard(ev.EvictedL1, "is in L1")
def _is_in_l1(s: State, e: ev.EvictedL1) -> Broken | None:
    """What leaves L1 is there."""
    node = s.tree.get(e.node)
    if e.how not in LEFT or node is None or node.in_l1 or node.evicted is None:
        return None
    return Broken(f"node {e.node} left L1 twice", since=node.evicted.seq)


@L1.guard(ev.EvictedL1, "is not being loaded")
def _is_not_being_loaded(s: State, e: ev.EvictedL1) -> Broken | None:
    """A node stays in L1 while its load-back is under way."""
    node = s.tree.get(e.node)
    if e.how not in LEFT or node is None or node.load is None or node.resident is not None:
        return None
    return Broken(f"node {e.node} left L1 while it was being loaded", since=node.load)


@L1.guard(ev.EvictedL1, "is not being copied to L2")
def _is_not_being_copied(s: State, e: ev.EvictedL1) -> str | None:
    """A node stays in L1 while its copy to the host is queued or under way."""
    if e.how not in LEFT or not s.tree.is_backing(e.node):
        return None
    return f"node {e.node} left L1 while it was being copied to L2"


@L1.guard(ev.EvictedL1, "is not being read")
def _is_not_being_read(s: State, e: ev.EvictedL1) -> str | None:
    """What a request's match found stays in L1 from its admission until its last pass was processed."""
    node = s.tree.get(e.node)
    if e.how not in LEFT or not s.requests.uses(e.node, node.was if node is not None else ()):
        return None
    return f"node {e.node} left L1 before the prefill had ended that reads it"


@L1.guard(ev.EvictedL1, "says what has no copy")
def _says_what_has_no_copy(s: State, e: ev.EvictedL1) -> str | None:
    """What is demoted has a host copy of all its tokens, what is dropped or kept has none."""
    if e.how == ev.Eviction.DEMOTED and e.unbacked:
        return f"node {e.node} was demoted with {e.unbacked} tokens that have no copy in L2"
    if e.unbacked not in (0, e.tokens):
        return f"node {e.node} of {e.tokens} tokens was evicted, {e.unbacked} of them without a copy"
    return None


@L1.effect(ev.EvictedL1, also="tokens")
def _a_node_leaves_l1(s: State, e: ev.EvictedL1, m: ft.Moment) -> None:
    """It is not in L1 any more (what is staged or kept still is)."""
    owner = s.tree.evicted(e.node, e.start, e.end, e.how, e.call, m)
    s.evictions.victim(e, owner, m)


@L1.guard(ev.EvictEnd, "ends what is going on")
def _ends_what_goes_on(s: State, e: ev.EvictEnd) -> str | None:
    """The innermost call ends first."""
    call = s.evictions.innermost
    return "an eviction ended that was not under way" if call is None or call.begin.call != e.call else None


@L1.guard(ev.EvictEnd, "freed what its victims held")
def _freed_its_victims(s: State, e: ev.EvictEnd) -> Broken | None:
    """The tokens that a call freed are those of the nodes that it took."""
    call = s.evictions.get(e.call)
    if call is None:
        return None
    seen = sum(victim.tokens for victim in call.victims)
    if seen == e.freed:
        return None
    return Broken(f"the eviction freed {e.freed} tokens, its victims held {seen}", since=call.moment.seq)


@L1.effect(ev.EvictEnd, also="freed")
def _an_eviction_ends(s: State, e: ev.EvictEnd, m: ft.Moment) -> None:
    """Nothing leaves L1 for it any more."""
    s.evictions.end(e, m)


def _between_steps(s: State, kind: str) -> Broken | None:
    call = s.evictions.innermost
    if call is None:
        return None
    return Broken(f"{kind} within eviction {call.begin.call}, which had not ended", since=call.moment.seq)


@L1.guard(ev.Matched, "not within an eviction")
def _no_match_within(s: State, _: ev.Matched) -> Broken | None:
    """The scheduler does nothing else while it evicts from L1."""
    return _between_steps(s, "a match")


@L1.guard(ev.Inserted, "not within an eviction")
def _no_insert_within(s: State, _: ev.Inserted) -> Broken | None:
    """The scheduler does nothing else while it evicts from L1."""
    return _between_steps(s, "an insert")


@L1.guard(ev.Prefill, "not within an eviction")
def _no_pass_within(s: State, _: ev.Prefill) -> Broken | None:
    """The scheduler does nothing else while it evicts from L1."""
    return _between_steps(s, "a pass")


@L1.guard(ev.PrefillDone, "not within an eviction")
def _no_result_within(s: State, _: ev.PrefillDone) -> Broken | None:
    """The scheduler does nothing else while it evicts from L1."""
    return _between_steps(s, "a result")


@L1.guard(ev.Reset, "not within an eviction")
def _no_reset_within(s: State, _: ev.Reset) -> Broken | None:
    """The scheduler does nothing else while it evicts from L1."""
    return _between_steps(s, "a reset")


@L1.guard(ev.Admission, "not within an eviction")
def _no_admission_within(s: State, _: ev.Admission) -> Broken | None:
    """The scheduler does nothing else while it evicts from L1."""
    return _between_steps(s, "an admission")


@L1.guard(ev.LoadBackDecided, "not within an eviction")
def _no_decision_within(s: State, _: ev.LoadBackDecided) -> Broken | None:
    """The scheduler does nothing else while it evicts from L1."""
    return _between_steps(s, "a load-back decision")


@L1.guard(ev.LoadQueued, "not within an eviction")
def _no_load_within(s: State, _: ev.LoadQueued) -> Broken | None:
    """The scheduler does nothing else while it evicts from L1."""
    return _between_steps(s, "a load-back")


@L1.guard(ev.Released, "not within an eviction")
def _no_release_within(s: State, _: ev.Released) -> Broken | None:
    """The scheduler does nothing else while it evicts from L1."""
    return _between_steps(s, "a release")


# --- reset -------------------------------------------------------------------------------------------

L1.within(ev.Reset, 1, 2, "kind")


@L1.guard(ev.Reset, "nothing runs")
def _nothing_runs(s: State, _: ev.Reset) -> Broken | None:
    """The cache is emptied while no request is between its admission and its end."""
    running = s.requests.running
    if running is None or running.admitted is None:
        return None
    return Broken(f"the cache was reset while {running.rid} was running", since=running.admitted.seq)


@L1.guard(ev.Reset, "empties the host pool, too")
def _empties_the_pool(s: State, e: ev.Reset) -> Broken | None:
    """The tree is reset when the host pool was emptied, or while nothing is in it."""
    if s.emptied or not s.host.in_use:
        return None
    return always("the tree was reset while the host pool held something", e.seq)


@L1.guard(ev.Matched, "the tree was reset with the pool")
def _reset_with_the_pool(s: State, e: ev.Matched) -> Broken | None:
    """After the host pool was emptied the tree is reset before it is asked again."""
    return Broken("the host pool was emptied, and the tree was not", since=s.emptied) if s.emptied and e.path else None


@L1.effect(ev.Reset)
def _the_cache_is_empty(s: State, e: ev.Reset, m: ft.Moment) -> None:
    """Neither tier holds anything; node ids, positions and slots mean nothing any more."""
    s.reset(m)
    s.emptied = 0
