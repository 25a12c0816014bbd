"""Why a prefix that an earlier request had in the cache was not in L1, or not in L2, when a request was matched.

Nothing here raises or lowers a grade. What is answered rests on the ledger's facts alone, and what they do not say is
answered with "not known".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec

from kvwitness.patches.schema.events import Eviction, Refusal
from kvwitness.tracer.ledger.facts import Backup, MatchedNode, Moment, RequestFacts, Residency, Victim
from kvwitness.tracer.model import EventRef
from kvwitness.tracer.verdicts.evictions import ForcedEviction, forced_l1, forced_l2
from kvwitness.tracer.verdicts.links import AT_ATTACH
from kvwitness.tracer.verdicts.rejections import last_rejection, rejected_words
from kvwitness.tracer.verdicts.view import InstanceView, owners_of

_RESET = ("Reset", "HostClear")
_LOST = (Eviction.DROPPED, Eviction.DROPPED_HOST_PRESSURE)


class Because(StrEnum):
    """What kept a piece of a prefix from being found in a tier (closed list)."""

    THERE = "there"
    """It was there; nothing kept it."""
    EVICTED = "evicted"
    LOST = "lost"
    """L1: evicted without a copy in L2."""
    RESET = "reset"
    NEVER = "never"
    """It was never there."""
    REJECTED = "rejected"
    """L2: it was to be copied, and no host slots could be had."""
    UNFINISHED = "unfinished"
    """L2: the copy was not acknowledged before the match."""
    NOT_FOUND = "not_found"
    """By the ledger it was there, and the match did not find it."""
    AT_ATTACH = "at_attach"
    """It was not there when kvwitness was attached."""
    UNKNOWN = "unknown"


class Piece(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` of the request's prompt, and what was with them in one tier."""

    start: int
    end: int
    because: Because
    answer: str
    """The same in words."""
    eviction: ForcedEviction | None = None
    places: tuple[int, ...] = ()
    """Which of its victims, from 1, held these tokens."""
    before_match_ns: int | None = None
    """How long before the match it happened."""
    events: tuple[EventRef, ...] = ()


class Why(msgspec.Struct, frozen=True):
    """The two answers about one request on one instance."""

    rid: str
    instance: str
    prior_rid: str | None
    """The earlier request that had the prefix in this cache; None: no earlier one shares a page with it."""
    known: int
    """Tokens from the prompt's start that an earlier request had."""
    in_l1: int
    """Tokens that the match found in L1 ..."""
    in_l2: int
    """... and beyond them in L2."""
    l1: tuple[Piece, ...]
    l2: tuple[Piece, ...]


def why_absent(view: InstanceView, request: RequestFacts) -> Why:
    """Answer both questions for the part of the prompt that an earlier request had and that L1 did not."""
    match = request.match
    device, host = (match.device, match.host) if match is not None else (0, 0)
    known = min(max(request.prior_tokens, device + host), request.prompt_tokens)
    l1: tuple[Piece, ...] = ()
    l2: tuple[Piece, ...] = ()
    if match is not None and known > device:
        search = _Search(view, request, match.moment)
        l1 = _joined(search.pieces(device, known, search.l1_at))
        l2 = _joined(search.pieces(device, known, search.l2_at))
    return Why(
        rid=request.rid,
        instance=view.instance.instance,
        prior_rid=request.prior_rid,
        known=known,
        in_l1=device,
        in_l2=host,
        l1=l1,
        l2=l2,
    )


class _Search:
    """Looks up what was with parts of one request's prefix before its match."""

    def __init__(self, view: InstanceView, request: RequestFacts, matched: Moment) -> None:
        self._view = view
        self._request = request
        self._matched = matched
        owners = self._owners = owners_of(view, request)
        before = matched.seq
        self._l1 = [r for owner in owners for r in view.l1_of(owner, request.epoch) if r.since.seq < before]
        self._l2 = [r for r in view.l2_of(owners, request.epoch) if r.since.seq < before]
        self._backups = [b for b in view.backups_of(owners, request.epoch) if b.queued.seq < before]

    def pieces(self, start: int, end: int, at: Callable[[int, int], Piece]) -> list[Piece]:
        """One answer for each part of ``[start, end)`` within which nothing changes."""
        cuts = {cut for stay in (*self._l1, *self._l2) for cut in (stay.start, stay.end)}
        cuts.update(cut for backup in self._backups for cut in (backup.start, backup.end))
        match = self._request.match
        if match is not None:
            cuts.add(match.device + match.host)
            cuts.update(cut for node in match.nodes for cut in (node.start, node.end))
        inside = [start, *sorted(cut for cut in cuts if start < cut < end), end]
        return [at(low, high) for low, high in pairwise(inside)]

    # --- L1 ------------------------------------------------------------------------------------------

    def l1_at(self, start: int, end: int) -> Piece:
        """Why ``[start, end)`` was not in L1."""
        node = self._matched_node(start)
        if node is not None and node.evicted is not None and node.resident is None:
            return self._left_l1(start, end, node.evicted)
        last = _latest(self._l1, start)
        if last is None:
            return self._before_this_epoch(start, end) or self._piece(
                start, end, Because.UNKNOWN, "nothing recorded says when L1 held it"
            )
        if last.until is None or last.until.seq > self._matched.seq:
            answer = "by the ledger L1 held it, and the match did not find it"
            return self._piece(start, end, Because.NOT_FOUND, answer, last.since)
        return self._left_l1(start, end, last.until)

    def _matched_node(self, position: int) -> MatchedNode | None:
        match = self._request.match
        nodes = match.nodes if match is not None else ()
        return next((node for node in nodes if node.start <= position < node.end and not node.on_device), None)

    def _left_l1(self, start: int, end: int, until: Moment) -> Piece:
        if until.kind in _RESET:
            return self._piece(start, end, Because.RESET, "the cache was reset", until)
        if until.kind == AT_ATTACH:
            return self._piece(start, end, Because.AT_ATTACH, "it was not in L1 when kvwitness was attached", until)
        found = self._view.victim_at.get(until.seq)
        if found is None:
            return self._piece(start, end, Because.UNKNOWN, "it left L1, and the event that says why is missing", until)
        call, victim = found
        because, answer = self._became_of(victim, start)
        piece = self._piece(start, end, because, answer, until)
        eviction = forced_l1(self._view, call)
        places = tuple(place for place, taken in enumerate(eviction.victims, start=1) if taken.seq == until.seq)
        return msgspec.structs.replace(piece, eviction=eviction, places=places)

    def _became_of(self, victim: Victim, position: int) -> tuple[Because, str]:
        """The tree's word that a node was demoted is not enough: there has to be a copy."""
        if victim.how in _LOST:
            return Because.LOST, f"{Eviction.NAMES[victim.how]}: lost"
        match = self._request.match
        matched = match is not None and position < match.device + match.host
        left = victim.moment.seq
        copied = any(r.start <= position < r.end and (r.until is None or r.until.seq > left) for r in self._l2)
        if matched or copied:
            return Because.EVICTED, "evicted, its copy in L2 stayed"
        return Because.LOST, "demoted, and no acknowledged copy in L2 was recorded: lost"

    # --- L2 ------------------------------------------------------------------------------------------

    def l2_at(self, start: int, end: int) -> Piece:
        """Why ``[start, end)`` was not in L2, or that it was."""
        match = self._request.match
        if match is not None and start < match.device + match.host:
            return self._there(start, end)
        last = _latest(self._l2, start)
        if last is None:
            return self._never_in_l2(start, end)
        until = last.until
        if until is None or until.seq > self._matched.seq:
            answer = "by the ledger L2 held it, and the match did not find it"
            return self._piece(start, end, Because.NOT_FOUND, answer, last.since)
        if until.kind in _RESET:
            return self._piece(start, end, Because.RESET, "the cache was reset", until)
        found = self._view.host_victim_at.get((until.seq, last.node, last.end))
        if found is None:
            answer = "its host slots were given back outside an eviction"
            return self._piece(start, end, Because.UNKNOWN, answer, until)
        eviction, place = found
        piece = self._piece(start, end, Because.EVICTED, "its copy was evicted from L2", until)
        return msgspec.structs.replace(piece, eviction=forced_l2(self._view, eviction), places=(place + 1,))

    def _there(self, start: int, end: int) -> Piece:
        decision, answer = self._request.decision, "it was in L2"
        if decision is None:
            answer += ", and no load-back of it was decided"
        elif decision.loaded:
            answer += ", and was loaded from there"
        else:
            answer += f", and its load-back was refused: {Refusal.NAMES.get(decision.reason, 'unknown')}"
        piece = self._piece(start, end, Because.THERE, answer, decision.moment if decision is not None else None)
        return msgspec.structs.replace(piece, before_match_ns=None)

    def _never_in_l2(self, start: int, end: int) -> Piece:
        earlier = self._before_this_epoch(start, end)
        if earlier is not None:
            return earlier
        pending = _latest_backup(self._backups, start)
        if pending is not None and (pending.acked is None or pending.acked.seq > self._matched.seq):
            answer = "its copy to L2 was queued, and not acknowledged before the match"
            return self._piece(start, end, Because.UNFINISHED, answer, pending.queued)
        rejection = last_rejection(self._view, self._owners, self._request.epoch, self._matched.seq, start)
        if rejection is not None:
            return self._piece(start, end, Because.REJECTED, rejected_words(self._view, rejection), rejection.moment)
        return self._piece(start, end, Because.NEVER, f"no copy of it to L2 was recorded{self._policy()}")

    def _policy(self) -> str:
        said = self._view.instance.facts.instance
        policy, threshold = said.write_policy, said.write_through_threshold
        if policy == "write_through_selective":
            return f" (write policy write_through_selective: a node is copied at its hit {threshold})"
        return f" (write policy {policy})" if policy is not None else ""

    # --- both ----------------------------------------------------------------------------------------

    def _before_this_epoch(self, start: int, end: int) -> Piece | None:
        """The earlier request's cache was reset since."""
        request = self._request
        if start >= request.prior_tokens or request.prior_epoch >= request.epoch:
            return None
        reset = next((e for e in self._view.instance.epochs if request.prior_epoch < e.index <= request.epoch), None)
        return None if reset is None else self._piece(start, end, Because.RESET, "the cache was reset", reset.begin)

    def _piece(self, start: int, end: int, because: Because, answer: str, moment: Moment | None = None) -> Piece:
        instance = self._view.instance.instance
        return Piece(
            start=start,
            end=end,
            because=because,
            answer=answer,
            before_match_ns=self._matched.t_ns - moment.t_ns if moment is not None else None,
            events=(EventRef(instance, moment.seq, moment.kind),) if moment is not None else (),
        )


def _latest(residencies: Iterable[Residency], position: int) -> Residency | None:
    """The last stay in a tier of what is at a position."""
    covering = [r for r in residencies if r.start <= position < r.end]
    return max(covering, key=lambda r: r.since.seq, default=None)


def _latest_backup(backups: Iterable[Backup], position: int) -> Backup | None:
    return max((b for b in backups if b.start <= position < b.end), key=lambda b: b.queued.seq, default=None)


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Neighbours with one answer become one piece."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if last is None or _key(last) != _key(piece):
            out.append(piece)
            continue
        out[-1] = msgspec.structs.replace(
            last,
            end=piece.end,
            places=tuple(sorted({*last.places, *piece.places})),
            events=tuple(dict.fromkeys((*last.events, *piece.events))),
        )
    return tuple(out)


def _key(piece: Piece) -> tuple[Because, str, int | None]:
    return piece.because, piece.answer, piece.eviction.call if piece.eviction is not None else None
