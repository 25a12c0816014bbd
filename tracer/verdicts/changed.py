"""Where a prompt stops being the one that an earlier request had: the first token that differs, as far as it shows.

Digests tell cells of tokens apart, not tokens. Where the match went on into the cell that differs, the radix tree's
own word is finer: it found a page of the earlier sequence and not the next one, which was there.
"""

from __future__ import annotations

import msgspec

from kvwitness.tracer.ledger.chains import first_difference
from kvwitness.tracer.ledger.facts import MatchFact, RequestFacts
from kvwitness.tracer.verdicts.l2 import covers
from kvwitness.tracer.verdicts.view import InstanceView


class Change(msgspec.Struct, frozen=True):
    """The first token that differs from request ``rid``'s is one of ``[low, high)``, pages of ``page`` tokens."""

    rid: str
    low: int
    high: int
    page: int

    def __str__(self) -> str:
        return f"it differs from request {self.rid} first in {tokens_in_words(self.low, self.high, self.page)}"


def tokens_in_words(low: int, high: int, page: int) -> str:
    """``[low, high)``, counted from 0, with the pages that they lie in."""
    words = f"token {low}" if high == low + 1 else f"one of the tokens {low} to {high - 1}"
    if page <= 1:
        return words
    first, last = low // page, (high - 1) // page
    return f"{words} ({f'page {first}' if first == last else f'pages {first} to {last}'})"


def change_of(view: InstanceView, request: RequestFacts) -> Change | None:
    """Where ``request``'s prompt leaves that of the earlier one that shares the longest prefix with it."""
    match = request.match
    # Where not every earlier prompt is remembered, this one may have been sent before.
    if match is None or request.shared_id or view.instance.remembers_from:
        return None
    rid = _deepest_owner(match, request) or request.prior_rid
    chain, other = view.instance.chains.get(request.rid), view.instance.chains.get(rid or "")
    found = first_difference(chain, other, request.prompt_tokens)
    # An earlier place than the common prefix: another request with that id.
    if rid is None or found is None or found[0] < request.prior_tokens or rid == request.rid:
        return None
    # It differs from this one, and may be another one to its end.
    if view.prompts.may_continue(request, found[0]):
        return None
    page = max(view.instance.facts.instance.page_size or 1, 1)
    low, high = _narrowed(view, match, request, rid, *found, page)
    return Change(rid, low, high, page)


def _deepest_owner(match: MatchFact, request: RequestFacts) -> str | None:
    """Whose prefix was followed beyond what the digests show to be common."""
    end = match.device + match.host
    last = next((node for node in match.nodes if node.start < end <= node.end), None)
    if last is None or end <= request.prior_tokens or not last.known or last.same_prefix is not True:
        return None
    return last.owner


def _narrowed(
    view: InstanceView, match: MatchFact, request: RequestFacts, rid: str, low: int, high: int, page: int
) -> tuple[int, int]:
    end = match.device + match.host
    if not low <= end < high or not covers(match.nodes, 0, end):
        return low, high
    if end > low and _deepest_owner(match, request) != rid:
        return low, high
    # State of further pools can end a match where the tokens go on alike.
    whole = len(view.instance.facts.instance.pools) <= 1 and end + page <= match.key_tokens
    there = [
        r
        for r in (*view.l1_of(rid, request.epoch), *view.l2_of((rid,), request.epoch))
        if r.since.seq < match.moment.seq and (r.until is None or r.until.seq > match.moment.seq)
    ]
    return end, min(high, end + page) if whole and covers(there, end, end + page) else high
