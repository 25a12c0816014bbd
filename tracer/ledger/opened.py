"""What has begun and may not have ended yet, while a journal is read."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.hostpool import Content


@dataclass(slots=True)
class OpenBackup:
    """A device-to-host copy whose acknowledgement may still come."""

    queued: ev.BackupQueued
    epoch: int
    rid: str | None
    content: Content
    moment: ft.Moment
    started: ft.Moment | None = None
    acked: ft.Moment | None = None
    transfer: int | None = None
    duration_ns: int | None = None
    in_l1: bool = False
    """Its node was in L1 when it was queued."""
    born: tuple[ft.Birth, ...] | None = None
    """What had put it into L1, where it was there from its queueing to its acknowledgement."""

    @property
    def owner(self) -> str | None:
        """The request whose token prefix the copied positions belong to."""
        return self.content.chain.rid if self.content.chain else None

    def is_over(self, epoch: int) -> bool:
        """Nothing can come of it any more."""
        return self.acked is not None or self.epoch != epoch

    def freeze(self) -> ft.Backup:
        """What became of it, immutable."""
        q = self.queued
        return ft.Backup(
            id=q.seq,
            epoch=self.epoch,
            rid=self.rid,
            owner=self.owner,
            node=q.node,
            start=q.start,
            end=q.end,
            tokens=q.tokens,
            write_back=bool(q.write_back),
            slots=q.slots,
            queued=self.moment,
            started=self.started,
            acked=self.acked,
            transfer=self.transfer,
            duration_ns=self.duration_ns,
            owner_since=self.content.chain.since if self.content.chain else 0,
            born=self.born,
        )


@dataclass(slots=True)
class OpenLoad:
    """A load-back whose completion may still come."""

    queued: ev.LoadQueued
    epoch: int
    rid: str | None
    moment: ft.Moment
    segments: tuple[ft.LoadSegment, ...]
    path: tuple[ev.PathNode, ...]
    started: ft.Moment | None = None
    done: ft.Moment | None = None
    transfer: int | None = None
    transfer_tokens: int | None = None
    transfer_bytes: int | None = None
    duration_ns: int | None = None
    freed: bool = False
    waited: ft.Moment | None = None
    waited_layers: int = 0
    read_early: bool = False
    ended_short: int | None = None

    def is_over(self, epoch: int) -> bool:
        """Nothing can come of it any more."""
        return self.done is not None or self.epoch != epoch

    def freeze(self) -> ft.Load:
        """What became of it, immutable."""
        q = self.queued
        backups = tuple(dict.fromkeys(s.origin_id for s in self.segments if s.origin == "backup"))
        return ft.Load(
            id=q.seq,
            epoch=self.epoch,
            rid=self.rid,
            node=q.node,
            start=q.start,
            end=q.end,
            tokens=q.tokens,
            slots=q.slots,
            queued=self.moment,
            started=self.started,
            done=self.done,
            transfer=self.transfer,
            transfer_tokens=self.transfer_tokens,
            transfer_bytes=self.transfer_bytes,
            duration_ns=self.duration_ns,
            backups=backups,
            segments=self.segments,
            freed_while_loading=self.freed,
            waited=self.waited,
            waited_layers=self.waited_layers,
            read_early=self.read_early,
            ended_short=self.ended_short,
        )


@dataclass(slots=True)
class OpenEviction:
    """An L1 eviction whose victims are being told."""

    begin: ev.EvictBegin
    epoch: int
    rids: tuple[str, ...]
    moment: ft.Moment
    victims: list[ft.Victim] = field(default_factory=list)
    freed: int | None = None
    end: ft.Moment | None = None
    free: int | None = None

    @property
    def last(self) -> ft.Moment:
        """The last event of it so far."""
        return self.end or (self.victims[-1].moment if self.victims else self.moment)

    def freeze(self) -> ft.EvictionCall:
        """What became of it, immutable."""
        return ft.EvictionCall(
            call=self.begin.call,
            epoch=self.epoch,
            cause=self.begin.cause,
            rids=self.rids,
            asked=self.begin.asked,
            freed=self.freed,
            begin=self.moment,
            end=self.end,
            victims=tuple(self.victims),
            free=self.free,
        )
