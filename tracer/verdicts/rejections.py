"""Backups that found no host slots: which of them kept a prefix out of L2, and what the host pool was full of."""

from __future__ import annotations

from collections.abc import Set

from kvwitness.tracer.ledger.facts import Rejection
from kvwitness.tracer.verdicts.view import InstanceView


def last_rejection(
    view: InstanceView, owners: Set[str | None], epoch: int, before: int, position: int
) -> Rejection | None:
    """The last rejected backup of what ``owners`` have at ``position``, before event ``before``."""
    found = [
        rejection
        for rejection in view.instance.rejections
        if rejection.epoch == epoch and rejection.moment.seq < before and rejection.owner in owners
        if _concerns(view, rejection, position)
    ]
    return found[-1] if found else None


def rejected_words(view: InstanceView, rejection: Rejection) -> str:
    """Also what L2 held then: copies of what was in L1 all the same help nobody."""
    words = f"no host slots for its copy: {rejection.tokens} tokens to store, {rejection.available} free"
    held, twice = view.held_in_l2(rejection.moment)
    return f"{words}; of the {held} tokens that L2 held then, {twice} were in L1 as well" if held else words


def _concerns(view: InstanceView, rejection: Rejection, position: int) -> bool:
    if rejection.start >= 0:
        return rejection.start <= position < rejection.end
    # It was rejected while it was being put into the tree: where it stands was recorded right after.
    held = view.l1_of(rejection.owner, rejection.epoch)
    return any(r.node == rejection.node and r.start <= position < r.end for r in held)
