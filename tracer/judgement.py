"""From journals to verdicts in one step: the only entry that the outputs (bundle, table, spans) use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvwitness.collectors.journal import Journal
from kvwitness.tracer.ledger.derive import derive, traceparents_of
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import RequestVerdict, ServerReport
from kvwitness.tracer.verdicts.combine import combine
from kvwitness.tracer.verdicts.counters import CounterWindow, weigh_counters
from kvwitness.tracer.verdicts.elsewhere import explain_elsewhere
from kvwitness.tracer.verdicts.groups import distinct
from kvwitness.tracer.verdicts.recorded import noted
from kvwitness.tracer.verdicts.request import judge_request
from kvwitness.tracer.verdicts.scope import scoped
from kvwitness.tracer.verdicts.view import InstanceView
from kvwitness.tracer.verdicts.weights import by_other_weights

__all__ = ["SCHEDULER_ROLE", "CounterWindow", "Judgement", "judge", "judge_instances"]

SCHEDULER_ROLE = "scheduler"


class Judgement(msgspec.Struct, frozen=True):
    """All instances of a run, and one verdict per request (combined over the ranks that served it)."""

    instances: tuple[InstanceFacts, ...]
    verdicts: tuple[RequestVerdict, ...]

    def verdict(self, rid: str) -> RequestVerdict | None:
        """The verdict about request ``rid`` (the last one when a client used the id twice)."""
        for verdict in reversed(self.verdicts):
            if verdict.rid == rid:
                return verdict
        return None


def judge(
    journals: Sequence[Journal],
    reports: Mapping[str, ServerReport] | None = None,
    counters: CounterWindow | None = None,
) -> Judgement:
    """Judge every request in ``journals``.

    ``reports`` are the server's own answers, by request id; ``counters`` what its metrics gained meanwhile.
    Pure: the same input gives the same judgement, anywhere.
    """
    traceparents = traceparents_of(list(journals))
    instances = tuple(derive(journal, traceparents) for journal in journals if journal.role == SCHEDULER_ROLE)
    return judge_instances(instances, reports, counters)


def judge_instances(
    instances: tuple[InstanceFacts, ...],
    reports: Mapping[str, ServerReport] | None = None,
    counters: CounterWindow | None = None,
) -> Judgement:
    """:func:`judge` from what the ledgers know."""
    reports, instances = reports or {}, distinct(instances)
    verdicts = [
        judge_request(view, request, _reports_for(request.rid, reports))
        for view in map(InstanceView, instances)
        for request in view.instance.requests
        if request.queued.seq not in view.instance.context
    ]
    combined = explain_elsewhere(combine(verdicts, instances), instances)
    if counters is not None:
        combined = weigh_counters(combined, instances, counters)
    told = by_other_weights(scoped(combined, instances), instances)
    return Judgement(instances, noted(told, instances))


def _reports_for(rid: str, reports: Mapping[str, ServerReport]) -> tuple[ServerReport, ...]:
    report = reports.get(rid)
    return () if report is None else (report,)
