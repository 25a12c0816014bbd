"""What the relations of a journal are between: requests, stays, copies, prefetches, found nodes, evictions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvwitness.patches.schema import events as ev

E = TypeVar("E", bound=ev.Event)


@dataclass(eq=False)
class Use:
    """One use of a request id, over its retractions (or a node that was found at attach): one sequence of tokens."""

    rid: str
    grid: int = 0
    cells: list[int] = field(default_factory=list)
    """Cell ``i`` stands for the first ``(i + 1) * grid`` tokens: equal numbers, equal digests up to there."""
    points: dict[int, int] = field(default_factory=dict)
    """The same for prefixes that end elsewhere, by where."""
    digests: list[bytes] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    told: list[ev.PrefixDigests | ev.PrefixPoint] = field(default_factory=list)
    inserts: list[ev.Inserted] = field(default_factory=list)
    steps: list[tuple[int, ev.PathNode]] = field(default_factory=list)
    """Every node that a path of it went through, and when."""
    wrong: str = ""
    """Why its digests say nothing."""
    later: tuple[int, str] | None = None
    """The first event behind its prompt that told other digests, or of another grid, and why that says nothing."""

    @property
    def first(self) -> Stay:
        return self.stays[0]


@dataclass(eq=False)
class Stay:
    """One stay of a request: queued, and its own events until it is queued again."""

    use: Use
    queued: ev.Queued | ev.WaitingAtAttach
    events: list[ev.Event] = field(default_factory=list)
    before: Stay | None = None
    """The stay of the same id that came before, and the one that comes next."""
    after: Stay | None = None
    loads: list[Copy] = field(default_factory=list)
    _of: dict[type[ev.Event], list[Any]] | None = None

    def of(self, kind: type[E]) -> list[E]:
        """Its events of a kind, in order."""
        if self._of is None:
            self._of = defaultdict(list)
            for event in self.events:
                self._of[type(event)].append(event)
        return self._of.get(kind, [])

    @property
    def released(self) -> ev.Released | None:
        return next(iter(self.of(ev.Released)), None)

    @property
    def over(self) -> bool:
        return bool(self.of(ev.Released) or self.of(ev.AbortedInQueue))


@dataclass(eq=False)
class Copy:
    """Host slots that were written by a backup or read by a load-back: queued, launched, acknowledged."""

    queued: ev.BackupQueued | ev.LoadQueued
    stay: Stay | None
    pages: list[int]
    """The host page of each page of tokens, from ``queued.start`` on."""
    launch: Launch | None = None
    acks: list[ev.BackupAcked | ev.LoadDone] = field(default_factory=list)
    premature: ev.BackupAcked | None = None
    """Its acknowledgement before it was launched."""

    @property
    def ended(self) -> ev.BackupAcked | ev.LoadDone | None:
        return self.acks[0] if self.acks else None

    def page_of(self, position: int, page: int) -> int | None:
        at, rest = divmod(position - self.queued.start, page)
        return self.pages[at] if not rest and 0 <= at < len(self.pages) else None


@dataclass(eq=False)
class Launch:
    """A transfer, what was queued since the last one in its direction, and what it had to take up of before attach."""

    event: ev.TransferStarted
    copies: list[Copy]
    unseen: list[ev.InFlight]
    since: int


@dataclass(eq=False)
class Fetch:
    """What a prefetch from storage put into host slots, and for which stay."""

    done: ev.PrefetchDone
    stay: Stay | None
    pages: list[int]
    """Host pages, from ``done.start`` on."""
    asked: ev.PrefetchAsked | None
    looked_up: ev.StorageLookedUp | None
    """The last look-up since the prefetch before had ended."""
    ends: int
    """How many prefetches of the stay had ended since it was asked for."""
    failed: ev.StorageFailed | None

    def page_of(self, position: int, page: int) -> int | None:
        at, rest = divmod(position - self.done.start, page)
        skip = self.done.existing // page
        return self.pages[at] if not rest and skip <= at < len(self.pages) else None


@dataclass(eq=False)
class Found:
    """A node that was there when the recorder was attached, and its prefix."""

    event: ev.ResidentNode
    use: Use
    pages: list[int]
    digests: ev.ResidentDigests | None
    parent: Found | None
    looking: bool
    """Between the beginning and the end of a snapshot."""
    wrong: str = ""

    def page_of(self, position: int, page: int) -> int | None:
        at, rest = divmod(position - self.event.start, page)
        return self.pages[at] if not rest and 0 <= at < len(self.pages) else None


@dataclass(eq=False, slots=True)
class Touch:
    """Something happened to a host page: ``alloc``, ``free``, ``write`` (a backup, or storage); or it was found."""

    seq: int
    what: str
    source: Copy | Fetch | Found | None
    position: int | None
    """Of the page of tokens that it holds since."""


@dataclass(eq=False)
class Call:
    """One L1 eviction and its victims."""

    begin: ev.EvictBegin
    victims: list[ev.EvictedL1] = field(default_factory=list)
    end: ev.EvictEnd | None = None


@dataclass(eq=False)
class Snapshot:
    """One look at what is there, when the recorder was attached."""

    begin: ev.SnapshotBegin
    nodes: list[Found] = field(default_factory=list)
    under_way: list[ev.InFlight] = field(default_factory=list)
    end: ev.SnapshotEnd | None = None


@dataclass(slots=True)
class Sighting:
    """A path of ``use`` went through a node at event ``seq``."""

    seq: int
    use: Use
    step: ev.PathNode


def agree(a: Use, b: Use, position: int) -> bool | None:
    """Are the first ``position`` tokens of two sequences equal? None: the digests do not say."""
    if a is b:
        return True
    if not a.grid or a.grid != b.grid or a.wrong or b.wrong:
        return None
    cell, rest = divmod(position, a.grid)
    known = min(len(a.cells), len(b.cells))
    if cell <= known and not rest:
        return not cell or a.cells[cell - 1] == b.cells[cell - 1]
    common = min(cell, known)
    if common and a.cells[common - 1] != b.cells[common - 1]:
        return False
    if cell < known and a.cells[cell] == b.cells[cell]:
        return True
    for at, digest in a.points.items():
        if at in b.points:
            if at >= position and digest == b.points[at]:
                return True
            if at <= position and digest != b.points[at]:
                return False
    return None


def reach(a: Use, b: Use) -> int:
    """The last whole cell up to which the digests show two sequences to be equal."""
    if a is b:
        return len(a.cells) * a.grid
    if not a.grid or a.grid != b.grid or a.wrong or b.wrong:
        return 0
    low, high = 0, min(len(a.cells), len(b.cells))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a.cells[middle - 1] == b.cells[middle - 1] else (low, middle - 1)
    return low * a.grid
