"""Which weights computed what a request reads, by the recorded changes of the weights."""

from __future__ import annotations

from bisect import bisect_left

from kvwitness.patches.schema import events as ev
from soundness.blocks import Block
from soundness.reading_rules import ORIGIN, READING
from soundness.relations import Relations
from soundness.subjects import Origin, Page, Served
from soundness.things import Fetch, Stay

KINDS = (ev.WeightsKind.DISK, ev.WeightsKind.TENSORS, ev.WeightsKind.DISTRIBUTED, ev.WeightsKind.IPC)
"""Changes of the base model; an adapter's KV has a cache namespace of its own."""


def weights_of(r: Relations, stay: Stay, start: int, end: int) -> str:
    """``same``, ``other`` or ``unknown``: the weights of ``[start, end)`` against those of the first pass."""
    served = Served(r, stay)
    if served.match is None or not served.passes:
        return "unknown"
    changes = [e for e in r.of(ev.WeightsUpdated) if e.kind in KINDS]
    told: set[str] = set()
    for low in range(start, end, r.page):
        block = Block(r, stay.use, served.match, low, min(low + r.page, end))
        born = {_version(changes, seq) for seq in _computed(served, block)}
        now = _version(changes, served.passes[0].seq)
        known = len(born) == 1 and None not in born and now is not None
        told.add("unknown" if not known else "same" if born == {now} else "other")
    return "other" if told == {"other"} or told == {"other", "same"} else told.pop() if len(told) == 1 else "unknown"


def _version(changes: list[ev.WeightsUpdated], seq: int) -> int | None:
    """How many changes there had been at event ``seq``; None after one that failed."""
    before = changes[: bisect_left(changes, seq, key=lambda e: e.seq)]
    return None if before and not before[-1].ok else len(before)


def _computed(served: Served, block: Block) -> set[int]:
    """The passes that may have computed what the request reads as this block."""
    page = Page(served, "L2", block, {})
    if page.load is None and page.shared is None:
        origin = Origin(served.r, block, block.match.seq, {})
        if ORIGIN.refusal(origin) is not None:
            return set()
        return {e.seq for e in origin.chain if isinstance(e, ev.Prefill)}
    if READING.refusal(page.reading) is not None:
        return set()
    if isinstance(page.reading.source, Fetch):
        # Storage has what some process once wrote: of those that this record knows of, any.
        births = (block.born(use, page.reading.fetch.done.seq, everywhere=True) for use in block.alike)
        return {birth.launched.seq for birth in births if birth is not None}
    return {e.seq for e in page.reading.chain if isinstance(e, ev.Prefill)}
