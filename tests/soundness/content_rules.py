"""What has to be true of pages that were digested before they went out and after they came back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvwitness.patches.schema import events as ev
from soundness.relations import Relations
from soundness.rules import Rules, Why
from soundness.subjects import Page, Served
from soundness.things import Copy


@dataclass(eq=False)
class Pair:
    """The digests of a page as a backup took it out of L1, and as a load-back brought it back."""

    page: Page
    load: Copy
    backup: Copy
    out: list[ev.BackupDigested]
    back: list[ev.LoadDigested]

    @property
    def events(self) -> list[ev.Event]:
        return [self.load.queued, *self.out, *self.back]


@dataclass(eq=False)
class Content:
    """The pages of a range that was read from L2."""

    served: Served
    pages: list[Page]

    @cached_property
    def pairs(self) -> list[Pair]:
        """Those that were digested at both ends."""
        found: list[Pair] = []
        r = self.served.r
        out, back = _by_page(r, ev.BackupDigested), _by_page(r, ev.LoadDigested)
        for page in self.pages:
            load = page.load if page.load is not None else page.shared
            number = load.page_of(page.low, r.page) if load is not None else None
            if load is None or number is None or load.launch is None:
                continue
            touches = [t for t in r.host.get(number, ()) if t.what == "write" and t.seq < load.queued.seq]
            backup = touches[-1].source if touches else None
            if not isinstance(backup, Copy) or backup.launch is None:
                continue
            went = out.get((backup.launch.event.transfer, number * r.page), [])
            came = back.get((load.launch.event.transfer, number * r.page), [])
            if went and came:
                found.append(Pair(page, load, backup, went, came))
        return found


def _by_page(r: Relations, kind: Any) -> dict[tuple[int, int], list[Any]]:
    found: dict[tuple[int, int], list[Any]] = {}
    for event in r.of(kind):
        found.setdefault((event.transfer, event.slot), []).append(event)
    return found


def compared(content: Content) -> dict[int, bool]:
    """Pages by their first token, and whether they came back with other bytes."""
    return {pair.page.low: pair.out[0].digests != pair.back[0].digests for pair in content.pairs}


CONTENT: Rules[Content] = Rules("the bytes of pages that were read from L2")


@CONTENT
def a_page_is_digested_once_at_each_end(c: Content) -> Iterator[Why]:
    """A page has one digest from its backup and one from its load-back."""
    for pair in c.pairs:
        if len(pair.out) > 1 or len(pair.back) > 1:
            yield "a page was digested twice", *pair.events


@CONTENT
def a_digest_is_of_every_layer(c: Content) -> Iterator[Why]:
    """A page's digests are as many as the model has layers."""
    for pair in c.pairs:
        if {len(pair.out[0].digests), len(pair.back[0].digests)} != {c.served.r.facts.get("layers")}:
            yield "a digest is not of every layer", *pair.events


@CONTENT
def digests_are_taken_after_the_copies_began(c: Content) -> Iterator[Why]:
    """First the backup is launched and digested, then the load-back is launched and digested."""
    for pair in c.pairs:
        assert pair.backup.launch is not None and pair.load.launch is not None
        seqs = [pair.backup.launch.event.seq, pair.out[0].seq, pair.back[0].seq]
        if seqs != sorted(seqs) or pair.back[0].seq < pair.load.launch.event.seq:
            yield "digested at another time", *pair.events


@CONTENT
def a_page_is_in_l1_until_it_is_digested(c: Content) -> Iterator[Why]:
    """Between the launch of the load-back and the digest the page did not leave L1, and nothing was reset."""
    for pair in c.pairs:
        assert pair.load.launch is not None
        since, until = pair.load.launch.event.seq, pair.back[0].seq
        if c.served.r.reset_between(since, until):
            yield "the cache was reset before the page was digested", *pair.events
        if any(not move.there and since < move.seq < until for move in pair.page.block.moves):
            yield "the page had left L1 before it was digested", *pair.events
