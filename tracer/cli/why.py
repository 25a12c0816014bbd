"""The part of ``kvwitness explain`` that answers why a prefix was not in L1, and why it was not in L2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvwitness.collectors.journal import Journal
from kvwitness.tracer.bundle.places import is_archive, is_bundle_folder
from kvwitness.tracer.bundle.read import read_bundle_journals
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.evidence import read_folder
from kvwitness.tracer.judgement import SCHEDULER_ROLE
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.model import RequestVerdict, Tier
from kvwitness.tracer.verdicts.evictions import ForcedEviction, Taken
from kvwitness.tracer.verdicts.view import InstanceView
from kvwitness.tracer.verdicts.why import Because, Piece, Why, why_absent

_VICTIMS: Final = 6
"""Victims that are shown, beside this request's own: an eviction can have thousands."""
_TOLD: Final = 3
"""Evictions that are told victim by victim: the whole answer has to fit a screen."""


def find_why(path: Path, verdict: RequestVerdict) -> Why | None:
    """The answers about one request, from the journals at ``path``; None when its process's journal is not there."""
    for journal in _journals(path):
        if journal.role != SCHEDULER_ROLE or journal.instance != verdict.instance:
            continue
        facts = derive(journal)
        attempts = [r for r in facts.requests if (r.rid, r.attempt) == (verdict.rid, verdict.attempt)]
        same = [request for request in attempts if request.queued.t_ns == verdict.queued_ns]
        for request in (same or attempts)[-1:]:
            return why_absent(InstanceView(facts), request)
    return None


def _journals(path: Path) -> Sequence[Journal]:
    if is_bundle_folder(path) or is_archive(path):
        with bundle_errors():
            return read_bundle_journals(path)
    return read_folder(path)


def why_parts(why: Why) -> Iterator[RenderableType]:
    """The two answers for people."""
    if why.known <= why.in_l1:
        if not why.known:
            yield Text("No earlier request on this instance is known to begin like it: there was nothing to reuse.")
        return
    prior = f"request {why.prior_rid}" if why.prior_rid is not None else "the cache that was attached to"
    for tier, pieces in ((Tier.L1, why.l1), (Tier.L2, why.l2)):
        yield Text(_question(tier, pieces, f"tokens {why.in_l1} to {why.known}, which {prior} had"), style="bold")
        told = 0
        for piece in pieces:
            yield Padding(Text(_answer(piece)), (0, 0, 0, 2))
            if piece.eviction is not None:
                yield Padding(Text(_eviction(piece.eviction)), (0, 0, 0, 4))
                told += 1
                if told <= _TOLD:
                    yield Padding(_victims(piece.eviction.victims, piece.places), (0, 0, 0, 4))


def _question(tier: Tier, pieces: Sequence[Piece], what: str) -> str:
    if all(piece.because is Because.THERE for piece in pieces):
        return f"In {tier.value}:"
    return f"Why not in {tier.value}? ({what})"


def _answer(piece: Piece) -> str:
    words = f"tokens {piece.start} to {piece.end}: {piece.answer}"
    if piece.before_match_ns is not None:
        words += f", {piece.before_match_ns / 1e9:.3f} s before the match"
    if piece.events and piece.eviction is None:
        words += f"  [{', '.join(f'{event.kind} {event.seq}' for event in piece.events)}]"
    return words


def _eviction(eviction: ForcedEviction) -> str:
    at = datetime.fromtimestamp(eviction.began_ns / 1e9, UTC).strftime("%H:%M:%S.%f")[:-3]
    whom = f" of request {', '.join(eviction.rids)}" if eviction.rids else ""
    words = f"by the {eviction.cause}{whom} at {at} UTC: {eviction.asked} tokens asked"
    if eviction.free is not None:
        beyond = "" if eviction.needed is None else f", and {eviction.needed} needed beyond them"
        words += f" ({eviction.free} were free{beyond})"
    words += ", freed not recorded" if eviction.freed is None else f", {eviction.freed} freed"
    if eviction.overasked:
        words += f"; over-eviction: {eviction.overasked} more were asked for than needed, {eviction.surplus} more freed"
    elif eviction.surplus:
        words += f" ({eviction.surplus} more than needed: whole nodes are taken)"
    return words + f"  [{', '.join(f'{event.kind} {event.seq}' for event in eviction.events)}]"


def _victims(victims: Sequence[Taken], ours: Sequence[int]) -> Table:
    """In order; of a long list the first ones and those that held this prefix."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    for _ in range(3):
        table.add_column()
    left_out = 0
    for place, victim in enumerate(victims, start=1):
        if place > _VICTIMS and place not in ours:
            left_out += 1
            continue
        where = f"tokens {victim.start} to {victim.end}" if victim.start >= 0 else f"{victim.tokens} tokens"
        mark = " <- this prefix" if place in ours else ""
        table.add_row(f"{place}.", Text(f"{where} of {victim.owner or 'nobody known'}"), victim.outcome, mark)
    if left_out:
        table.add_row("", f"and {left_out} more", "", "")
    return table
