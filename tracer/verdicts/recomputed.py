"""Tokens that the request's own prefill computed: that they were, and why they were not reused."""

from __future__ import annotations

from kvwitness.patches.schema.events import Cause, Eviction, Refusal
from kvwitness.tracer.ledger.facts import Backup, InstanceFacts, RequestFacts, Residency
from kvwitness.tracer.model import Grade, Link, LinkEvidence, RangeVerdict, Reason, Tier
from kvwitness.tracer.verdicts.changed import change_of
from kvwitness.tracer.verdicts.components import missing_component
from kvwitness.tracer.verdicts.l2 import covers
from kvwitness.tracer.verdicts.links import Evidence
from kvwitness.tracer.verdicts.rejections import last_rejection, rejected_words
from kvwitness.tracer.verdicts.usage import Usage
from kvwitness.tracer.verdicts.view import InstanceView, forgotten, owners_of


def judge_recomputed(view: InstanceView, request: RequestFacts, usage: Usage) -> list[RangeVerdict]:
    """Verdicts for the part from the first computed token on, split where the reason changes."""
    if usage.reused is None or usage.reused >= usage.total:
        return []
    start, total = usage.reused, usage.total
    found: list[RangeVerdict] = []
    promised = _promised_end(request)
    if promised > start:
        found.append(_not_loaded(view, request, usage, start, promised))
        start = promised
    known = min(request.prior_tokens, total)
    if known > start:
        found.append(_lost(view, request, usage, start, known))
        start = known
    change = change_of(view, request)
    if change is not None and start < change.high:
        found.append(_range(view, usage, start, total, Reason.PREFIX_CHANGED, str(change), ()))
    else:
        found.append(_range(view, usage, start, total, Reason.RECOMPUTED, "", ()))
    return [r for r in found if r.start < r.end]


def _promised_end(request: RequestFacts) -> int:
    """End of the prefix that the match promised."""
    return 0 if request.match is None else request.match.device + request.match.host


def _range(
    view: InstanceView,
    usage: Usage,
    start: int,
    end: int,
    reason: Reason,
    detail: str,
    why: tuple[LinkEvidence, ...],
) -> RangeVerdict:
    evidence = Evidence(view)
    usage.link(evidence)
    links = evidence.complete()
    proven = all(link.holds for link in links)
    tier = Tier.RECOMPUTED if proven else Tier.UNKNOWN
    grade = Grade.RECOMPUTED if proven else Grade.UNKNOWN
    return RangeVerdict(start, end, tier, grade, reason, detail, (*why, *links))


def _not_loaded(view: InstanceView, request: RequestFacts, usage: Usage, start: int, end: int) -> RangeVerdict:
    """The match promised these tokens, and they were computed all the same."""
    evidence = Evidence(view)
    match, decision = request.match, request.decision
    assert match is not None
    reason = Reason.PROMISED_NOT_LOADED
    loaded = sum(load.tokens for load in view.loads_of(request))
    if loaded and match.device + loaded == start:
        reason = Reason.L2_READ_PARTIAL
        detail = f"{loaded} of the {match.host} tokens that L2 promised were loaded, the rest was computed again"
        evidence.miss(Link.READ, detail, match.moment, decision.moment if decision is not None else None)
    elif decision is not None and decision.loaded == 0:
        why = Refusal.NAMES.get(decision.reason, "unknown")
        detail = f"L2 promised {match.host} tokens, the load-back was refused: {why}"
        evidence.miss(Link.READ, detail, match.moment, decision.moment)
    elif match.host:
        detail = f"L2 promised {match.host} tokens, no load-back of them was seen"
        evidence.miss(Link.READ, detail, match.moment)
    else:
        detail = f"L1 held {match.device} tokens at the match, and they were computed again"
        evidence.miss(Link.USED, detail, match.moment)
    return _range(view, usage, start, end, reason, detail, evidence.complete()[:1])


def _lost(view: InstanceView, request: RequestFacts, usage: Usage, start: int, end: int) -> RangeVerdict:
    """An earlier request had this prefix in the cache; say where the chain to its reuse broke."""
    evidence = Evidence(view)
    prior = request.prior_rid
    reset = next((e for e in view.instance.epochs if e.index > request.prior_epoch and e.index <= request.epoch), None)
    if reset is not None:
        detail = f"the cache was reset after request {prior} had this prefix in it"
        evidence.miss(Link.RESIDENT_L2, detail, reset.begin)
        return _range(view, usage, start, end, Reason.RECOMPUTED, detail, evidence.complete()[:1])
    match = request.match
    assert match is not None
    if forgotten(view, request):
        detail = f"what became of this prefix of request {prior} was before event {view.instance.remembers_from}, "
        detail += "and is not remembered any more"
        return _range(view, usage, start, end, Reason.RECOMPUTED, detail, ())
    mode = view.instance.facts.transit_mode
    if mode is not None:
        detail = f"host memory mode {mode}: below L1 only storage (L3) keeps this prefix of request {prior}"
        evidence.miss(Link.RESIDENT_L2, detail, match.moment)
        return _range(view, usage, start, end, Reason.INVALID_MODE, detail, evidence.complete()[:1])
    before = match.moment.seq
    owners = owners_of(view, request)
    acked = [b for b in view.backups_of(owners, request.epoch) if b.end > start]
    acked = [b for b in acked if b.start < end and b.acked is not None and b.acked.seq < before]
    if not covers([_as_residency(b) for b in acked], start, end):
        rejection = last_rejection(view, owners, request.epoch, before, _covered_to(acked, start))
        if rejection is not None:
            detail = f"this prefix of request {prior}: {rejected_words(view, rejection)}"
        else:
            detail = _why_not_backed_up(view.instance, acked, start, prior)
            detail += _left_without(view, owners, request, _covered_to(acked, start))
        evidence.miss(Link.BACKED_UP, detail, *([rejection.moment] if rejection is not None else []), match.moment)
        return _range(view, usage, start, end, Reason.NEVER_BACKED_UP, detail, evidence.complete()[:1])
    held = view.l2_of(owners, request.epoch)
    live = [r for r in held if r.since.seq < before and (r.until is None or r.until.seq > before)]
    if covers(live, start, end):
        component, moments = missing_component(view, request, owners)
        detail = f"by the ledger L2 held this prefix of request {prior}, the match did not find it; {component}"
        evidence.miss(Link.RESIDENT_L2, detail, *moments, match.moment)
        return _range(view, usage, start, end, Reason.RESIDENT_NOT_MATCHED, detail, evidence.complete()[:1])
    gone = [r for r in held if r.start < end and r.end > start and r.until is not None and r.until.seq < before]
    last = max((r.until for r in gone if r.until is not None), key=lambda m: m.seq, default=None)
    who = _displaced_by(view, gone)
    detail = f"this prefix of request {prior} had left L2 before the match{who}"
    evidence.miss(Link.RESIDENT_L2, detail, last, match.moment)
    return _range(view, usage, start, end, Reason.LEFT_L2_BEFORE_READ, detail, evidence.complete()[:1])


def _as_residency(backup: Backup) -> Residency:
    assert backup.acked is not None
    return Residency("L2", backup.epoch, backup.owner, backup.node, backup.start, backup.end, backup.acked, None)


def _covered_to(backups: list[Backup], start: int) -> int:
    """The first position from ``start`` on that no backup covers."""
    position = start
    for backup in sorted(backups, key=lambda b: b.start):
        if backup.start > position:
            break
        position = max(position, backup.end)
    return position


def _left_without(view: InstanceView, owners: set[str | None], request: RequestFacts, position: int) -> str:
    """How it left L1 all the same."""
    left = [
        view.victim_at[r.until.seq]
        for owner in owners
        for r in view.l1_of(owner, request.epoch)
        if r.start <= position < r.end and r.until is not None and r.until.seq in view.victim_at
    ]
    if not left:
        return ""
    call, victim = max(left, key=lambda one: one[1].moment.seq)
    whom = f" for request {', '.join(call.rids)}" if call.rids else ""
    if victim.how == Eviction.DEMOTED:
        return f"; the tree demoted it from L1 all the same{whom}"
    return f"; {Eviction.NAMES.get(victim.how, 'evicted')} from L1{whom}"


def _why_not_backed_up(instance: InstanceFacts, acked: list[Backup], start: int, prior: str | None) -> str:
    policy = instance.facts.instance.write_policy
    threshold = instance.facts.instance.write_through_threshold
    if acked:
        reached = max(b.end for b in acked)
        return f"L2 got this prefix of request {prior} only up to token {reached}"
    detail = f"no backup of this prefix of request {prior} to L2 was acknowledged"
    if policy == "write_through_selective":
        detail += f" (write policy write_through_selective: a node is backed up at its hit {threshold})"
    elif policy is not None:
        detail += f" (write policy {policy})"
    return detail


def _displaced_by(view: InstanceView, gone: list[Residency]) -> str:
    """Which request's need for host memory displaced these copies: the last that did."""
    found = [view.host_victim_at.get((r.until.seq, r.node, r.end)) for r in gone if r.until is not None]
    evictions = [one[0] for one in found if one is not None]
    if not evictions:
        return ""
    last = max(evictions, key=lambda eviction: eviction.end.seq)
    cause = Cause.NAMES.get(last.cause, "unknown")
    return f", displaced by the {cause}" + (f" of request {last.rid}" if last.rid else "")
