"""The ledger from KV events beside the ledger from hooks: the same run, cell of tokens by cell of tokens.

Both name a prefix by the same keyed digest when the events were recorded with the key of the server's data folder.
Where they differ, the difference gets a name; what has no name is left unexplained, and says so.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from kvwitness.collectors.journal import Journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.chains import cell_tokens
from kvwitness.tracer.ledger.facts import InstanceFacts, Moment
from kvwitness.tracer.outside.kv_ledger import Ended, RankLedger, peak_tokens

TOLERANCE_NS: Final = 5_000_000_000
"""Events are published at the end of a scheduler's step, and a prefill on a CPU takes a while."""


class Name(StrEnum):
    """The known differences."""

    BEFORE_RECORDING = "before_recording"
    GAP = "gap"
    LOAD_UNDER_WAY = "load_under_way"
    PUT_BACK_WITHOUT_EVENT = "put_back_without_event"
    REMOVAL_NOT_SENT = "removal_not_sent"
    NO_EVENTS_FOR_TIER = "no_events_for_tier"
    NOT_DIGESTED = "not_digested"
    AFTER_THE_END = "after_the_end"
    NOT_KNOWN_TO_HOOKS = "not_known_to_hooks"
    UNEXPLAINED = "unexplained"


EXPLANATION: Final[dict[Name, str]] = {
    Name.BEFORE_RECORDING: "it began before the KV events were recorded, or before the journal",
    Name.GAP: "messages of the KV events are missing around it",
    Name.LOAD_UNDER_WAY: "KV events count a load-back as in L1 when it is queued, the hooks when it has completed",
    Name.PUT_BACK_WITHOUT_EVENT: (
        "a request computed again what had left L1, and the tree took its KV back: this tree sends no event for that"
    ),
    Name.REMOVAL_NOT_SENT: (
        "this release does not tell of every block that leaves this tier: by its events the tier holds more than it can"
    ),
    Name.NO_EVENTS_FOR_TIER: "this release sends no events for this tier",
    Name.NOT_DIGESTED: "generated tokens, or a request of the server itself: the hooks digest prompts",
    Name.AFTER_THE_END: "it lies after the last message of the KV events, or after the last event of the journal",
    Name.NOT_KNOWN_TO_HOOKS: "the hooks did not see how it came about, and claim no residency",
    Name.UNEXPLAINED: "not explained",
}


class Difference(msgspec.Struct, frozen=True):
    """Stays of one tier that only one of the two knows."""

    tier: str
    only: str
    """``hooks`` or ``kv events``."""
    name: Name
    stays: int
    explanation: str
    example: str


class TierAgreement(msgspec.Struct, frozen=True):
    """One tier. A stay is one cell in the tier, from its coming to its leaving."""

    tier: str
    stays: int
    """Stays that both have."""
    open_in_both: int
    """Of these: still there at the end."""
    resident_hooks: int
    """Cells that are there at the end, of those that both can name."""
    resident_kv: int
    came_ms: float | None
    """Median and ..."""
    came_max_ms: float | None
    """... largest difference of the times of coming; positive: the KV events are later."""
    left_ms: float | None
    left_max_ms: float | None


class Agreement(msgspec.Struct, frozen=True):
    """Two ledgers of one instance."""

    instance: str
    rank: int
    cell_tokens: int
    cells: int
    """Cells that both can name."""
    tiers: tuple[TierAgreement, ...]
    differences: tuple[Difference, ...]

    @property
    def agree(self) -> bool:
        """No difference is without a name."""
        return bool(self.cells) and all(one.name is not Name.UNEXPLAINED for one in self.differences)

    @property
    def sentence(self) -> str:
        if not self.cells:
            return "not comparable: no prefix is named in both (recorded with another key, or no requests)"
        both = " and ".join(f"{tier.stays} stays in {tier.tier}" for tier in self.tiers)
        if not self.differences:
            return f"KV events and hooks agree: {both}"
        named = ", ".join(f"{one.stays} {one.only} only in {one.tier} ({one.name})" for one in self.differences)
        return f"KV events and hooks {'agree' if self.agree else 'DISAGREE'} on {both}; {named}"


class _Stay(msgspec.Struct, frozen=True):
    """A cell in a tier by one of the ledgers. ``until``: None while it lasts."""

    since: int
    until: int | None
    how: str = ""
    """Kind of the event it began with (hooks), or how it ended (KV events)."""


_Stays = dict[str, list[_Stay]]
_Cells = dict[tuple[str, int], tuple[str, ...]]


def compare(journal: Journal, facts: InstanceFacts, ledger: RankLedger) -> Agreement:
    """Compare one scheduler's journal with the KV events of its rank."""
    known = _cells_of_requests(journal)
    hooks = {tier: _stays_by_hooks(facts, known, tier) for tier in ("L1", "L2")}
    events = {tier: _stays_by_events(ledger, tier) for tier in ("L1", "L2")}
    digested = frozenset(cell for cells in known.values() for cell in cells)
    both = digested & ledger.cells.keys()
    tiers: list[TierAgreement] = []
    differences: list[Difference] = []
    context = _Context(facts, ledger, digested)
    for tier in ("L1", "L2"):
        pairs, mine, theirs = _match(hooks[tier], events[tier])
        tiers.append(_tier(tier, pairs, hooks[tier], events[tier], both))
        differences += context.name(tier, hooks[tier], mine, theirs)
    return Agreement(facts.instance, ledger.rank, ledger.cell_tokens, len(both), tuple(tiers), tuple(differences))


def _cells_of_requests(journal: Journal) -> _Cells:
    """The digests of each prompt's cells, by the request's id and the event that queued it: ids are used again."""
    texts: dict[int, str] = {}
    queued: dict[str, int] = {}
    found: dict[tuple[str, int], list[str]] = {}
    for event in journal.events:
        if isinstance(event, ev.Text):
            texts[event.id] = event.text
        elif isinstance(event, ev.Queued | ev.WaitingAtAttach) and event.req in texts and not event.retracted:
            queued[texts[event.req]] = event.seq
        elif isinstance(event, ev.PrefixDigests) and event.req in texts:
            rid = texts[event.req]
            cells = found.setdefault((rid, queued.get(rid, 0)), [])
            del cells[event.first_cell :]
            cells.extend(digest.hex() for digest in event.digests)
    return {request: tuple(cells) for request, cells in found.items()}


def _grid(facts: InstanceFacts) -> int:
    return cell_tokens(max(facts.facts.instance.page_size or 1, 1))


def _stays_by_hooks(facts: InstanceFacts, known: _Cells, tier: str) -> _Stays:
    grid = _grid(facts)
    parts: dict[str, list[tuple[int, int, _Stay]]] = defaultdict(list)
    for stay in facts.residencies:
        if stay.tier != tier or stay.owner is None:
            continue
        cells = known.get((stay.owner, stay.owner_since), ())
        one = _Stay(_wall(facts, stay.since), None if stay.until is None else _wall(facts, stay.until), stay.since.kind)
        for index in range(stay.start // grid, min(-(-stay.end // grid), len(cells))):
            begin, end = max(stay.start - index * grid, 0), min(stay.end - index * grid, grid)
            parts[cells[index]].append((begin, end, one))
    return {cell: found for cell, some in parts.items() if (found := list(_whole(some, grid)))}


def _whole(parts: Sequence[tuple[int, int, _Stay]], grid: int) -> Iterator[_Stay]:
    """The times in which all of a cell is there: one node holds it, or several of them together."""
    full = [stay for begin, end, stay in parts if (begin, end) == (0, grid)]
    yield from sorted(full, key=lambda stay: stay.since)
    rest = [part for part in parts if (part[0], part[1]) != (0, grid)]
    firsts = [part for part in rest if part[0] == 0]
    for _, end, stay in sorted(firsts, key=lambda part: part[2].since):
        since, until, reached, how = stay.since, stay.until, end, stay.how
        while reached < grid:
            follow = [p for p in rest if p[0] == reached and _overlap(p[2], _Stay(since, until))]
            if not follow:
                break
            _, reached, more = min(follow, key=lambda part: part[2].since)
            since, how = max((since, how), (more.since, more.how))
            until = min((u for u in (until, more.until) if u is not None), default=None)
        if reached >= grid:
            yield _Stay(since, until, how)


def _stays_by_events(ledger: RankLedger, tier: str) -> _Stays:
    by_block: dict[str, list[_Stay]] = defaultdict(list)
    for stay in ledger.stays:
        if stay.tier == tier:
            by_block[stay.block].append(_Stay(stay.since_ns, stay.until_ns, stay.ended))
    found: _Stays = {}
    for cell, blocks in ledger.cells.items():
        common = by_block.get(blocks[0], [])
        for block in blocks[1:]:
            common = [joined for a in common for b in by_block.get(block, ()) if (joined := _joined(a, b)) is not None]
        if common:
            found[cell] = sorted(common, key=lambda stay: stay.since)
    return found


def _joined(a: _Stay, b: _Stay) -> _Stay | None:
    if not _overlap(a, b):
        return None
    ends = [stay for stay in (a, b) if stay.until is not None]
    end = min(ends, key=lambda stay: stay.until or 0) if ends else a
    return _Stay(max(a.since, b.since), end.until, end.how)


def _overlap(a: _Stay, b: _Stay) -> bool:
    return (b.until is None or a.since <= b.until) and (a.until is None or b.since <= a.until)


def _wall(facts: InstanceFacts, moment: Moment) -> int:
    return facts.wall_time_ns(moment.t_ns)


_Left = list[tuple[str, _Stay]]


def _match(mine: _Stays, theirs: _Stays) -> tuple[list[tuple[_Stay, _Stay]], _Left, _Left]:
    """Pairs of stays that are one and the same, and what is left on each side."""
    pairs: list[tuple[_Stay, _Stay]] = []
    only_mine: _Left = []
    only_theirs: _Left = []
    # Sorted: the same evidence gives the same bytes, whatever the order of a set is.
    for cell in sorted(mine.keys() | theirs.keys()):
        waiting = list(theirs.get(cell, ()))
        in_order = list(zip(mine.get(cell, ()), waiting, strict=False))
        if len(mine.get(cell, ())) == len(waiting) and all(_overlap(a, b) and _end_alike(a, b) for a, b in in_order):
            # However long the scheduler took to publish: as many stays, each at the same time as its counterpart.
            pairs += in_order
            continue
        for stay in mine.get(cell, ()):
            near = [other for other in waiting if _same(stay, other)]
            if near:
                best = min(near, key=lambda other: abs(other.since - stay.since))
                waiting.remove(best)
                pairs.append((stay, best))
            else:
                only_mine.append((cell, stay))
        only_theirs.extend((cell, stay) for stay in waiting)
    return pairs, only_mine, only_theirs


def _same(a: _Stay, b: _Stay) -> bool:
    """Whether two stays can be one: they come and go at about the same time."""
    if abs(a.since - b.since) > TOLERANCE_NS:
        return False
    if a.until is None or b.until is None:
        return _end_alike(a, b)
    return abs(a.until - b.until) <= TOLERANCE_NS


def _end_alike(a: _Stay, b: _Stay) -> bool:
    """Whether both last, or both have ended; behind a gap nobody knows."""
    return (a.until is None) is (b.until is None) or b.how == Ended.GAP


def _tier(
    tier: str, pairs: Sequence[tuple[_Stay, _Stay]], mine: _Stays, theirs: _Stays, both: frozenset[str]
) -> TierAgreement:
    came = [(b.since - a.since) / 1e6 for a, b in pairs]
    left = [(b.until - a.until) / 1e6 for a, b in pairs if a.until is not None and b.until is not None]
    return TierAgreement(
        tier,
        len(pairs),
        sum(a.until is None and b.until is None for a, b in pairs),
        sum(any(stay.until is None for stay in mine.get(cell, ())) for cell in both),
        sum(any(stay.until is None for stay in theirs.get(cell, ())) for cell in both),
        _rounded(statistics.median(came) if came else None),
        _rounded(max(came, key=abs, default=None)),
        _rounded(statistics.median(left) if left else None),
        _rounded(max(left, key=abs, default=None)),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


class _Context:
    """What is needed to name a difference."""

    def __init__(self, facts: InstanceFacts, ledger: RankLedger, digested: frozenset[str]) -> None:
        self._facts = facts
        self._ledger = ledger
        self._digested = digested
        last = max((m.t_ns for e in facts.epochs for m in (e.begin,)), default=0)
        ends = [r.released.t_ns for r in facts.requests if r.released is not None]
        self._journal_end = facts.wall_time_ns(max([last, *ends], default=0))
        pool = facts.facts.instance.device_tokens
        # 0.5.10 tells of L1 alone, and only of what leaves L1 and L2 both.
        self._tiers = frozenset(stay.tier for stay in ledger.stays)
        self._removed_from = frozenset(stay.tier for stay in ledger.stays if stay.ended is Ended.REMOVED)
        self._l1_alone = "L2" not in self._tiers
        self._overfull = self._l1_alone and pool is not None and peak_tokens(ledger) > pool
        self._hiradix = "HiRadix" in (facts.facts.instance.tree_class or "")

    def name(self, tier: str, hooks: _Stays, mine: _Left, theirs: _Left) -> list[Difference]:
        """The differences of one tier, grouped by name."""
        found: dict[tuple[str, Name], list[tuple[str, _Stay]]] = defaultdict(list)
        lonely = defaultdict(list)
        for cell, stay in theirs:
            lonely[cell].append(stay)
        for cell, stay in mine:
            found["hooks", self._of_hooks(tier, cell, stay, hooks, lonely[cell])].append((cell, stay))
        for cell, stay in theirs:
            found["kv events", self._of_events(tier, cell, stay, hooks)].append((cell, stay))
        return [
            Difference(tier, only, name, len(some), EXPLANATION[name], _example(*some[0]))
            for (only, name), some in sorted(found.items())
        ]

    def _of_hooks(self, tier: str, cell: str, stay: _Stay, hooks: _Stays, lonely: Sequence[_Stay]) -> Name:
        ledger = self._ledger
        if tier not in self._tiers:
            return Name.NO_EVENTS_FOR_TIER
        if ledger.begin_ns is None or stay.since < ledger.begin_ns - TOLERANCE_NS:
            return Name.BEFORE_RECORDING
        if self._near_gap(stay):
            return Name.GAP
        if tier == "L1" and self._overfull:
            return Name.REMOVAL_NOT_SENT
        if ledger.end_ns is not None and stay.since > ledger.end_ns:
            return Name.AFTER_THE_END
        if stay.how == "LoadDone" and any(one.since <= stay.since for one in lonely):
            return Name.LOAD_UNDER_WAY
        before = [one for one in hooks.get(cell, ()) if one.until is not None and one.until <= stay.since]
        if self._no_removals(tier) and any(one.until is None for one in lonely):
            return Name.REMOVAL_NOT_SENT
        if tier == "L1" and stay.how == "Inserted" and before and self._hiradix:
            return Name.PUT_BACK_WITHOUT_EVENT
        if self._no_removals(tier):
            return Name.REMOVAL_NOT_SENT
        return Name.UNEXPLAINED

    def _of_events(self, tier: str, cell: str, stay: _Stay, hooks: _Stays) -> Name:
        if stay.since < self._facts.wall_ns:
            return Name.BEFORE_RECORDING
        if stay.since > self._journal_end + TOLERANCE_NS:
            return Name.AFTER_THE_END
        if cell not in self._digested:
            return Name.NOT_DIGESTED
        if self._near_gap(stay):
            return Name.GAP
        if (tier == "L1" and self._overfull) or (self._no_removals(tier) and stay.until is None):
            return Name.REMOVAL_NOT_SENT
        mine = hooks.get(cell, ())
        if tier == "L1" and any(one.how == "LoadDone" and one.since >= stay.since for one in mine):
            return Name.LOAD_UNDER_WAY
        return Name.UNEXPLAINED if mine else Name.NOT_KNOWN_TO_HOOKS

    def _no_removals(self, tier: str) -> bool:
        return self._l1_alone and tier not in self._removed_from

    def _near_gap(self, stay: _Stay) -> bool:
        end = stay.until if stay.until is not None else 1 << 63
        return any(stay.since - TOLERANCE_NS <= at <= end + TOLERANCE_NS for at in self._ledger.gap_times)


def _example(cell: str, stay: _Stay) -> str:
    until = "still there" if stay.until is None else f"{(stay.until - stay.since) / 1e9:.3f} s"
    return f"cell {cell}, from {stay.since} ns, {until}{f', {stay.how}' if stay.how else ''}"


def summed(agreements: Sequence[Agreement]) -> Counter[str]:
    """Differences by name over all instances."""
    return Counter(one.name for agreement in agreements for one in agreement.differences)
