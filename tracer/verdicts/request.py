"""The verdict about one request on one instance."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvwitness.patches.schema.events import ReleaseState
from kvwitness.tracer.ledger.facts import InstanceFacts, Load, RequestFacts
from kvwitness.tracer.model import (
    GRADE_ORDER,
    EventRef,
    Grade,
    Link,
    LoadBack,
    RangeVerdict,
    Reason,
    RequestVerdict,
    ServerReport,
    Tier,
)
from kvwitness.tracer.verdicts.grading import graded, merged
from kvwitness.tracer.verdicts.l1 import judge_l1
from kvwitness.tracer.verdicts.l2 import judge_loads
from kvwitness.tracer.verdicts.l3 import storage_alarm, waits_for_storage, with_storage
from kvwitness.tracer.verdicts.links import Evidence, unsound_links
from kvwitness.tracer.verdicts.recomputed import judge_recomputed
from kvwitness.tracer.verdicts.sentences import deepest_tier, sentence
from kvwitness.tracer.verdicts.usage import Usage, usage_of
from kvwitness.tracer.verdicts.view import InstanceView
from kvwitness.tracer.verdicts.witnesses import check_report, count, weigh


def judge_request(view: InstanceView, request: RequestFacts, reports: Sequence[ServerReport] = ()) -> RequestVerdict:
    """Judge one attempt of a request from the facts of the instance that served it."""
    instance, usage = view.instance, usage_of(request)
    ranges = list(merged(_ranges(view, request, usage)))
    all_reports = (*reports, *_scheduler_report(request))
    tokens = count(ranges, usage.total)
    judged = usage.reused is not None and usage.proven
    # Only the first admission's numbers are comparable: after a retraction the server adds them up.
    declined = _declined(request)
    checks = [check_report(r, tokens, judged and request.attempt == 1, declined) for r in all_reports]
    ranges = _refuted(weigh(ranges, checks, all_reports), all_reports, tokens.l2 + tokens.l3, judged)
    tier = deepest_tier(ranges)
    grade = overall_grade(ranges, tier)
    return RequestVerdict(
        rid=request.rid,
        instance=instance.instance,
        epoch=request.epoch,
        attempt=request.attempt,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        finished=request.released is not None and request.state != ReleaseState.RETRACTED,
        tokens=count(ranges, usage.total),
        ranges=tuple(ranges),
        tier=tier,
        grade=grade,
        reason=_reason(ranges, tier),
        sentence=sentence(tier, grade, ranges),
        load_backs=tuple(_load_back(instance, load) for load in view.loads_of(request)),
        reports=all_reports,
        checks=tuple(checks),
        notes=(*_notes(view, request, usage), *_left_the_prefix(ranges)),
        queued_ns=request.queued.t_ns,
        admitted_ns=request.admitted.t_ns if request.admitted else None,
        first_token_ns=request.first_token.t_ns if request.first_token else None,
        released_ns=request.released.t_ns if request.released else None,
    )


def _ranges(view: InstanceView, request: RequestFacts, usage: Usage) -> list[RangeVerdict]:
    reused, match = usage.reused, request.match
    if reused is None:
        return [_unknown(view, 0, usage.total, usage)]
    if match is None:
        return [*_blind(view, usage, 0, reused), *judge_recomputed(view, request, usage)]
    device = min(match.device, reused)
    loaded = sum(load.tokens for load in view.loads_of(request))
    below = min(device + max(loaded, 0), reused)
    return [
        *judge_l1(view, request, usage, 0, device),
        *judge_loads(view, request, usage, device, below),
        *_blind(view, usage, below, reused),
        *with_storage(view, request, judge_recomputed(view, request, usage)),
    ]


def _blind(view: InstanceView, usage: Usage, start: int, end: int) -> list[RangeVerdict]:
    """Tokens that were reused from somewhere: the prefill began behind them, and nothing says where they were."""
    if start >= end:
        return []
    return [_unknown(view, start, end, usage, reused=True)]


def _unknown(view: InstanceView, start: int, end: int, usage: Usage, reused: bool = False) -> RangeVerdict:
    evidence = Evidence(view)
    if reused:
        evidence.miss(Link.READ, "these tokens were not computed by the prefill; no event says which tier held them")
    usage.link(evidence)
    verdict = graded(start, end, Tier.UNKNOWN, Reason.INCONCLUSIVE, evidence.complete())
    return verdict if reused else msgspec.structs.replace(verdict, grade=Grade.UNKNOWN)


def overall_grade(ranges: Sequence[RangeVerdict], tier: Tier) -> Grade:
    """The weakest claim of reuse decides; without reuse: recomputed, or unknown."""
    if any(r.grade is Grade.REFUTED for r in ranges):
        return Grade.REFUTED
    reused = [r for r in ranges if r.grade is not Grade.RECOMPUTED]
    if not reused:
        return Grade.RECOMPUTED if tier is Tier.RECOMPUTED else Grade.UNKNOWN
    return min((r.grade for r in reused), key=GRADE_ORDER.__getitem__)


def _refuted(
    ranges: Sequence[RangeVerdict], reports: Sequence[ServerReport], below: int, judged: bool
) -> list[RangeVerdict]:
    """The server attributes tokens to L2 whose load-back was declined and which were computed again."""
    claimed = max(((r.host or 0) + (r.storage or 0) for r in reports), default=0)
    if not judged or claimed <= below:
        return list(ranges)
    return [
        msgspec.structs.replace(
            r, grade=Grade.REFUTED, detail=f"the server reports {claimed} tokens read below L1; {r.detail}"
        )
        if r.reason in (Reason.PROMISED_NOT_LOADED, Reason.L2_READ_PARTIAL) and r.grade is Grade.RECOMPUTED
        else r
        for r in ranges
    ]


def _declined(request: RequestFacts) -> int:
    """Tokens that the match promised of L2 and whose load-back was refused."""
    match, decision = request.match, request.decision
    return match.host if match is not None and decision is not None and not decision.loaded else 0


def _reason(ranges: Sequence[RangeVerdict], tier: Tier) -> Reason:
    if any(r.reason is Reason.CORRUPTION_SUSPECTED and r.grade is Grade.REFUTED for r in ranges):
        return Reason.CORRUPTION_SUSPECTED
    if any(r.reason is Reason.L2_READ_PARTIAL for r in ranges) and tier is not Tier.UNKNOWN:
        return Reason.L2_READ_PARTIAL
    plain = (Reason.RECOMPUTED, Reason.PREFIX_CHANGED)
    special = [r.reason for r in ranges if r.tier is tier and r.reason not in plain]
    if special:
        return special[0]
    return Reason.RECOMPUTED if tier is Tier.RECOMPUTED else Reason.INCONCLUSIVE


def _scheduler_report(request: RequestFacts) -> tuple[ServerReport, ...]:
    """The request object's own counters when it gave its KV back."""
    if request.cached_total is None:
        return ()
    return (
        ServerReport(
            "scheduler", request.cached_total, request.cached_device, request.cached_host, request.cached_storage
        ),
    )


def _load_back(instance: InstanceFacts, load: Load) -> LoadBack:
    moments = [m for m in (load.queued, load.started, load.done) if m is not None]
    return LoadBack(
        transfer=load.transfer or 0,
        tokens=load.tokens,
        transfer_tokens=load.transfer_tokens or 0,
        bytes=load.transfer_bytes or 0,
        queued_ns=load.queued.t_ns,
        started_ns=load.started.t_ns if load.started else load.queued.t_ns,
        done_ns=load.done.t_ns if load.done else None,
        device_duration_ns=load.duration_ns,
        events=tuple(EventRef(instance.instance, m.seq, m.kind) for m in moments),
    )


def _not_compared(view: InstanceView, request: RequestFacts) -> list[str]:
    """Why a load-back's content was not compared, although digests were asked for."""
    loads = view.loads_of(request)
    if not loads or any(load.checks for load in loads):
        return []
    lost = unsound_links(view.instance).get(Link.CONTENT)
    if lost is None and view.instance.hook_failures.get("page_digests"):
        lost = "taking digests failed and was given up (the journal has the error)"
    why = lost or "no page of it was digested both at its backup and after the load"
    return [f"the content of what was loaded was not compared: {why}"]


def _left_the_prefix(ranges: Sequence[RangeVerdict]) -> list[str]:
    """Where reuse had to end because the prompt goes on otherwise."""
    changed = next((r for r in ranges if r.reason is Reason.PREFIX_CHANGED), None)
    return [f"prefix changed: {changed.detail}"] if changed is not None else []


def _notes(view: InstanceView, request: RequestFacts, usage: Usage) -> tuple[str, ...]:
    notes: list[str] = []
    if request.attempt > 1:
        notes.append(f"attempt {request.attempt}: the request was retracted before and prefilled again")
    if not view.instance.closed and request.released is None:
        notes.append("the journal ends before the request did: the process was killed or is still running")
    extra = [load for load in view.loads_of(request) if load.done is None]
    if extra and usage.reused is None:
        notes.append("a load-back was queued for it and its completion was not recorded")
    notes.extend(storage_alarm(view, request))
    notes.extend(waits_for_storage(view, request))
    notes.extend(str(leak) for leak in view.leaks if leak.rid == request.rid)
    if view.instance.facts.instance.digest_every:
        notes.extend(_not_compared(view, request))
    return tuple(notes)
