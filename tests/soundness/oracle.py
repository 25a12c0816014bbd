"""An independent judge of claims: rules over the relations between the recorded events.

It answers one question: do the recorded events establish that this tier served these tokens? It was written from
docs/evidence-model.md and the event schema, and shares no code with the ledger or the verdicts.

``python tests/soundness/oracle.py --rules`` prints the rules.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvwitness.patches.schema import events as ev
from soundness import claim_rules, content_rules, group_rules, reading_rules, record_rules, span_rules, stay_rules
from soundness.blocks import Block
from soundness.content_rules import CONTENT, Content, compared
from soundness.group_rules import GROUP, Member, Ranks
from soundness.relations import Relations
from soundness.rules import Refusal, Rules
from soundness.span_rules import LINKS, RECORDED, Span
from soundness.subjects import Page, Served, served
from soundness.things import Stay, reach
from soundness.weights import weights_of

EDGES: dict[type[ev.Event], tuple[str, ...]] = {
    ev.Matched: ("device", "host"),
    ev.LoadBackDecided: ("promised", "loaded"),
    ev.Admission: ("prefix", "end"),
    ev.Prefill: ("start", "end"),
    ev.EvictedL1: ("start", "end"),
    ev.BackupQueued: ("start", "end"),
    ev.LoadQueued: ("start", "end"),
    ev.Queued: ("prompt_tokens",),
    ev.WaitingAtAttach: ("prompt_tokens",),
    ev.ResidentNode: ("start", "end"),
    ev.Inserted: ("key_tokens", "existing"),
}
"""Fields that are positions."""
TIERS: dict[str, tuple[Rules[Page], ...]] = {
    "L1": (claim_rules.IN_L1,),
    "L2": (claim_rules.IN_L2, claim_rules.BELOW_L2),
    "L3": (claim_rules.IN_L2, claim_rules.FROM_L3),
}


@dataclass(frozen=True)
class Recorded:
    """One journal of a recording."""

    lanes: Sequence[Sequence[ev.Event]]
    """Its events, in the order in which each thread wrote them."""
    name: str = ""
    wall_ns: int = 0


class Journal:
    """What one scheduler's journal establishes by itself."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.r = Relations(recorded.lanes)
        self.flaws = record_rules.flaws(self.r)
        self._memory: dict[int, Served] = {}
        self._edges: list[int] | None = None
        self._why: dict[int, Refusal | None] = {}

    def served(self, stay: Stay) -> Served:
        return served(self._memory, self.r, stay)

    def refusal(self, stay: Stay, tier: str, start: int, end: int) -> Refusal | None:
        """Why the events do not establish that ``tier`` served ``[start, end)``; None when they do."""
        if tier not in TIERS or start >= end or start < 0:
            return Refusal("a_claim_is_of_tokens_of_a_tier", "an empty range, or no tier", ())
        served = self.served(stay)
        if id(stay) not in self._why:
            self._why[id(stay)] = claim_rules.SERVED.refusal(served)
        if (why := self._why[id(stay)]) is not None:
            return why
        first, last = stay.queued.seq, 0
        kinds: set[type] = set()
        for page in self.pages(served, tier, start, end):
            for rules in (claim_rules.PAGE, *TIERS[tier]):
                if (why := rules.refusal(page)) is not None:
                    return why
            seqs = [e.seq for e in page.chain]
            first, last = min(first, *seqs), max(last, *seqs)
            kinds |= {type(e) for e in page.chain}
        links = LINKS[tier] + (LINKS["prefetched"] if ev.PrefetchDone in kinds else ())
        return RECORDED.refusal(Span(self.r, tier, stay, first, last, links, self.flaws))

    def pages(self, served: Served, tier: str, start: int, end: int) -> Iterator[Page]:
        """The pages to look at: every one that differs from its neighbour in any way that could matter."""
        assert served.match is not None
        edges = self._edges_of(served.stay)
        size, before = self.r.page, None
        for low in range(start, end, size):
            high = min(low + size, end)
            kind = (bisect_right(edges, low), bisect_left(edges, low + size), self._slots_at(served.stay, low))
            if kind != before or low + size >= end:
                yield self.page(served, tier, low, high)
            before = kind

    def page(self, served: Served, tier: str, low: int, high: int) -> Page:
        assert served.match is not None
        return Page(served, tier, Block(self.r, served.stay.use, served.match, low, high), self._memory)

    def _edges_of(self, stay: Stay) -> list[int]:
        if self._edges is None:
            found: set[int] = set()
            for kind, names in EDGES.items():
                for event in self.r.of(kind):
                    found.update(getattr(event, name) for name in names)
                    if isinstance(event, ev.Matched):
                        found.add(event.device + event.host)
                    for step in getattr(event, "path", ()):
                        found.update((step.start, step.end))
            for done in self.r.of(ev.PrefetchDone):
                found.update((done.start, done.start + done.existing, done.start + done.completed))
            for released in self.r.of(ev.Released):
                told = self.r.stay_of.get(released.seq)
                found.add(told.queued.prompt_tokens + released.output_tokens if told is not None else 0)
            self._edges = sorted(found)
        ends = {reach(stay.use, other) for other in self.r.alike(stay.use, self.r.page)}
        return sorted({*self._edges, *ends})

    def _slots_at(self, stay: Stay, low: int) -> object:
        """What happened to the host pages that were read as this position for prompts that begin like this one."""
        found = []
        for other in self.r.alike(stay.use, self.r.page):
            for load in (copy for each in other.stays for copy in each.loads):
                number = load.page_of(low, self.r.page)
                if number is not None:
                    told = self.r.host.get(number, ())
                    found.append(tuple((t.seq, t.position is None or t.position == low) for t in told))
        return found

    def compared(self, stay: Stay, start: int, end: int) -> tuple[Refusal | None, dict[int, bool]]:
        """Pages (by their first token) that were digested at both ends, and whether the digests differ."""
        served = self.served(stay)
        content = Content(served, [self.page(served, "L2", low, low + self.r.page) for low in self._lows(start, end)])
        refused = CONTENT.refusal(content)
        if refused is None:
            seqs = [e.seq for pair in content.pairs for e in pair.events]
            if seqs:
                span = Span(self.r, "L2", stay, min(seqs), max(seqs), LINKS["content"], self.flaws)
                refused = RECORDED.refusal(span)
        return refused, compared(content) if refused is None else {}

    def _lows(self, start: int, end: int) -> range:
        return range(start, end, self.r.page)


class Oracle:
    """Checks claims about a recording: its journals, of the ranks of one server or of several servers."""

    def __init__(self, recording: Sequence[Recorded]) -> None:
        self.journals = [Journal(each) for each in recording]
        members = [Member(each.recorded.name, each.recorded.wall_ns, each.r) for each in self.journals]
        self.ranks = Ranks(members)
        self._of: dict[int, int] = {
            id(stay): at for at, journal in enumerate(self.journals) for stay in journal.r.stays
        }

    @classmethod
    def of(cls, *journals: Sequence[ev.Event]) -> Oracle:
        """Of journals that one thread wrote each."""
        return cls([Recorded([events], f"scheduler-{at}") for at, events in enumerate(journals)])

    def attempts(self, journal: int | None = None) -> Iterator[Stay]:
        """The stay that counts of every use of a request id: the last one. In the order of queueing."""
        for at, each in enumerate(self.journals):
            if journal is None or journal == at:
                yield from (use.stays[-1] for use in each.r.uses if use.stays)

    def refusal(self, stay: Stay, tier: str, start: int, end: int) -> str | None:
        """Why the events do not establish that ``tier`` served ``[start, end)``; None when they do."""
        return self._everywhere(stay, lambda journal, own: journal.refusal(own, tier, start, end))

    def unequal(self, stay: Stay, start: int, end: int, pages: int) -> str | None:
        """Why the events do not establish that ``pages`` pages of ``[start, end)``, read from L2, came back with the
        bytes that went out, and no other page with others; None when they do."""

        def refusal(journal: Journal, own: Stay) -> Refusal | None:
            refused, found = journal.compared(own, start, end)
            if refused is None and any(found.values()):
                return Refusal("bytes_come_back_as_they_went", "a page came back with other bytes", ())
            if refused is None and not 0 < pages <= len(found):
                return Refusal("pages_were_compared", f"{len(found)} pages were digested at both ends", ())
            return refused

        return self._everywhere(stay, refusal)

    def intact(self, stay: Stay, start: int, end: int) -> str | None:
        """Why the events do not establish that a page of the range came back with other bytes; None when they do."""
        why: list[str] = []
        for journal, own in self._counterparts(stay):
            refused, found = journal.compared(own, start, end)
            if refused is None and any(found.values()):
                return None
            why.append(str(refused or "no page differs"))
        return why[0] if why else "the request is not on every rank"

    def weights(self, stay: Stay, start: int, end: int) -> str:
        """Whether the weights that computed ``[start, end)`` are those that the request was served with: ``same``,
        ``other`` or ``unknown``."""
        told = {weights_of(journal.r, own, start, end) for journal, own in self._counterparts(stay)}
        return next(iter(told)) if len(told) == 1 else "unknown"

    def _counterparts(self, stay: Stay) -> list[tuple[Journal, Stay]]:
        at = self._of[id(stay)]
        return [(self.journals[where], own) for where, own in self.ranks.counterparts(at, stay)]

    def _everywhere(self, stay: Stay, refusal: Callable[[Journal, Stay], Refusal | None]) -> str | None:
        at = self._of[id(stay)]
        own = refusal(self.journals[at], stay)
        if own is not None:
            return str(own)
        refused = GROUP.refusal(self.ranks.claim(at, stay))
        if refused is not None:
            return str(refused)
        for journal, other in self._counterparts(stay):
            if other is not stay and (why := refusal(journal, other)) is not None:
                return f"{journal.recorded.name}: {why}"
        return None


def rules() -> Iterator[tuple[str, list[Callable[..., Any]]]]:
    """Every list of rules, and what it is about."""
    yield "the record of one scheduler", list(record_rules.RECORD)
    yield "one stay of a request", list(stay_rules.STAY)
    seen: list[object] = []
    for module in (claim_rules, reading_rules, span_rules, content_rules, group_rules):
        for each in vars(module).values():
            if isinstance(each, Rules) and each not in seen:
                seen.append(each)
                yield each.about, list(each.all)


def listing() -> str:
    """The rules in words."""
    lines: list[str] = []
    for about, told in rules():
        lines += [f"{about[:1].upper()}{about[1:]}", ""]
        for predicate in told:
            words = " ".join((inspect.getdoc(predicate) or "").split())
            lines.append(f"  {predicate.__name__.replace('_', ' ')}: {words}")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", action="store_true", help="print the rules")
    if parser.parse_args().rules:
        print(listing())
    else:
        parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
