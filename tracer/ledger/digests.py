"""Pages that were digested in L1 when they were backed up, and again when they had been loaded back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.facts import Backup, Load, Moment, PageCheck

_Taken = list[tuple[tuple[bytes, ...], Moment]]


class PageDigests:
    """The digests of one instance: by transfer and the first host slot of the page."""

    def __init__(self) -> None:
        self._backed_up: dict[tuple[int, int], _Taken] = defaultdict(list)
        self._loaded: dict[tuple[int, int], _Taken] = defaultdict(list)

    def backed_up(self, event: ev.BackupDigested, moment: Moment) -> None:
        """A page was digested as it was copied to the host."""
        self._backed_up[event.transfer, event.slot].append((event.digests, moment))

    def loaded(self, event: ev.LoadDigested, moment: Moment) -> None:
        """A page was digested after it was copied back."""
        self._loaded[event.transfer, event.slot].append((event.digests, moment))

    def forget(self, copies: Container[int | None], before: int) -> None:
        """Drop what was taken before an event, but for these copies."""
        for taken in (self._backed_up, self._loaded):
            for key in [key for key, all_ in taken.items() if key[0] not in copies and all_[-1][1].seq < before]:
                del taken[key]

    def checks(self, load: Load, backups: Mapping[int, Backup], page: int, layers: int | None) -> tuple[PageCheck, ...]:
        """The pages of a load that were digested both at their backup and after the load."""
        return tuple(self._checks(load, backups, page, layers)) if self._loaded else ()

    def _checks(self, load: Load, backups: Mapping[int, Backup], page: int, layers: int | None) -> Iterator[PageCheck]:
        position = load.start
        origins = [(s.start, s.end, backups.get(s.origin_id)) for s in load.segments if s.origin == "backup"]
        for run in load.slots:
            for slot in range(run.start, run.start + run.length, page):
                backup = next((b for start, end, b in origins if start <= position < end), None)
                check = self._check(load, backup, slot, position, page, layers)
                if check is not None:
                    yield check
                position += page

    def _check(
        self, load: Load, backup: Backup | None, slot: int, position: int, page: int, layers: int | None
    ) -> PageCheck | None:
        if backup is None or backup.started is None or load.started is None:
            return None
        before = self._backed_up.get((backup.transfer or 0, slot), ())
        after = self._loaded.get((load.transfer or 0, slot), ())
        if not before or not after:
            return None
        (taken, backed_up), (found, loaded) = before[0], after[0]
        # Of two digests of one page in one copy nobody can tell which is right.
        sound = (
            len(before) == len(after) == 1
            and len(taken) == len(found) == layers
            and backup.started.seq < backed_up.seq < loaded.seq
            and load.started.seq < loaded.seq
        )
        differing = tuple(i for i, (a, b) in enumerate(zip(taken, found, strict=False)) if a != b)
        return PageCheck(position, position + page, slot, backed_up, loaded, differing, sound)
