"""What holds of one stay of a request in the queue and after it: every event in its order, each thing once.

Nothing is concluded from what a request did when its own events contradict one another. A rule yields the number of the
event that contradicts it, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvwitness.patches.schema import events as ev
from soundness.things import Stay

Doubt = tuple[int, str]
Rule = Callable[[Stay], Iterator[Doubt]]
STAY: list[Rule] = []
"""The rules, in the order in which they are asked."""


def rule(predicate: Rule) -> Rule:
    STAY.append(predicate)
    return predicate


def doubts(stay: Stay) -> list[tuple[int, str, str]]:
    """Everything in a stay that contradicts a rule: event, why, rule."""
    found = [(seq, why, told.__name__) for told in STAY for seq, why in told(stay)]
    return sorted(found)


def admission_of(stay: Stay) -> ev.Admission | None:
    return next((e for e in stay.of(ev.Admission) if e.admitted), None)


def match_of(stay: Stay, before: int) -> ev.Matched | None:
    """The last match that an admission, or a load-back, at event ``before`` builds on."""
    told = [e for e in stay.of(ev.Matched) if e.purpose == ev.MatchPurpose.ADMISSION and e.seq < before]
    return told[-1] if told else None


def loaded(stay: Stay, match: ev.Matched, admission: ev.Admission) -> int:
    """How many tokens were queued to be loaded for an admission."""
    return sum(copy.queued.tokens for copy in stay.loads if match.seq < copy.queued.seq < admission.seq)


@rule
def one_id_is_one_request_at_a_time(s: Stay) -> Iterator[Doubt]:
    """An id is queued again only after the request has ended or was retracted."""
    if s.before is not None and not s.queued.retracted and not s.before.over:
        yield s.queued.seq, "the request's id was in use twice at a time"
    if s.after is not None and not s.after.queued.retracted and not s.over:
        yield s.queued.seq, "the request's id was in use twice at a time"


@rule
def digests_fit_pages_and_prompt(s: Stay) -> Iterator[Doubt]:
    """Grid, first cell, page size and prompt length fit one another; one prefix has one digest."""
    if s.use.wrong:
        yield s.queued.seq, s.use.wrong
    elif s.use.later is not None:
        yield s.use.later


def acted_on(s: Stay) -> list[ev.Matched]:
    """The matches that the admission or a load-back builds on."""
    admission = admission_of(s)
    ends = [admission.seq] if admission is not None else []
    matches = [match_of(s, seq) for seq in (*ends, *(copy.queued.seq for copy in s.loads))]
    return list({m.seq: m for m in matches if m is not None}.values())


@rule
def a_path_is_a_path(s: Stay) -> Iterator[Doubt]:
    """A matched path has no hole: what is in L1, then what is in L2, to the end of what matched and the best node."""
    for e in acted_on(s):
        position, device, below = 0, 0, False
        for step in e.path:
            if step.start != position or step.end <= step.start:
                yield e.seq, "the matched path has a hole"
                break
            position = step.end
            if step.on_device and below:
                yield e.seq, "L1 below what is not in L1"
                break
            below = not step.on_device
            device = step.end if step.on_device else device
        else:
            if e.device != device or e.device + e.host != position:
                yield e.seq, "matched otherwise than the path holds"
            elif e.path and e.path[-1].node != e.best_node:
                yield e.seq, "the path does not end with the best node"
            elif e.device + e.host > e.key_tokens or e.key_tokens > most_tokens(s):
                yield e.seq, "matched more than was looked for, or than the prompt has"


def most_tokens(s: Stay) -> int:
    """How many tokens the request can look for: its prompt, and what it had generated before it was retracted."""
    if not s.queued.retracted:
        return s.queued.prompt_tokens
    generated = [e.output_tokens for stay in s.use.stays for e in stay.of(ev.Released) if e.seq < s.queued.seq]
    ends = [e.end for e in s.of(ev.Prefill)]
    return max([s.queued.prompt_tokens + max(generated, default=0), *ends])


@rule
def admitted_once_on_a_match(s: Stay) -> Iterator[Doubt]:
    """A request is admitted once, and only after it was matched."""
    told = [e for e in s.of(ev.Admission) if e.admitted]
    if len(told) > 1:
        yield told[1].seq, "admitted twice"
    if told and match_of(s, told[0].seq) is None:
        yield told[0].seq, "no match before the admission"


@rule
def loads_are_of_what_the_match_promised(s: Stay) -> Iterator[Doubt]:
    """A load-back is queued between a match and the admission: the tokens that this match found in L2, from its first
    one on."""
    admission = admission_of(s)
    position: dict[int, int] = {}
    for copy in s.loads:
        load = copy.queued
        match = match_of(s, load.seq)
        if match is None:
            yield load.seq, "a load-back without a match"
            continue
        if admission is not None and load.seq > admission.seq:
            yield load.seq, "a load-back after the admission"
        if load.start != position.setdefault(match.seq, match.device) or load.end > match.device + match.host:
            yield load.seq, "a load-back of other tokens than L2 promised"
        if load.node != match.best_node:
            yield load.seq, "a load-back for another node than the match led to"
        position[match.seq] = load.end


@rule
def a_decision_says_what_was_queued(s: Stay) -> Iterator[Doubt]:
    """Loaded is what was queued since the match, no more than was promised or wanted, and then nothing was refused."""
    for e in s.of(ev.LoadBackDecided):
        match = match_of(s, e.seq)
        if match is None:
            yield e.seq, "a decision about a load-back without a match"
            continue
        queued = sum(copy.queued.tokens for copy in s.loads if match.seq < copy.queued.seq < e.seq)
        if e.loaded != queued:
            yield e.seq, "init_load_back did not return what was queued"
        elif e.promised != match.host or e.node != match.best_node:
            yield e.seq, "a decision about another promise than the match made"
        elif e.loaded > e.promised or e.loaded > e.wanted:
            yield e.seq, "more was loaded than was promised or wanted"
        elif e.loaded and e.reason != ev.Refusal.NONE:
            yield e.seq, "a decision that loaded something and names a reason for refusing"


@rule
def passes_begin_behind_the_admitted_prefix(s: Stay) -> Iterator[Doubt]:
    """The first pass comes after the admission, and begins where the admitted prefix ends."""
    passes, admission = s.of(ev.Prefill), admission_of(s)
    if passes and (admission is None or passes[0].seq < admission.seq):
        yield passes[0].seq, "computed before it was admitted"
    elif passes and admission is not None and passes[0].start != admission.prefix:
        yield passes[0].seq, "the passes leave a hole, or compute reused tokens"


@rule
def passes_follow_one_another(s: Stay) -> Iterator[Doubt]:
    """A pass begins where the one before ended, in a batch of its own; the last one is called the last."""
    position: int | None = None
    batches: set[int] = set()
    passes = s.of(ev.Prefill)
    for number, e in enumerate(passes):
        if (position is not None and e.start != position) or e.end <= e.start:
            yield e.seq, "the passes leave a hole"
        if e.batch in batches:
            yield e.seq, "a batch twice"
        if e.last and number < len(passes) - 1:
            yield e.seq, "the last pass is not the last"
        position = e.end
        batches.add(e.batch)


@rule
def a_pass_has_one_result(s: Stay) -> Iterator[Doubt]:
    """The result of a pass comes once, after the pass, in the order of the passes."""
    order = {e.batch: at for at, e in enumerate(s.of(ev.Prefill))}
    launched = {e.batch: e.seq for e in s.of(ev.Prefill)}
    for expected, e in enumerate(s.of(ev.PrefillDone)):
        if e.batch not in launched or launched[e.batch] > e.seq:
            yield e.seq, "the result of a pass that the request did not begin"
        elif order[e.batch] != expected:
            yield e.seq, "results of a batch twice, or not in order"


LATE = (
    ev.Matched,
    ev.LoadBackDecided,
    ev.LoadQueued,
    ev.Admission,
    ev.Prefill,
    ev.Released,
    ev.AbortedInQueue,
)
"""What a claim about a request rests on, and what ends it."""


@rule
def nothing_comes_after_the_end(s: Stay) -> Iterator[Doubt]:
    """A request is released or aborted once; what comes later is at most the result of a pass that it had begun."""
    over: ev.Event | None = None
    for e in s.events:
        probe = isinstance(e, ev.Matched) and e.purpose == ev.MatchPurpose.OTHER
        if over is not None and isinstance(e, LATE) and not probe:
            yield e.seq, f"{type(e).__name__} after the request had ended"
        passes = [p for p in s.of(ev.Prefill) if p.seq < e.seq]
        # Between two chunks it waits as well, and gives its row back after it was aborted.
        if isinstance(e, ev.Released) or (isinstance(e, ev.AbortedInQueue) and not passes):
            over = e
        if isinstance(e, ev.AbortedInQueue) and passes and passes[-1].last:
            yield e.seq, "aborted in the queue, and computed before"
