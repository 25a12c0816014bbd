"""What has to be true of "tier T served tokens [low, high) of this request", each rule by itself, in plain words."""

from __future__ import annotations

from collections.abc import Iterator

from kvwitness.patches.schema import events as ev
from soundness.reading_rules import ORIGIN, READING
from soundness.rules import At, Refusal, Rules, Why
from soundness.stay_rules import most_tokens
from soundness.subjects import Page, Served
from soundness.things import Fetch, agree

# --- a request that was served -----------------------------------------------------------------------

SERVED: Rules[Served] = Rules("a request of which something is claimed")


@SERVED
def its_own_events_are_in_order(s: Served) -> Iterator[Why]:
    """Nothing in the request's own stay contradicts (the rules of a stay)."""
    for seq, why, name in s.doubts:
        yield (Refusal(name, why, (seq,)),)


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
        yield (refused,)


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
        yield (refused,)


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
