"""Rules of a request: queued, matched, decided, admitted, computed pass by pass, inserted, given back."""

from __future__ import annotations

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.chains import cell_tokens
from kvwitness.tracer.ledger.requests import OpenChunk, OpenRequest
from kvwitness.tracer.ledger.state import State
from kvwitness.tracer.rules.declare import Broken, Rules

REQUESTS = Rules()


def known_before(s: State, number: int) -> bool:
    """Whether a request that was not seen to be queued can have been running when kvwitness was attached."""
    return bool(s.attached.begun) and not s.nameless(number)


# --- queued ------------------------------------------------------------------------------------------

_IN_QUEUE = (ev.Queued, ev.WaitingAtAttach)

for _kind in _IN_QUEUE:
    REQUESTS.within(_kind, 1, None, "prompt_tokens")
    REQUESTS.within(_kind, 0, 1, "retracted")


@REQUESTS.guard(ev.Queued, "has a name")
def _queued_by_name(s: State, e: ev.Queued) -> str | None:
    """A request has an id."""
    return f"event {e.seq} queues a request without a name" if s.names.get(e.req) is None else None


@REQUESTS.guard(ev.WaitingAtAttach, "has a name")
def _waits_by_name(s: State, e: ev.WaitingAtAttach) -> str | None:
    """A request has an id."""
    return f"event {e.seq} queues a request without a name" if s.names.get(e.req) is None else None


@REQUESTS.guard(ev.Queued, "comes back only when it was retracted")
def _retracted_before(s: State, e: ev.Queued) -> str | None:
    """A request that comes back had given its row back as retracted, and its prompt is the same."""
    before = s.request(e.req)
    if not e.retracted or before is None:
        return None
    if before.state != ev.ReleaseState.RETRACTED:
        return f"request {before.rid} comes back, and was not retracted"
    return f"request {before.rid} comes back with another prompt" if before.prompt_tokens != e.prompt_tokens else None


def _queue(s: State, number: int, retracted: bool, prompt_tokens: int, m: ft.Moment) -> None:
    rid = s.names.get(number)
    if rid is None:
        return
    s.requests.queue(rid, retracted, s.epoch, prompt_tokens, m)
    s.storage.waits(rid, m)


@REQUESTS.effect(ev.Queued)
def _it_waits(s: State, e: ev.Queued, m: ft.Moment) -> None:
    """The id is this request's; storage is asked anew, and an answer to what was asked before is none."""
    _queue(s, e.req, bool(e.retracted), e.prompt_tokens, m)


@REQUESTS.effect(ev.WaitingAtAttach)
def _it_waited_already(s: State, e: ev.WaitingAtAttach, m: ft.Moment) -> None:
    """The same of a request that was in the queue when kvwitness was attached."""
    _queue(s, e.req, bool(e.retracted), e.prompt_tokens, m)
    request = s.request(e.req)
    if request is not None:
        request.found_waiting = True


# --- digests -----------------------------------------------------------------------------------------


@REQUESTS.guard(ev.PrefixDigests, "grid fits the page")
def _grid_fits(s: State, e: ev.PrefixDigests) -> Broken | None:
    """A cell is the smallest number of whole pages that has at least 16 tokens."""
    if not s.told.instance_at or e.grid == cell_tokens(s.told.page):
        return None
    return Broken(f"prefix digests of cells of {e.grid} tokens, pages have {s.told.page}")


@REQUESTS.guard(ev.PrefixDigests, "continue")
def _digests_continue(s: State, e: ev.PrefixDigests) -> str | None:
    """The digests of a request follow one another without a hole, in cells of one size; there is at least one."""
    chain = s.chain(e.req)
    cells, grid = (len(chain.cells), chain.grid or e.grid) if chain is not None else (0, e.grid)
    if s.nameless(e.req) or (e.first_cell, e.grid) != (cells, grid) or e.grid < 1 or not e.digests:
        return f"the prefix digests of {s.names.get(e.req)} do not continue"
    return None


@REQUESTS.guard(ev.PrefixDigests, "reach no further than the tokens")
def _digests_within(s: State, e: ev.PrefixDigests) -> str | None:
    """Before anything was computed a request has no tokens but its prompt."""
    request = s.request(e.req)
    if request is None or request.chunks or request.attempt > 1:
        return None
    reach = (e.first_cell + len(e.digests)) * e.grid
    if reach > request.prompt_tokens:
        return f"prefix digests of {reach} tokens, the prompt of {request.rid} has {request.prompt_tokens}"
    return None


@REQUESTS.guard(ev.PrefixDigests, "stand for one prefix")
def _digests_stand_for_one(s: State, e: ev.PrefixDigests) -> Broken | None:
    """A digest covers all tokens before it: it is never at another place, nor behind another digest."""
    chain = s.chain(e.req)
    before = chain.cells if chain is not None else []
    cell = s.prefixes.elsewhere(e.grid, e.first_cell, before, e.digests)
    if cell is None:
        return None
    return Broken(f"the digest of cell {cell} of {s.names.get(e.req)} stands for another prefix already", since=0)


@REQUESTS.effect(ev.PrefixDigests)
def _its_prefix_is_known(s: State, e: ev.PrefixDigests, _: ft.Moment) -> None:
    """Its tokens are those of every sequence with these digests."""
    rid = s.names.get(e.req)
    if rid is None or e.grid < 1:
        return
    chain = s.requests.chain_of(rid)
    s.prefixes.learn(e.grid, e.first_cell, chain.cells, e.digests)
    chain.add_cells(e.grid, e.first_cell, e.digests)


REQUESTS.within(ev.PrefixPoint, 1, None, "position")


@REQUESTS.guard(ev.PrefixPoint, "is one digest")
def _point_is_one(s: State, e: ev.PrefixPoint) -> str | None:
    """A whole prefix has one digest, and always the same."""
    chain = s.chain(e.req)
    if s.nameless(e.req) or len(e.digests) != 1 or chain is None:
        return f"the digest of the first {e.position} tokens of {s.names.get(e.req)} is not one"
    if chain.points.get(e.position, e.digests[0]) != e.digests[0]:
        return f"the first {e.position} tokens of {chain.rid} have two digests"
    return None


@REQUESTS.guard(ev.PrefixPoint, "lies within the tokens")
def _point_within(s: State, e: ev.PrefixPoint) -> str | None:
    """Before anything was computed a request has no tokens but its prompt, and its digests reach to its last cell."""
    request, chain = s.request(e.req), s.chain(e.req)
    if request is None or chain is None:
        return None
    if not request.chunks and request.attempt == 1 and e.position > request.prompt_tokens:
        return f"a digest of the first {e.position} tokens of {request.rid}, whose prompt has {request.prompt_tokens}"
    if chain.cells and e.position // chain.grid > len(chain.cells):
        return f"a digest of the first {e.position} tokens of {request.rid}, whose cells end before"
    if chain.cells and e.position and e.position % chain.grid == 0:
        whole = chain.cells[e.position // chain.grid - 1]
        return f"the first {e.position} tokens of {request.rid} have two digests" if whole not in e.digests else None
    return None


@REQUESTS.guard(ev.PrefixPoint, "stands for one prefix")
def _point_stands_for_one(s: State, e: ev.PrefixPoint) -> Broken | None:
    """A digest of a whole prefix is never that of another length, nor behind other cells."""
    chain = s.chain(e.req)
    if chain is None or not e.digests or not s.prefixes.point_elsewhere(e.position, chain, e.digests[0]):
        return None
    return Broken(f"the digest of the first {e.position} tokens of {chain.rid} stands for another prefix", since=0)


@REQUESTS.effect(ev.PrefixPoint)
def _its_end_is_known(s: State, e: ev.PrefixPoint, _: ft.Moment) -> None:
    """The tokens up to this position are those of every sequence with this digest."""
    chain = s.chain(e.req)
    if chain is not None and e.digests:
        s.prefixes.learn_point(e.position, chain, e.digests[0])
        chain.points[e.position] = e.digests[0]


def undigested(s: State, req: int, end: int) -> bool:
    """Whether a path reaches beyond the digests of the prompt that it is for: they are recorded before.

    Digests that come later could show that the path is another request's. Those of outputs need not be there.
    """
    if not req or not end:
        return False
    request, chain = s.request(req), s.chain(req)
    end = end if request is None else min(end, request.prompt_tokens)
    cells, points = (chain.cells, chain.points) if chain is not None else ([], {})
    grid = chain.grid if cells and chain is not None else cell_tokens(s.told.page)
    # Only a prompt of less than a cell has nothing but the digest of its end: behind a hole that is no help.
    covered, missing = (len(cells) * grid, grid) if cells or end >= grid else (max(points, default=0), 1)
    return end - covered >= missing


# --- the load-back decision --------------------------------------------------------------------------

REQUESTS.within(ev.LoadBackDecided, 0, None, "promised", "loaded", "wanted")
REQUESTS.within(ev.LoadBackDecided, ev.Refusal.NONE, ev.Refusal.NOTHING_TO_LOAD, "reason")


@REQUESTS.guard(ev.LoadBackDecided, "is of a matched request")
def _decided_for_a_match(s: State, e: ev.LoadBackDecided) -> str | None:
    """It is decided for a request in the queue, once for each match, and promises what the match found in L2."""
    request = s.request(e.req)
    if request is None or request.match is None or not request.waits:
        return f"a load-back decision for a request that was not matched (event {e.seq})" if e.req else None
    if request.decision is not None:
        return f"two load-back decisions for one match of {request.rid}"
    if s.told.now.transit_mode is not None:
        return None  # What only passes through host memory is in no match.
    if e.promised != request.match.host or (e.promised and e.node != request.match.best_node):
        return f"a load-back decision about other tokens than the match of {request.rid} found"
    return None


@REQUESTS.guard(ev.LoadBackDecided, "loads or refuses")
def _loads_or_refuses(s: State, e: ev.LoadBackDecided) -> str | None:
    """What was loaded has no reason for a refusal; what was promised and not loaded has one; no more is loaded than was
    promised and wanted."""
    if bool(e.loaded) == (e.reason != ev.Refusal.NONE) and (e.promised or e.loaded or e.reason):
        return f"a decision that loaded {e.loaded} tokens and gives the reason {e.reason} for refusing"
    if e.loaded > e.promised or (e.loaded and e.wanted < e.loaded):
        return f"a decision that loaded {e.loaded} of {e.promised} promised and {e.wanted} wanted tokens"
    return None


@REQUESTS.guard(ev.LoadBackDecided, "loaded what was queued")
def _loaded_what_was_queued(s: State, e: ev.LoadBackDecided) -> str | None:
    """The tokens that were loaded are those of the load-backs that were queued for the match."""
    request = s.request(e.req)
    if request is None or request.loaded == e.loaded:
        return None
    return f"a decision that loaded {e.loaded} tokens, load-backs of {request.loaded} were queued for {request.rid}"


@REQUESTS.effect(ev.LoadBackDecided)
def _it_is_decided(s: State, e: ev.LoadBackDecided, m: ft.Moment) -> None:
    """What of L2 is used for the request."""
    request = s.request(e.req)
    if request is not None:
        request.touched(m)
        if request.admitted is None:
            request.decision = ft.DecisionFact(m, e.node, e.promised, e.loaded, e.wanted, e.reason)


# --- admitted ----------------------------------------------------------------------------------------

REQUESTS.within(ev.Admission, 0, 1, "admitted")
REQUESTS.within(ev.Admission, 0, None, "prefix", "host_loaded")


@REQUESTS.guard(ev.Admission, "is of a matched request")
def _admitted_after_its_match(s: State, e: ev.Admission) -> Broken | str | None:
    """A request is admitted out of the queue, after its match."""
    request = s.request(e.req)
    if request is None:
        return None if known_before(s, e.req) else f"event {e.seq} admits a request that was not queued"
    if request.released is not None or (e.admitted and (request.admitted is not None or request.match is None)):
        return Broken(f"request {request.rid} is admitted, and does not wait for it", since=request.queued.seq)
    return None


@REQUESTS.guard(ev.Admission, "builds on a match in the present cache")
def _match_still_counts(s: State, e: ev.Admission) -> Broken | None:
    """The cache was not emptied between the match and the admission that builds on it."""
    request = s.request(e.req)
    if request is None or request.match is None or not e.admitted or request.epoch == s.epoch:
        return None
    return Broken(f"the cache was reset between the match and the admission of {request.rid}", request.match.moment.seq)


@REQUESTS.guard(ev.Admission, "counts what was matched and loaded")
def _counts_what_was_matched(s: State, e: ev.Admission) -> str | None:
    """The tokens that count as cached are those that the match found in L1 and those that were loaded."""
    request = s.request(e.req)
    if request is None or request.match is None or not e.admitted:
        return None
    cached = request.match.device + request.loaded
    return None if e.prefix == cached else f"admitted with {e.prefix} cached tokens, {cached} were matched and loaded"


@REQUESTS.guard(ev.Admission, "its load-backs were decided")
def _loads_were_decided(s: State, e: ev.Admission) -> str | None:
    """What was loaded for a request was decided before its admission."""
    request = s.request(e.req)
    if request is None or not e.admitted or not request.loaded or request.decision is not None:
        return None
    return f"request {request.rid} was admitted, and its load-back was not decided"


@REQUESTS.guard(ev.Admission, "ends within the tokens")
def _ends_within(s: State, e: ev.Admission) -> str | None:
    """The first pass of an admitted request ends behind its cached tokens and within its tokens."""
    request = s.request(e.req)
    if request is None or not e.admitted:
        return None
    beyond = request.attempt == 1 and e.end > request.prompt_tokens
    return f"admitted up to token {e.end} of {request.prompt_tokens}" if beyond or e.end <= e.prefix else None


@REQUESTS.guard(ev.Admission, "knows the load-back")
def _knows_the_load_back(s: State, e: ev.Admission) -> str | None:
    """The load-back that the request counts is the one that was decided (releases that do not count it say 0).

    A request that was retracted keeps the count of its attempt before.
    """
    request = s.request(e.req)
    if request is None or request.attempt > 1 or not e.host_loaded or e.host_loaded == request.loaded:
        return None
    return f"request {request.rid} counts {e.host_loaded} loaded tokens, {request.loaded} were"


@REQUESTS.effect(ev.Admission)
def _it_is_in_the_next_batch(s: State, e: ev.Admission, m: ft.Moment) -> None:
    """Its first pass begins behind what counts as cached."""
    request = s.request(e.req)
    if request is not None:
        request.touched(m)
        if e.admitted and request.admitted is None:
            s.requests.admit(request, e.prefix, e.end, m)


# --- computed ----------------------------------------------------------------------------------------

REQUESTS.within(ev.Prefill, 0, 1, "last")
REQUESTS.within(ev.Prefill, 1, None, "batch")


@REQUESTS.guard(ev.Prefill, "is of an admitted request")
def _computed_after_its_admission(s: State, e: ev.Prefill) -> str | None:
    """A pass is of a request that was admitted, and not given back."""
    request = s.request(e.req)
    if request is None:
        return None if known_before(s, e.req) else f"event {e.seq} computes a request that was not queued"
    # One that was running at the attaching was admitted before.
    if request.released is not None or request.admitted is None:
        return f"a pass of {request.rid}, which is not admitted"
    return None


@REQUESTS.guard(ev.Prefill, "goes on where the one before ended")
def _passes_without_a_hole(s: State, e: ev.Prefill) -> str | None:
    """The first pass begins behind what counts as cached, each other one where the one before ended; each computes."""
    request = s.request(e.req)
    if e.end <= e.start:
        return "a pass that computed nothing"
    if request is None or request.position is None or request.position == e.start:
        return None
    return f"the prefill of {request.rid} jumps from {request.position} to {e.start}"


@REQUESTS.guard(ev.Prefill, "ends where it was to end")
def _first_pass_ends(s: State, e: ev.Prefill) -> str | None:
    """The first pass ends where the admission said."""
    request = s.request(e.req)
    if request is None or request.chunks or request.admitted_end in (None, e.end):
        return None
    return f"the first pass of {request.rid} ends at {e.end}, it was admitted up to {request.admitted_end}"


@REQUESTS.guard(ev.Prefill, "is the last one at the end")
def _last_at_the_end(s: State, e: ev.Prefill) -> str | None:
    """The pass that reaches the end of the tokens is the last one, and no other is."""
    request = s.request(e.req)
    if request is None:
        return None
    if request.chunks and request.chunks[-1].last:
        return f"a pass of {request.rid} follows the last one"
    if request.attempt == 1 and bool(e.last) != (e.end == request.prompt_tokens):
        return f"a pass of {request.rid} up to token {e.end} of {request.prompt_tokens}, last: {e.last}"
    return (
        f"the last pass of {request.rid} ends before its prompt" if e.last and e.end < request.prompt_tokens else None
    )


@REQUESTS.guard(ev.Prefill, "is in the newest batch")
def _newest_batch(s: State, e: ev.Prefill) -> str | None:
    """Batches are numbered upwards, and a request has one pass in each."""
    request = s.request(e.req)
    if request is not None and any(chunk.batch == e.batch for chunk in request.chunks):
        return f"two passes of {request.rid} carry the number of one batch"
    if e.batch < s.batches:
        return f"batch {e.batch} follows batch {s.batches}"
    return None


@REQUESTS.guard(ev.Prefill, "follows the launch of its load-backs")
def _after_its_loads(s: State, e: ev.Prefill) -> str | None:
    """The copies of what was loaded for a request are launched before its first pass, which reads them."""
    request = s.request(e.req)
    if request is None or request.chunks:
        return None
    for number in request.loads:
        load = s.copying.get(number)
        since = request.match.moment.seq if request.match is not None else 0
        if load is not None and load.started is None and load.moment.seq > since:
            return f"a pass of {request.rid} was launched before its load-back {number}"
    return None


@REQUESTS.effect(ev.Prefill)
def _a_pass_is_launched(s: State, e: ev.Prefill, m: ft.Moment) -> None:
    """Its tokens are computed, by the weights of now; what it reads has to stay where it is until it is processed."""
    request = s.request(e.req)
    s.batches = max(s.batches, e.batch)
    if request is not None:
        request.touched(m)
        request.chunks.append(OpenChunk(m, e.batch, e.start, e.end, bool(e.last)))


def _pass_of(request: OpenRequest, batch: int) -> OpenChunk | None:
    return next((chunk for chunk in request.chunks if chunk.batch == batch and chunk.done is None), None)


@REQUESTS.guard(ev.PrefillDone, "is of a launched pass")
def _of_a_launched_pass(s: State, e: ev.PrefillDone) -> str | None:
    """A result is of a pass that was launched, once, and results come in the order of their passes."""
    request = s.request(e.req)
    if request is None:
        return None
    chunk = _pass_of(request, e.batch)
    if chunk is None:
        return f"the result of a prefill of {request.rid} that was not launched, or not once more"
    first = next(one for one in request.chunks if one.done is None)
    return None if chunk is first else f"the result of batch {e.batch} of {request.rid} came before an earlier one's"


@REQUESTS.guard(ev.PrefillDone, "is of a pass in the present cache")
def _of_the_present_cache(s: State, e: ev.PrefillDone) -> Broken | None:
    """The cache was not emptied between a pass and its result."""
    request = s.request(e.req)
    chunk = _pass_of(request, e.batch) if request is not None else None
    if request is None or chunk is None or not s.epochs or chunk.moment.seq > s.epochs[-1].begin.seq:
        return None
    return Broken(f"the cache was reset before the prefill of {request.rid} had ended", s.epochs[-1].begin.seq)


@REQUESTS.guard(ev.PrefillDone, "has a token after the last pass")
def _token_after_the_last(s: State, e: ev.PrefillDone) -> str | None:
    """The last pass of a prompt gives a token, the others give none."""
    request = s.request(e.req)
    chunk = _pass_of(request, e.batch) if request is not None else None
    if request is None or chunk is None or request.attempt > 1:
        return None
    if e.output_tokens == int(chunk.last) or (request.released is not None and chunk.last and e.output_tokens <= 1):
        return None
    return f"the prefill of {request.rid} ended with {e.output_tokens} output tokens"


@REQUESTS.effect(ev.PrefillDone)
def _a_result_is_processed(s: State, e: ev.PrefillDone, m: ft.Moment) -> None:
    """What the pass computed is used."""
    request = s.request(e.req)
    if request is None:
        return
    request.last = m
    chunk = _pass_of(request, e.batch)
    if chunk is None:
        # It may be of another request with this id; nobody can tell which of the other events are.
        request.shared_id = True
    else:
        chunk.done, chunk.output_tokens = m, e.output_tokens
        s.requests.computed(request)


# --- given back --------------------------------------------------------------------------------------

REQUESTS.within(ev.Released, ev.ReleaseState.FINISHED, ev.ReleaseState.RETRACTED, "state")
REQUESTS.within(ev.Released, 0, None, "output_tokens", "cached_total")
REQUESTS.within(ev.Released, -1, None, "cached_device", "cached_host", "cached_storage")


@REQUESTS.guard(ev.Released, "is of a request that runs")
def _released_once(s: State, e: ev.Released) -> Broken | str | None:
    """A request gives its row back once, after its admission."""
    request = s.request(e.req)
    if request is None:
        return None if known_before(s, e.req) else f"event {e.seq} releases a request that was not queued"
    if request.released is not None:
        return Broken(f"request {request.rid} was given back twice", since=request.released.seq)
    if request.admitted is None and e.state == ev.ReleaseState.FINISHED:
        return f"request {request.rid} finished, and was not admitted"
    return None


@REQUESTS.guard(ev.Released, "has generated what it inserted")
def _generated_what_it_inserted(s: State, e: ev.Released) -> str | None:
    """No more tokens are in the cache than the prompt and what was generated."""
    request = s.request(e.req)
    if request is None or request.inserted <= request.prompt_tokens + e.output_tokens:
        return None
    return (
        f"{request.inserted} tokens of {request.rid} were put into the cache, it has {request.prompt_tokens} and "
        f"generated {e.output_tokens}"
    )


@REQUESTS.guard(ev.Released, "finished with a token")
def _finished_with_a_token(s: State, e: ev.Released) -> str | None:
    """A request that finished has launched its last pass and generated a token."""
    request = s.request(e.req)
    if request is None or e.state != ev.ReleaseState.FINISHED or not request.chunks:
        return None
    if e.output_tokens < 1 or not request.chunks[-1].last:
        return f"request {request.rid} finished with {e.output_tokens} output tokens, before its last pass"
    return None


@REQUESTS.guard(ev.Released, "adds up")
def _cached_adds_up(s: State, e: ev.Released) -> str | None:
    """The server's cached tokens by tier are no more than it counts in all (tiers that it does not tell are -1)."""
    if min(e.cached_device, e.cached_host, e.cached_storage) < 0:
        return None
    parts = e.cached_device + e.cached_host + e.cached_storage
    return (
        None if parts in (0, e.cached_total) else f"the server counts {e.cached_total} cached tokens, {parts} by tier"
    )


@REQUESTS.effect(ev.Released)
def _it_is_over(s: State, e: ev.Released, m: ft.Moment) -> None:
    """Nothing more is computed for it."""
    request = s.request(e.req)
    if request is None:
        return
    request.touched(m)
    if request.released is None:
        request.output_tokens = e.output_tokens
        request.cached = e.cached_total, _told(e.cached_device), _told(e.cached_host), _told(e.cached_storage)
    s.requests.end(request, e.state, m)


def _told(tokens: int) -> int | None:
    """A number that the server told; SGLang before 0.5.9 does not tell tokens by tier (negative)."""
    return None if tokens < 0 else tokens


@REQUESTS.guard(ev.AbortedInQueue, "waits")
def _aborted_while_waiting(s: State, e: ev.AbortedInQueue) -> str | None:
    """What is aborted in the queue waits there: not admitted, or between two chunks of its prefill; not given back."""
    request = s.request(e.req)
    if request is None or request.waits or request.between_chunks:
        return None
    return f"request {request.rid} was aborted in the queue, and was not there"


@REQUESTS.effect(ev.AbortedInQueue)
def _it_never_ran(s: State, e: ev.AbortedInQueue, m: ft.Moment) -> None:
    """Nothing more is computed for it. What was admitted gives its row back after that."""
    request = s.request(e.req)
    if request is not None:
        request.touched(m)
        if request.between_chunks:
            request.state = ev.ReleaseState.ABORTED
        else:
            s.requests.end(request, ev.ReleaseState.ABORTED, m)
