"""The ledger and the verdicts, held against what the pools hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from soundness.compare import compare

from kvwitness.collectors.journal import Journal, read_journal
from kvwitness.patches.digests import grid_for
from kvwitness.patches.schema.events import ReleaseState
from kvwitness.tracer.judgement import Judgement, judge
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import Grade, RangeVerdict, RequestVerdict, Tier
from model.engine import Engine, Prefix

_CLAIMED = (Grade.CONFIRMED, Grade.VERIFIED)


@dataclass
class Tally:
    """What a run saw: an agreement on nothing would show nothing."""

    workloads: int = 0
    checks: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    """Reused tokens that are not confirmed, by what the product says is missing."""


def differences(engine: Engine) -> list[str]:
    """Where the product's word differs from the pools, right now."""
    journal = read_journal(engine.journal())
    judgement = judge([journal])
    (instance,) = judgement.instances
    return [
        *(f"the journal has a gap: {gap}" for gap in journal.gaps),
        *(f"the ledger has a gap: {gap}" for gap in instance.gaps),
        *(f"anomaly: {text}" for text in instance.anomalies),
        *_l1(engine, instance),
        *_l2(engine, instance),
        *_claims(engine, judgement),
    ]


def _epoch(instance: InstanceFacts) -> int:
    return max((epoch.index for epoch in instance.epochs), default=0)


def _l1(engine: Engine, instance: InstanceFacts) -> Iterator[str]:
    epoch = _epoch(instance)
    told: dict[Prefix, str] = {}
    for r in instance.residencies:
        if r.tier == "L1" and r.until is None and r.epoch == epoch:
            if r.owner is None:
                yield f"L1: nobody knows whose node {r.node} is"
                continue
            for position, prefix in enumerate(engine.patterns(r.owner)[r.start : r.end], start=r.start):
                told[prefix] = f"node {r.node} of {r.owner}, position {position}"
    slots = engine.in_device()
    for prefix in told.keys() - set(slots.values()):
        yield f"L1: the ledger holds {told[prefix]}, the pool does not"
    loading: set[Prefix] = set()
    for load in instance.loads:
        if load.done is None and load.epoch == epoch and load.rid in engine.requests:
            loading.update(engine.patterns(load.rid)[load.start : load.end])
    if loading and not engine.copying:
        yield "L1: a load-back is over, and the ledger waits for its end"
    if engine.settings.page_size % grid_for(engine.settings.page_size):
        # A split inside a digest cell leaves a part whose prefix no digest shows: the ledger knows that it does not
        # know it, and confirms nothing of it. Whole cells have to be known.
        return
    own = engine.rows()
    for slot, prefix in slots.items():
        if slot not in own and prefix not in told and prefix not in loading:
            yield f"L1: slot {slot} holds {_whose(engine, prefix)}, and the ledger does not know it"


def _l2(engine: Engine, instance: InstanceFacts) -> Iterator[str]:
    epoch, slots = _epoch(instance), engine.in_host()
    known: set[int] = set()
    for r in instance.residencies:
        if r.tier != "L2" or r.until is not None or r.epoch != epoch:
            continue
        if r.owner is None:
            yield f"L2: nobody knows whose node {r.node} is"
            continue
        numbers = [slot for run in r.slots for slot in range(run.start, run.start + run.length)]
        for slot, prefix in zip(numbers, engine.patterns(r.owner)[r.start : r.end], strict=True):
            known.add(slot)
            if slots.get(slot) != prefix:
                yield f"L2: slot {slot} is told to hold {_whose(engine, prefix)}, and does not"
    writing: set[int] = set()
    for backup in instance.backups:
        if backup.acked is None and backup.epoch == epoch:
            writing.update(s for run in backup.slots for s in range(run.start, run.start + run.length))
    writing -= known
    if writing & slots.keys() and not engine.copying:
        yield "L2: a backup is over, and the ledger waits for its end"
    for slot in slots.keys() - known - writing:
        yield f"L2: slot {slot} holds {_whose(engine, slots[slot])}, and the ledger does not know it"


def _whose(engine: Engine, prefix: Prefix) -> str:
    """A prefix in words, for a message."""
    for rid in engine.requests:
        patterns = engine.patterns(rid)
        if prefix in patterns:
            return f"position {patterns.index(prefix)} of {rid}"
    return "what no request has"


def _claims(engine: Engine, judgement: Judgement) -> Iterator[str]:
    """What is claimed of each request against the bytes that its forward pass found in L1."""
    for verdict in judgement.verdicts:
        served = engine.served.get(verdict.rid)
        for r in verdict.ranges:
            if r.tier is Tier.RECOMPUTED:
                if served is not None and r.grade is Grade.RECOMPUTED and r.start < len(served.tokens):
                    yield f"{verdict.rid}: [{r.start}, {r.end}) is called recomputed, {len(served.tokens)} were reused"
                continue
            if r.grade not in _CLAIMED:
                continue
            said = f"{verdict.rid}: {r.tier.value} [{r.start}, {r.end}) is confirmed"
            if served is None or r.end > len(served.right):
                yield f"{said}, and was not reused"
                continue
            if not all(served.right[r.start : r.end]):
                yield f"{said}, and other bytes were there"
            if set(served.copied[r.start : r.end]) != {r.tier is Tier.L2}:
                yield f"{said}, and came from the other tier"


def count(engine: Engine, tally: Tally) -> list[str]:
    """After a workload: add up what it showed; what the oracle does not confirm and the product does."""
    journal = read_journal(engine.journal())
    judgement = judge([journal])
    (instance,) = judgement.instances
    tally.workloads += 1
    tally.counts["events"] += len(journal.events)
    tally.counts["L1 evictions"] += sum(len(call.victims) for call in instance.evictions)
    tally.counts["L2 evictions"] += len(instance.host_evictions)
    for request in instance.requests:
        state = {ReleaseState.ABORTED: "aborted", ReleaseState.RETRACTED: "retracted"}.get(request.state or 0)
        tally.counts["requests" if state is None else state] += 1
    last = {verdict.rid: verdict for verdict in judgement.verdicts}
    for verdict in last.values():
        for r in verdict.ranges:
            _add(tally, verdict, r)
    return [f"the oracle refuses: {difference}" for difference in _refused(journal)]


def _refused(journal: Journal) -> Iterator[str]:
    for difference in compare(list(journal.events)).false:
        yield str(difference)


def _add(tally: Tally, verdict: RequestVerdict, r: RangeVerdict) -> None:
    if r.grade in _CLAIMED:
        tally.counts[f"tokens confirmed {r.tier.value}"] += r.tokens
    elif r.tier is Tier.RECOMPUTED:
        tally.counts["tokens recomputed"] += r.tokens
    elif r.tier in (Tier.L1, Tier.L2):
        missing = ", ".join(sorted({link.link.value for link in r.missing})) or r.reason.value
        tally.missed[f"{r.tier.value}: {missing}"] += r.tokens
