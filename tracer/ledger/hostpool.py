"""L2 as the ledger sees it: which host slot holds which position of whose prefix, since when, until when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvwitness.patches.schema.events import Run
from kvwitness.tracer.ledger.chains import Chain, same_prefix, shared_prefix
from kvwitness.tracer.ledger.facts import LoadSegment, Moment, Residency

_MOST: Final = 1 << 28
"""Slots that no event names at once: a host pool of so many would hold terabytes."""


@dataclass(slots=True)
class Content:
    """What was written into consecutive slots by one backup or prefetch, or found there."""

    origin: str
    id: int
    epoch: int
    chain: Chain | None
    node: int
    start: int
    end: int
    usable: Moment | None = None
    """The acknowledgement; until then nothing may be read from these slots."""


def pages(runs: Iterable[Run], page: int) -> Iterator[int]:
    """Page numbers of host slot runs, in order."""
    for run in runs:
        yield from range(run.start // page, (run.start + run.length + page - 1) // page)


class HostView:
    """The anchor host pool of the current epoch, page by page."""

    def __init__(self, page: int, close: Callable[[Residency], None], available: int | None = None) -> None:
        self.page = max(page, 1)
        self._close = close
        self._held: dict[int, tuple[Content, int]] = {}
        """Page number -> content and the token position of the page's first slot."""
        self._fresh: dict[int, int] = {}
        """Pages that were allocated and not written since, and the number of the request that took them."""
        self._free: set[int] = set()
        """Pages that were given back and not taken since."""
        self.available = available
        """The pool's own count of free slots, as last recorded. It goes on over resets of the tree."""

    # --- consistency ---------------------------------------------------------------------------------

    def miscounted(self, available: int, change: int) -> str | None:
        """Whether the pool's own count of free slots does not follow from the events; in words."""
        expected = None if self.available is None else self.available + change
        if expected is None or expected == available:
            return None
        return f"the host pool has {available} free slots where the events say {expected}"

    @property
    def in_use(self) -> int:
        """Slots that are taken, by the events."""
        return (len(self._held) + len(self._fresh)) * self.page

    def count(self, available: int) -> None:
        """The pool's own count of free slots."""
        self.available = available

    def taken_twice(self, runs: tuple[Run, ...]) -> bool:
        """Whether slots are in use, by the events, that the pool is said to give away."""
        return self.whole(runs) and any(p in self._held or p in self._fresh for p in pages(runs, self.page))

    def given_back_twice(self, runs: tuple[Run, ...]) -> bool:
        """Whether slots are free, by the events, that are said to be given back."""
        return self.whole(runs) and any(page in self._free for page in pages(runs, self.page))

    def whole(self, runs: tuple[Run, ...]) -> bool:
        """Whether slots are whole pages, as the pool gives them out, each once, and no more than it can have."""
        page, total, end = self.page, 0, 0
        for start, length in sorted(runs):
            if start < end or length < 1 or start % page or length % page:
                return False
            end = start + length
            total += length
        return total <= _MOST

    def beyond(self, runs: tuple[Run, ...], size: int | None) -> bool:
        """Whether slots lie outside a pool of ``size`` slots."""
        return size is not None and any(run.start < 0 or run.start + run.length > size for run in runs)

    def unwritten(self, runs: tuple[Run, ...], req: int) -> bool:
        """Whether slots were allocated for a request (0: for none), and nothing was written to them since."""
        return self.whole(runs) and all(self._fresh.get(page) == req for page in pages(runs, self.page))

    def holds(self, runs: tuple[Run, ...], start: int) -> bool:
        """Whether slots hold what was written for the positions from ``start`` on."""
        if not self.whole(runs):
            return False
        for place, page in enumerate(pages(runs, self.page)):
            held = self._held.get(page)
            if held is None or held[1] != start + place * self.page:
                return False
        return True

    # --- content -------------------------------------------------------------------------------------

    def taken(self, runs: tuple[Run, ...], req: int) -> None:
        """Slots were allocated for a request: whatever the ledger held of them is void until something is written."""
        if not self.whole(runs):
            return
        for page in pages(runs, self.page):
            self._held.pop(page, None)
            self._free.discard(page)
            self._fresh[page] = req

    def written(self, runs: tuple[Run, ...], content: Content) -> None:
        """Slots now hold ``content`` from its start on.

        Only whole pages that were allocated and not written since can hold it: what else is written to is not
        known from then on.
        """
        position = content.start
        sound = self.whole(runs) and sum(run.length for run in runs) == content.end - content.start
        for page in pages(runs, self.page) if self.whole(runs) else ():
            if sound and page in self._fresh:
                del self._fresh[page]
                self._held[page] = (content, position)
            else:
                sound = False
                self._held.pop(page, None)
            position += self.page

    def contested(self, runs: tuple[Run, ...], content: Content) -> bool:
        """Whether slots cannot have been found with this: they do not add up, are free, or hold other positions.

        What events say of a page since the attaching stands.
        """
        if not self.whole(runs) or sum(run.length for run in runs) != content.end - content.start:
            return True
        for place, page in enumerate(pages(runs, self.page)):
            if page in self._fresh or page in self._free:
                return True
            held = self._held.get(page)
            if held is not None and held[1] != content.start + place * self.page:
                return True
            if held is not None and held[0].origin == "snapshot":
                return True
        return False

    def found(self, runs: tuple[Run, ...], content: Content) -> None:
        """Slots were seen to hold ``content`` already."""
        for place, page in enumerate(pages(runs, self.page)):
            self._held.setdefault(page, (content, content.start + place * self.page))

    def freed(self, runs: tuple[Run, ...], moment: Moment) -> None:
        """Slots were given back: what they held has left L2."""
        lost: dict[int, list[int]] = {}
        contents: dict[int, Content] = {}
        slots: dict[int, list[int]] = {}
        for page in pages(runs, self.page) if self.whole(runs) else ():
            self._fresh.pop(page, None)
            self._free.add(page)
            held = self._held.pop(page, None)
            if held is not None:
                content, position = held
                contents[id(content)] = content
                lost.setdefault(id(content), []).append(position)
                slots.setdefault(id(content), []).append(page)
        for key, positions in lost.items():
            for residency in self._stretches(contents[key], positions, slots[key], moment):
                self._close(residency)

    def _stretches(
        self, content: Content, positions: list[int], held: list[int], until: Moment | None
    ) -> Iterator[Residency]:
        """The residency of the given pages of a content, one record per consecutive stretch."""
        if content.usable is None:
            return
        order = sorted(range(len(positions)), key=positions.__getitem__)
        begin = 0
        for i in range(1, len(order) + 1):
            if i < len(order) and positions[order[i]] == positions[order[i - 1]] + self.page:
                continue
            stretch = order[begin:i]
            begin = i
            yield Residency(
                tier="L2",
                epoch=content.epoch,
                owner=content.chain.rid if content.chain else None,
                node=content.node,
                start=positions[stretch[0]],
                end=min(positions[stretch[-1]] + self.page, content.end),
                since=content.usable,
                until=until,
                backup=content.id if content.origin == "backup" else None,
                slots=_runs([held[k] for k in stretch], self.page),
                owner_since=content.chain.since if content.chain else 0,
            )

    def open(self, until: Moment | None = None) -> list[Residency]:
        """What is in L2 now."""
        by_content: dict[int, tuple[Content, list[int], list[int]]] = {}
        for page, (content, position) in self._held.items():
            entry = by_content.setdefault(id(content), (content, [], []))
            entry[1].append(position)
            entry[2].append(page)
        return [
            residency
            for content, positions, held in by_content.values()
            for residency in self._stretches(content, positions, held, until)
        ]

    def finish(self, until: Moment) -> None:
        """The pool was emptied: close what is open."""
        for residency in self.open(until):
            self._close(residency)
        self._held.clear()
        self._fresh.clear()
        self._free.clear()

    # --- questions -----------------------------------------------------------------------------------

    def contents(self) -> list[Content]:
        """What the pages hold, whether it may be read yet or not."""
        return list({id(content): content for content, _ in self._held.values()}.values())

    def segments(self, runs: tuple[Run, ...], start: int, end: int, chain: Chain | None) -> tuple[LoadSegment, ...]:
        """Where the content of slots comes from that are read as positions ``[start, end)`` of a sequence."""
        found: list[LoadSegment] = []
        position = start
        current: tuple[Content | None, int, bool] | None = None
        begin = start
        for page in pages(runs, self.page):
            held = self._held.get(page)
            content = held[0] if held is not None else None
            usable = content is not None and content.usable is not None
            shift = position - held[1] if held is not None else 0
            key = (content, shift, usable)
            if current is not None and key != current:
                found.append(self._segment(current, begin, position, chain))
                begin = position
            current = key
            position += self.page
        if current is not None:
            found.append(self._segment(current, begin, end, chain))
        return tuple(found)

    def _segment(self, key: tuple[Content | None, int, bool], start: int, end: int, chain: Chain | None) -> LoadSegment:
        content, shift, usable = key
        if content is None:
            return LoadSegment(start, end, "unknown", 0, False, False, None, 0)
        shared = shared_prefix(chain, content.chain, end)
        grid = chain.grid if chain is not None else 0
        return LoadSegment(
            start=start,
            end=end,
            origin=content.origin,
            origin_id=content.id,
            usable=usable,
            aligned=shift == 0,
            same_prefix=same_prefix(shared, end, grid),
            digest_to=max(shared or 0, 0),
        )


def _runs(page_numbers: list[int], page: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    for number in page_numbers:
        if runs and runs[-1].start + runs[-1].length == number * page:
            runs[-1] = Run(runs[-1].start, runs[-1].length + page)
        else:
            runs.append(Run(number * page, page))
    return tuple(runs)
