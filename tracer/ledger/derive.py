"""From one scheduler's journal to facts: a single pass over its events in their order, which may be a growing record.

Nothing is judged here, and nothing decided: each event goes through the rules of its type
(:mod:`kvwitness.tracer.rules`), which change the state. What does not fit together is a contradiction with the
numbers of the events between which it happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from kvwitness.collectors.journal import Gap, Journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.state import FOREVER, State
from kvwitness.tracer.rules.declare import Rules
from kvwitness.tracer.rules.journal import UNREADABLE
from kvwitness.tracer.rules.model import MODEL


class Recorded(Protocol):
    """What a journal says of itself; a :class:`~kvwitness.collectors.journal.Journal` is one."""

    @property
    def instance(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def monotonic_ns(self) -> int: ...
    @property
    def wall_ns(self) -> int: ...
    @property
    def gaps(self) -> tuple[Gap, ...]: ...
    @property
    def anomalies(self) -> tuple[str, ...]: ...
    @property
    def closed(self) -> bool: ...


class Ledger:
    """Reads the events of one instance, all at once (:func:`derive`) or as they come."""

    def __init__(self, rules: Rules = MODEL) -> None:
        self._step = rules.step
        self._state = State()
        self._first = 0
        self._last_ns: int | None = None
        self._remembers_from = self._remembers_from_ns = 0
        self._times: deque[tuple[int, int]] = deque([(0, 0)])
        """The time of an event now and then, as far back as is asked for."""

    def take(self, events: Iterable[ev.Event]) -> None:
        """Go on with these events, which follow those before."""
        state, steps = self._state, self._step
        for event in events:
            step = steps.get(type(event))
            if step is not None:
                step(state, event, ft.Moment(event.seq, event.t_ns, type(event).__name__))
            self._first = self._first or event.seq
            state.before, self._last_ns = event.seq, event.t_ns
        if self._last_ns is not None:
            self._times.append((state.before, self._last_ns))

    # --- result --------------------------------------------------------------------------------------

    def facts(self, journal: Recorded, traceparents: Mapping[str, str] | None = None) -> ft.InstanceFacts:
        """What is known after the events so far. ``traceparents``: request id -> W3C context (HTTP process)."""
        s, traceparents = self._state, traceparents or {}
        backups = {b.queued.seq: b.freeze() for b in s.backups}
        contradictions = tuple(self._contradictions())
        return ft.InstanceFacts(
            instance=journal.instance,
            role=journal.role,
            pid=journal.pid,
            monotonic_ns=journal.monotonic_ns,
            wall_ns=journal.wall_ns,
            facts=s.told.now,
            hooks=s.told.hooks,
            hook_failures=dict(s.failures),
            requests=tuple(r.freeze(traceparents.get(r.rid)) for r in s.requests.all),
            backups=tuple(backups.values()),
            evictions=s.evictions.freeze(),
            host_evictions=s.host_evictions.freeze(),
            loads=tuple(self._checked(load.freeze(), backups) for load in s.loads),
            prefetches=tuple(s.prefetches),
            residencies=(*s.residencies, *s.tree.open(), *s.host.open()),
            found=tuple(s.found),
            chains=s.requests.chains(),
            rejections=tuple(s.rejections),
            storage=s.storage.freeze(),
            states=s.states.freeze(),
            epochs=tuple(s.epochs),
            gaps=(
                *((gap.first, gap.last, gap.cause) for gap in journal.gaps),
                *((one.first, one.last, one.text) for one in contradictions if not one.content),
            ),
            contradictions=contradictions,
            weights=tuple(s.weights),
            told_at=s.told.instance_at,
            anomalies=(*journal.anomalies, *(one.text for one in contradictions if one.rule == UNREADABLE)),
            closed=journal.closed,
            first_seq=self._first,
            last_seq=s.before,
            last_ns=journal.monotonic_ns if self._last_ns is None else self._last_ns,
            remembers_from=self._remembers_from,
            context=frozenset(s.requests.context),
            remembers_from_ns=journal.wall_ns + self._remembers_from_ns - journal.monotonic_ns
            if self._remembers_from
            else 0,
        )

    def _contradictions(self) -> Iterable[ft.Contradiction]:
        last = self._state.before
        for one in self._state.contradictions:
            yield msgspec.structs.replace(one, last=last) if one.last == FOREVER else one
        for first in self._state.evictions.without_end():
            yield ft.Contradiction("EvictEnd: ends", first, last, "the end of an eviction was not recorded")

    def _checked(self, load: ft.Load, backups: Mapping[int, ft.Backup]) -> ft.Load:
        told = self._state.told
        checks = self._state.pages.checks(load, backups, told.page, told.instance.layers)
        return msgspec.structs.replace(load, checks=checks) if checks else load

    # --- records without an end ----------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The last event's number."""
        return self._state.before

    @property
    def remembers_from(self) -> int:
        """See :attr:`~kvwitness.tracer.ledger.facts.InstanceFacts.remembers_from`."""
        return self._remembers_from

    def rids(self) -> frozenset[str]:
        """The requests that are remembered."""
        return self._state.requests.rids()

    def settled(self, before: int) -> frozenset[str]:
        """Requests that ended before event ``before``."""
        return self._state.requests.settled(before)

    def forget(self, rids: frozenset[str], before: int) -> None:
        """Drop these requests (of those :meth:`settled` says), and what happened before ``before`` but to others.

        A request whose prefix a tier still holds stays as what others were built on, and is not judged any more.
        What is claimed of those that are left is what would have been claimed: they, what a tier holds and what is
        under way keep all that their chains rest on. Why something was *not* reused may lie before:
        :attr:`~kvwitness.tracer.ledger.facts.InstanceFacts.remembers_from`.
        """
        if before > self._remembers_from:
            self._remembers_from, self._remembers_from_ns = before, self._time_of(before)
        s = self._state
        s.tree.forget({content.node for content in s.contents()})
        live = s.live()
        gone = s.requests.forget(rids, live)
        s.names.forget(gone)
        keep: set[str | None] = {*live, *s.requests.rids()}
        self._forget_copies(keep, before)
        s.evictions.forget(keep, s.requests.judged(), before)
        s.host_evictions.forget(keep, before)
        s.rejections = [one for one in s.rejections if one.moment.seq >= before or one.owner in keep]
        # In place: the tiers add to this very list.
        s.residencies[:] = [
            one for one in s.residencies if one.until is None or one.until.seq >= before or one.owner in keep
        ]
        s.pages.forget({b.transfer for b in s.backups} | {load.transfer for load in s.loads}, before)
        s.storage.forget(gone, keep, before)
        s.states.forget(keep, before)
        s.transfers.compact()
        chains = [*s.requests.chains().values(), *s.tree.chains()]
        s.prefixes.forget(gone, [*chains, *(c.chain for c in s.contents() if c.chain is not None)])

    def _forget_copies(self, keep: set[str | None], before: int) -> None:
        """Of the copies those stay that something rests on; ``keep`` gains whose prefill such a copy goes back to."""
        s = self._state
        told = s.tree.loads()
        for request in s.requests.all:
            told.update(request.loads)
            nodes = request.match.nodes if request.match is not None else ()
            told.update(node.load for node in nodes if node.load is not None)
        s.loads = [
            load
            for load in s.loads
            if load.moment.seq >= before or load.rid in keep or load.moment.seq in told or not load.is_over(s.epoch)
        ]
        used = {segment.origin_id for load in s.loads for segment in load.segments}
        used.update(content.id for content in s.contents())
        s.backups = [
            backup
            for backup in s.backups
            if backup.moment.seq >= before
            or backup.moment.seq in used
            or keep & {backup.rid, backup.owner}
            or not backup.is_over(s.epoch)
        ]
        # Whose prefill a copy goes back to, also when nothing else of that request is left.
        keep.update(backup.owner for backup in s.backups if backup.moment.seq in used)
        ids = used.union(backup.moment.seq for backup in s.backups)
        s.backup_nodes = {number: node for number, node in s.backup_nodes.items() if number in ids}
        s.prefetches = [
            one for one in s.prefetches if one.done.seq >= before or one.done.seq in used or one.rid in keep
        ]

    def _time_of(self, seq: int) -> int:
        """A monotonic time that is not before an event's."""
        while len(self._times) > 1 and self._times[0][0] < seq:
            self._times.popleft()
        return self._times[0][1]


def derive(journal: Journal, traceparents: Mapping[str, str] | None = None, rules: Rules = MODEL) -> ft.InstanceFacts:
    """The facts of one scheduler's journal. ``traceparents``: request id -> W3C context (HTTP process)."""
    ledger = Ledger(rules)
    ledger.take(journal.events)
    return ledger.facts(journal, traceparents)


def traceparents_of(journals: list[Journal]) -> dict[str, str]:
    """Request id -> W3C trace context, from the journals of the HTTP processes."""
    found: dict[str, str] = {}
    for journal in journals:
        texts = {event.id: event.text for event in journal.events if isinstance(event, ev.Text)}
        for event in journal.events:
            if isinstance(event, ev.HttpRequest) and event.req in texts:
                found[texts[event.req]] = event.traceparent
    return found
