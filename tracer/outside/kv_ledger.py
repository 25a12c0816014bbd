"""Residency by KV events alone: which block was in which tier, from when to when, as far as the server told.

The events say that a block was stored in a medium or removed from it. They name no request, say nothing about
copies, and a release may leave some out. What is missing is listed, and residency is not taken from a witness that
is known to be incomplete.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from kvwitness.collectors.kv_events import KvDamaged, KvGap, KvLine, KvMessage, KvRestart
from kvwitness.collectors.kv_wire import KvEvent, KvKind

TIERS: Final[Mapping[str | None, str]] = {"GPU": "L1", "CPU_PINNED": "L2", "DISK": "L3", "EXTERNAL": "L3"}
"""By medium. An event that tells no medium is of no tier."""


_FIRST_EVENTS: Final = (0, 5, 10)
"""Before this release there are no block events with HiCache on."""


class Ended(StrEnum):
    """What ended a stay."""

    REMOVED = "removed"
    CLEARED = "cleared"
    RESTART = "restart"
    GAP = "gap"
    """Messages are missing: whether it was removed in them is not known."""
    OPEN = "open"
    """It was there at the last message."""


class Stay(msgspec.Struct, frozen=True):
    """A block in a tier. Times are ns since the epoch by the server's clock, numbers those of the messages."""

    tier: str
    block: str
    since_ns: int
    since_seq: int
    until_ns: int | None
    ended: Ended
    tokens: int = 0


class RankLedger(msgspec.Struct, frozen=True):
    """All that one dp rank's events say. ``cells``: digest of a prefix -> the blocks that make up its last cell."""

    rank: int
    stays: tuple[Stay, ...]
    cells: dict[str, tuple[str, ...]]
    cell_tokens: int
    events: dict[str, int]
    """Events by kind and medium, ``stored GPU`` for example."""
    blocks: dict[str, int]
    """Blocks in them."""
    begin_ns: int | None
    end_ns: int | None
    gaps: tuple[str, ...]
    """Why residency is not known throughout, in words."""
    gap_times: tuple[int, ...]
    restarts: int
    unmatched: int
    """Blocks that were removed from a tier in which they were not known to be."""

    def came(self, tier: str, from_ns: int, to_ns: int) -> int:
        """Tokens that came into a tier between two moments."""
        return sum(stay.tokens for stay in self.stays if stay.tier == tier and from_ns <= stay.since_ns <= to_ns)

    def left(self, tier: str, from_ns: int, to_ns: int) -> int:
        """Tokens that were removed from a tier between two moments."""
        gone = (stay for stay in self.stays if stay.tier == tier and stay.ended is Ended.REMOVED)
        return sum(stay.tokens for stay in gone if stay.until_ns is not None and from_ns <= stay.until_ns <= to_ns)

    def resident(self, tier: str) -> frozenset[str]:
        """The cells that a tier held at the last message: all their blocks."""
        here = {stay.block for stay in self.stays if stay.tier == tier and stay.ended is Ended.OPEN}
        return frozenset(cell for cell, blocks in self.cells.items() if here.issuperset(blocks))


@dataclass(slots=True)
class _Rank:
    number: int
    open: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """(tier, block) -> since when, by which message."""
    stays: list[Stay] = field(default_factory=list)
    cells: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parents: dict[str, str | None] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    cell_tokens: int = 0
    events: Counter[str] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)
    begin_ns: int | None = None
    end_ns: int | None = None
    gaps: list[str] = field(default_factory=list)
    gap_times: list[int] = field(default_factory=list)
    restarts: int = 0
    unmatched: int = 0

    def message(self, line: KvMessage) -> None:
        at, seq = line.batch.at_ns, line.seq
        self.begin_ns = at if self.begin_ns is None else self.begin_ns
        self.end_ns = at
        for event in line.batch.events:
            name = f"{event.kind} {event.medium}" if event.medium else event.kind.value
            self.events[name] += 1
            self.blocks[name] += len(event.blocks)
            tier = TIERS.get(event.medium)
            if event.kind is KvKind.STORED:
                self._known(event)
                self._stored(event, tier, at, seq)
            elif event.kind is KvKind.REMOVED:
                self._removed(event, tier, at)
            elif event.kind is KvKind.CLEARED:
                self._end(at, Ended.CLEARED)
            else:
                self.broken(at, f"message {seq} has an event of a kind that this version does not know")

    def _known(self, event: KvEvent) -> None:
        above = event.parent
        for index, block in enumerate(event.blocks):
            self.parents[block], self.sizes[block] = above, event.block_size
            above = block
            cell = event.cells[index] if index < len(event.cells) else ""
            if cell:
                self.cells[cell] = self._cell(block, event)

    def _cell(self, block: str, event: KvEvent) -> tuple[str, ...]:
        """The blocks of the cell that ends with ``block``: one, or the last so many where blocks are shorter."""
        count = -(-16 // event.block_size)
        self.cell_tokens = count * event.block_size
        found: deque[str] = deque()
        at: str | None = block
        while at is not None and len(found) < count:
            found.appendleft(at)
            at = self.parents.get(at)
        return tuple(found)

    def _stored(self, event: KvEvent, tier: str | None, at: int, seq: int) -> None:
        if tier is None:
            return
        for block in event.blocks:
            if (tier, block) not in self.open:
                self.open[(tier, block)] = (at, seq)

    def _removed(self, event: KvEvent, tier: str | None, at: int) -> None:
        if tier is None:
            return
        for block in event.blocks:
            since = self.open.pop((tier, block), None)
            if since is None:
                self.unmatched += 1
                continue
            self.stays.append(Stay(tier, block, *since, at, Ended.REMOVED, self.sizes.get(block, 0)))

    def _end(self, at: int | None, why: Ended) -> None:
        sizes = self.sizes
        ended = (Stay(t, block, *since, at, why, sizes.get(block, 0)) for (t, block), since in self.open.items())
        self.stays.extend(ended)
        self.open.clear()

    def broken(self, at: int, why: str) -> None:
        """Something was missed: what was resident is not known to be resident any more."""
        self.gaps.append(why)
        self.gap_times.append(at)
        self._end(at, Ended.GAP)

    def restart(self, line: KvRestart) -> None:
        self.restarts += 1
        self.gaps.append(f"the server was restarted: {line.cause}")
        self.gap_times.append(line.got_ns)
        self._end(line.got_ns, Ended.RESTART)

    def freeze(self) -> RankLedger:
        self._end(None, Ended.OPEN)
        return RankLedger(
            self.number,
            tuple(self.stays),
            self.cells,
            self.cell_tokens,
            dict(self.events),
            dict(self.blocks),
            self.begin_ns,
            self.end_ns,
            tuple(self.gaps),
            tuple(self.gap_times),
            self.restarts,
            self.unmatched,
        )


def kv_ledger(lines: Iterable[KvLine]) -> tuple[RankLedger, ...]:
    """The ledgers of all dp ranks, by rank."""
    ranks: dict[int, _Rank] = {}
    for line in lines:
        rank = ranks.setdefault(line.rank, _Rank(line.rank))
        match line:
            case KvMessage():
                rank.message(line)
            case KvGap(first=first, last=last, cause=cause):
                rank.broken(line.got_ns, f"messages {first} to {last}: {cause}")
            case KvDamaged(seq=seq, cause=cause):
                rank.broken(line.got_ns, f"message {seq} cannot be read: {cause}")
            case KvRestart():
                rank.restart(line)
    return tuple(ranks[number].freeze() for number in sorted(ranks))


class KvFacts(msgspec.Struct, frozen=True):
    """What other witnesses say of the same time; None: not known."""

    served: bool | None = None
    """Requests were served."""
    device_tokens: int | None = None
    """Size of L1."""
    evicted: float | None = None
    backed_up: float | None = None
    version: str | None = None


def incomplete(ledger: RankLedger | None, facts: KvFacts) -> tuple[str, ...]:
    """Why residency must not be taken from these events; empty when nothing speaks against it."""
    return tuple(_incomplete(ledger, facts))


def _incomplete(ledger: RankLedger | None, facts: KvFacts) -> Iterator[str]:
    release = f"SGLang {facts.version}" if facts.version else "this release"
    stored = ledger is not None and any(name.startswith(KvKind.STORED) for name in ledger.events)
    if not stored or ledger is None:
        if facts.served:
            yield f"requests were served and no block event came: {_why_none(release, facts.version)}"
        return
    yield from ledger.gaps
    removed = any(name.startswith(KvKind.REMOVED) for name in ledger.events)
    if not removed and facts.evicted:
        yield f"the server counted {facts.evicted:.0f} evicted tokens and no removed event came: {release} sends none"
    if not any(name.endswith("CPU_PINNED") for name in ledger.events) and facts.backed_up:
        yield f"the server counted {facts.backed_up:.0f} tokens copied to L2 and no event tells of L2"
    peak = peak_tokens(ledger)
    if facts.device_tokens is not None and peak > facts.device_tokens:
        yield f"by these events L1 held {peak} tokens, and it has room for {facts.device_tokens}"


def _why_none(release: str, version: str | None) -> str:
    numbers = tuple(int(part) for part in (version or "").split(".")[:3] if part.isdigit())
    if len(numbers) == 3 and numbers < _FIRST_EVENTS:
        return f"{release} sends none with HiCache on"
    return "nothing was stored, or they are published elsewhere"


def peak_tokens(ledger: RankLedger) -> int:
    """The most tokens that the events ever leave in L1 at once."""
    steps = [(stay.since_ns, stay.tokens) for stay in ledger.stays if stay.tier == "L1"]
    steps += [(stay.until_ns, -stay.tokens) for stay in ledger.stays if stay.tier == "L1" and stay.until_ns is not None]
    level = peak = 0
    for _, step in sorted(steps):
        level += step
        peak = max(peak, level)
    return peak
