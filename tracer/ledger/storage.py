"""L3 (storage) as one instance used it: what was asked for, found, fetched, written, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Container

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger.facts import Moment, Storage, StorageChange, StorageTrouble, StorageTry

_Name = Callable[[int], str | None]


class StorageView:
    """Collects the events of storage that put nothing into L2 (what does is a prefetch)."""

    def __init__(self, name: _Name) -> None:
        self._name = name
        self._tries: list[StorageTry] = []
        self._troubles: list[StorageTrouble] = []
        self._changes: list[StorageChange] = []
        self._queued: list[Moment] = []
        self._written: list[tuple[int, int, Moment]] = []

    def asked(self, event: ev.PrefetchAsked, moment: Moment) -> None:
        self._try(event.req, "issued" if event.issued else "declined", event.start, event.tokens, "", moment)

    def looked_up(self, event: ev.StorageLookedUp, moment: Moment) -> None:
        self._try(event.req, "looked_up", -1, event.tokens, "", moment)

    def revoked(self, event: ev.PrefetchRevoked, moment: Moment) -> None:
        self._try(event.req, "revoked", -1, 0, self._name(event.reason) or "", moment)

    def stopped(self, event: ev.PrefetchStopped, moment: Moment) -> None:
        self._try(event.req, "stopped", -1, event.completed, self._name(event.policy) or "", moment)

    def done(self, event: ev.PrefetchDone, moment: Moment) -> None:
        self._try(event.req, "done", event.start, event.loaded, "cut short" if event.deadline else "", moment)

    def failed(self, event: ev.StorageFailed, moment: Moment) -> None:
        self._troubles.append(StorageTrouble(event.work, self._name(event.req), event.error, moment))

    def changed(self, event: ev.StorageChanged, moment: Moment) -> None:
        self._changes.append(StorageChange(bool(event.attach), bool(event.ok), event.message, moment))

    def backup_queued(self, _: ev.StorageBackupQueued, moment: Moment) -> None:
        self._queued.append(moment)

    def backed_up(self, event: ev.StorageBackedUp, moment: Moment) -> None:
        self._written.append((event.tokens, event.completed, moment))

    def forget(self, keep: Container[str | None], before: int) -> None:
        """Drop what happened before an event, but to these requests; failures are kept, as they are counted."""
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

    def _try(self, req: int, what: str, start: int, tokens: int, why: str, moment: Moment) -> None:
        self._tries.append(StorageTry(self._name(req), what, start, tokens, why, moment))
