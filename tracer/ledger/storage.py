"""L3 (storage) as one instance used it: what was asked for, found, fetched, written, and what went wrong."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.chains import Chain
from kvwitness.tracer.ledger.facts import Moment, Storage, StorageChange, StorageTrouble, StorageTry


@dataclass(slots=True)
class OpenFetch:
    """A prefetch for a request in the queue, which may not have ended."""

    queued: Moment
    """Since when its request waits."""
    asked: ev.PrefetchAsked | None = None
    asked_at: Moment | None = None
    backend: bool = False
    """A backend was attached when it was asked for."""
    looked_up: ev.StorageLookedUp | None = None
    looked_up_at: Moment | None = None
    stopped: ev.PrefetchStopped | None = None
    failed: Moment | None = None
    """Something raised on the thread that looks up or reads."""
    ended: bool = False


class StorageView:
    """What storage does for one instance; what it puts into L2 is in the host pool and in the prefetches."""

    def __init__(self) -> None:
        self._fetches: dict[str, OpenFetch] = {}
        self._tries: list[StorageTry] = []
        self._troubles: list[StorageTrouble] = []
        self._changes: list[StorageChange] = []
        self._queued: list[Moment] = []
        self._handed: list[int] = []
        """Tokens of the backups that were handed over and are not through, in their order."""
        self._written: list[tuple[int, int, Moment]] = []
        self._computed: dict[bytes, int] = {}
        """Digest of a prefix -> the event with which what storage holds of it was computed; the first copy counts."""
        self.attached: bool | None = None
        """Whether a backend is attached by what was recorded since; None: nothing was, the instance's facts say."""

    # --- prefetches ----------------------------------------------------------------------------------

    def waits(self, rid: str, queued: Moment) -> None:
        """A request waits in the queue: what was asked for it before is void."""
        self._fetches[rid] = OpenFetch(queued)

    def fetch(self, rid: str | None) -> OpenFetch | None:
        """The prefetch for the request that waits with an id."""
        return self._fetches.get(rid or "")

    def told(self, rid: str | None, what: str, start: int, tokens: int, why: str, moment: Moment) -> None:
        """One step of a prefetch."""
        self._tries.append(StorageTry(rid, what, start, tokens, why, moment))

    def failed(self, work: int, rid: str | None, error: str, moment: Moment) -> None:
        """Something raised on a storage thread."""
        self._troubles.append(StorageTrouble(work, rid, error, moment))

    def changed(self, event: ev.StorageChanged, moment: Moment) -> None:
        """A backend was attached or detached, or that was refused."""
        self._changes.append(StorageChange(bool(event.attach), bool(event.ok), event.message, moment))
        if event.ok:
            self.attached = bool(event.attach)

    # --- backups -------------------------------------------------------------------------------------

    def handed_over(self, tokens: int, moment: Moment) -> None:
        """A copy in L2 was handed to the backend."""
        self._queued.append(moment)
        self._handed.append(tokens)

    def holds(self, cells: list[bytes], computed: int) -> None:
        """Storage gets these cells, which were computed at an event; what it has already it keeps."""
        for digest in cells:
            self._computed.setdefault(digest, computed)

    def computed(self, chain: Chain | None, start: int, end: int) -> tuple[int, ...] | None:
        """The events at which what storage holds of ``[start, end)`` was computed; None where not all is known."""
        if chain is None or not chain.grid:
            return None
        found = [self._computed.get(digest) for digest in chain.cells[start // chain.grid : -(-end // chain.grid)]]
        known = sorted({event for event in found if event is not None})
        return tuple(known) if known and None not in found else None

    def is_handed(self, tokens: int) -> bool:
        """Whether a backup of so many tokens was handed over and is not through."""
        return tokens in self._handed

    def written(self, tokens: int, completed: int, moment: Moment) -> None:
        """The backend is through with a backup."""
        self._written.append((tokens, completed, moment))
        if tokens in self._handed:
            self._handed.remove(tokens)

    # --- result --------------------------------------------------------------------------------------

    def forget(self, gone: Container[str], keep: Container[str | None], before: int) -> None:
        """Drop what happened before an event, but to these requests; failures are kept, as they are counted."""
        for rid in [rid for rid in self._fetches if rid in gone]:
            del self._fetches[rid]
        self._tries = [one for one in self._tries if one.moment.seq >= before or one.rid in keep]
        if any(trouble.work == ev.StorageWork.WRITE for trouble in self._troubles):
            return  # What was written before and since is told with it.
        self._queued = [moment for moment in self._queued if moment.seq >= before]
        older = [one for one in self._written if one[1] and one[2].seq < before]
        self._written = [*older[-1:], *(one for one in self._written if one[2].seq >= before)]

    def freeze(self) -> Storage:
        """The facts."""
        return Storage(
            tries=tuple(self._tries),
            troubles=tuple(self._troubles),
            changes=tuple(self._changes),
            queued=tuple(self._queued),
            written=tuple(self._written),
        )
