"""Answers about the cache while a run goes on, read from the journals that the server is writing.

Every answer is True, False, or None for "cannot tell": a journal that cannot be read, records that are
missing, a request that no journal knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from kvwitness.collectors.journal import Journal, JournalUnreadable, find_journals, parse_journal
from kvwitness.patches.schema import format as fmt
from kvwitness.tracer.judgement import SCHEDULER_ROLE
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.ledger.facts import InstanceFacts, RequestFacts
from kvwitness.tracer.protocol.workload import reusable_tokens

Span = tuple[int, int]


class Observer(Protocol):
    """What the protocol runner asks while it runs. None: cannot tell."""

    def left_l1(self, rid: str, beyond: int = 0) -> bool | None:
        """Nothing that a repeat of request ``rid`` could reuse is in L1 any more.

        The first ``beyond`` tokens do not count: a chat template's, that every prompt begins with.
        """

    def backed_up(self, rid: str) -> bool | None:
        """Everything that a repeat of ``rid`` could reuse was copied to L2, and acknowledged."""

    def in_l2(self, rid: str) -> bool | None:
        """Something that a repeat of ``rid`` could reuse is in L2."""

    def settled(self, rids: Sequence[str]) -> bool | None:
        """Every one of ``rids`` was released, and no copy of theirs is on its way in either direction."""


class JournalObserver:
    """Reads what has been added to the journals below ``directory`` for every question.

    ``page_size`` in tokens, when known (else the instance's own facts are asked, else 1).
    """

    def __init__(self, directory: Path, page_size: int | None = None) -> None:
        self.directory = directory
        self._page_size = page_size
        self._known: dict[str, tuple[tuple[int, int, int], InstanceFacts]] = {}

    def left_l1(self, rid: str, beyond: int = 0) -> bool | None:
        return prefix_left_l1(self._instances(), rid, self._page_size, beyond)

    def backed_up(self, rid: str) -> bool | None:
        return prefix_backed_up(self._instances(), rid, self._page_size)

    def in_l2(self, rid: str) -> bool | None:
        return prefix_in_l2(self._instances(), rid, self._page_size)

    def settled(self, rids: Sequence[str]) -> bool | None:
        return all_settled(self._instances(), rids)

    def _instances(self) -> tuple[InstanceFacts, ...]:
        journals: list[Journal] = []
        for path in find_journals(self.directory):
            try:
                journals.append(read_written(path))
            except (JournalUnreadable, OSError):
                # Just being created, or of another version: what it would have said stays unknown.
                continue
        return tuple(self._derived(journal) for journal in journals if journal.role == SCHEDULER_ROLE)

    def _derived(self, journal: Journal) -> InstanceFacts:
        """What follows from a journal; worked out again only when something was added to it."""
        state = (len(journal.events), journal.events[-1].seq if journal.events else -1, len(journal.gaps))
        known = self._known.get(journal.instance)
        if known is None or known[0] != state:
            known = state, derive(journal)
            self._known[journal.instance] = known
        return known[1]


def read_written(path: Path) -> Journal:
    """Read the part of a journal that has been written so far.

    A live journal's file has its full size from the start, 256 MiB by default; reading all of it for every
    question would cost more than the answer is worth. Chunks are taken into use in order, so the first
    unused one ends the written part. Raises ``JournalUnreadable`` and ``OSError``.
    """
    with path.open("rb") as file:
        raw = bytearray(file.read(fmt.HEADER_BYTES))
        if len(raw) == fmt.HEADER_BYTES and raw.startswith(fmt.FILE_MAGIC):
            chunk_bytes = fmt.HEADER.unpack_from(raw)[3]
            while chunk_bytes >= fmt.CHUNK_HEADER.size:
                head = file.read(fmt.CHUNK_HEADER.size)
                raw += head
                # The unused chunk's header is kept: it tells the parser that the chunk before is whole.
                if len(head) < fmt.CHUNK_HEADER.size or not any(head[:4]):
                    break
                raw += file.read(chunk_bytes - fmt.CHUNK_HEADER.size)
    return parse_journal(bytes(raw), path.name)


def prefix_left_l1(
    instances: Iterable[InstanceFacts], rid: str, page_size: int | None = None, beyond: int = 0
) -> bool | None:
    """:meth:`Observer.left_l1` from facts; every rank that served the request must agree."""

    def one(facts: InstanceFacts, request: RequestFacts) -> bool | None:
        reusable = (beyond, _reusable(facts, request, page_size)[1])
        if not _overlaps(_resident(facts, request, "L1", ever=True), reusable):
            return None  # It was never seen in L1, so its absence proves nothing.
        return not _overlaps(_resident(facts, request, "L1"), reusable)

    return _every(instances, rid, one)


def prefix_backed_up(instances: Iterable[InstanceFacts], rid: str, page_size: int | None = None) -> bool | None:
    """:meth:`Observer.backed_up` from facts; every rank that served the request must agree."""

    def one(facts: InstanceFacts, request: RequestFacts) -> bool | None:
        sharers = _sharers(facts, request)
        copied = [
            (backup.start, min(backup.end, sharers[backup.owner]))
            for backup in facts.backups
            if backup.epoch == request.epoch and backup.acked and backup.owner in sharers
        ]
        copied += _resident(facts, request, "L2", ever=True)
        return _covers(copied, _reusable(facts, request, page_size))

    return _every(instances, rid, one)


def prefix_in_l2(instances: Iterable[InstanceFacts], rid: str, page_size: int | None = None) -> bool | None:
    """:meth:`Observer.in_l2` from facts: True as long as a rank that served the request holds some of it."""
    answers = _answers(
        instances,
        rid,
        lambda facts, request: _overlaps(_resident(facts, request, "L2"), _reusable(facts, request, page_size)),
    )
    if any(answers):
        return True
    return None if not answers or None in answers else False


def all_settled(instances: Iterable[InstanceFacts], rids: Sequence[str]) -> bool | None:
    """:meth:`Observer.settled` from facts. A request that no journal knows yet is not settled."""
    known = tuple(instances)
    if not known or any(facts.gaps for facts in known):
        return None
    for rid in rids:
        serving = [(facts, request) for facts in known if (request := _last(facts, rid)) is not None]
        if not serving or not all(_settled(facts, request) for facts, request in serving):
            return False
    return True


def _settled(facts: InstanceFacts, request: RequestFacts) -> bool:
    if request.released is None:
        return False
    epoch = _epoch(facts)
    # A copy that a reset cut off is never acknowledged, and nothing waits for it any more.
    loads = [load for load in facts.loads if load.rid == request.rid and load.epoch == epoch]
    backups = [
        backup for backup in facts.backups if backup.epoch == epoch and request.rid in (backup.rid, backup.owner)
    ]
    return all(load.done for load in loads) and all(backup.acked for backup in backups)


def _every(
    instances: Iterable[InstanceFacts], rid: str, one: Callable[[InstanceFacts, RequestFacts], bool | None]
) -> bool | None:
    answers = _answers(instances, rid, one)
    if not answers or None in answers:
        return None
    return all(answers)


def _answers(
    instances: Iterable[InstanceFacts], rid: str, one: Callable[[InstanceFacts, RequestFacts], bool | None]
) -> list[bool | None]:
    """One answer for each instance that knows the request; None where records are missing."""
    return [
        None if facts.gaps else one(facts, request) for facts in instances if (request := _last(facts, rid)) is not None
    ]


def _last(facts: InstanceFacts, rid: str) -> RequestFacts | None:
    attempts = [request for request in facts.requests if request.rid == rid]
    return max(attempts, key=lambda request: request.queued.seq) if attempts else None


def _sharers(facts: InstanceFacts, request: RequestFacts) -> dict[str | None, int]:
    """The requests under whose name the ledger keeps this request's prefix, and up to which position.

    Its own part is kept under its own name; what it found in the cache, under that of who brought it there.
    """
    sharers: dict[str | None, int] = {}
    if request.match is not None:
        nodes = {node.node for node in request.match.path}
        shared = max((node.end for node in request.match.path), default=0)
        sharers = {
            residency.owner: shared
            for residency in facts.residencies
            if residency.node in nodes and residency.owner is not None and residency.epoch == request.epoch
        }
    # An end far beyond any prompt: nothing of its own is cut off.
    sharers[request.rid] = 1 << 62
    return sharers


def _epoch(facts: InstanceFacts) -> int:
    return facts.epochs[-1].index if facts.epochs else 0


def _reusable(facts: InstanceFacts, request: RequestFacts, page_size: int | None) -> Span:
    recorded = facts.facts.instance.page_size
    page = page_size or (recorded if recorded is not None and recorded > 0 else 1)
    return 0, reusable_tokens(request.prompt_tokens, page)


def _resident(facts: InstanceFacts, request: RequestFacts, tier: str, ever: bool = False) -> list[Span]:
    """Where ``tier`` holds (or has ever held) the request's prefix, in the request's own epoch."""
    if not ever and request.epoch != _epoch(facts):
        return []
    sharers = _sharers(facts, request)
    return [
        (residency.start, min(residency.end, sharers[residency.owner]))
        for residency in facts.residencies
        if residency.tier == tier
        and residency.epoch == request.epoch
        and residency.owner in sharers
        and residency.start < sharers[residency.owner]
        and (ever or residency.until is None)
    ]


def _overlaps(spans: Iterable[Span], wanted: Span) -> bool:
    return any(start < wanted[1] and end > wanted[0] for start, end in spans)


def _covers(spans: Iterable[Span], wanted: Span) -> bool:
    reached = wanted[0]
    for start, end in sorted(spans):
        if start > reached:
            break
        reached = max(reached, end)
    return reached >= wanted[1]
