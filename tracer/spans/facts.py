"""Small readings of the ledger's facts that several kinds of spans share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Final

from kvwitness.patches.schema.events import Run
from kvwitness.tracer.ledger.facts import InstanceFacts, Moment
from kvwitness.tracer.spans import semconv as sc
from kvwitness.tracer.spans.spec import ResourceSpec, Value
from kvwitness.tracer.verdicts.places import width_of

_MAX_SLOT_RANGES: Final = 64
"""A fragmented pool gives a range per page; collectors refuse attributes without end."""


def known(values: Mapping[str, Value | None]) -> dict[str, Value]:
    """The attributes whose values were recorded."""
    return {name: value for name, value in values.items() if value is not None}


def slots(runs: tuple[Run, ...]) -> dict[str, Value]:
    """The attributes about host slots."""
    shown = tuple(f"{run.start}..{run.start + run.length}" for run in runs[:_MAX_SLOT_RANGES])
    return {sc.SLOTS: shown, sc.SLOT_RANGES: len(runs)} if runs else {}


def extent(start: int, end: int, tokens: int | None = None) -> dict[str, Value]:
    """The attributes about a token range; negative positions mean that they are not known."""
    if start < 0 or end < start:
        return {} if tokens is None else {sc.COUNT: tokens}
    return {sc.START: start, sc.END: end, sc.COUNT: end - start if tokens is None else tokens}


def duration(nanoseconds: int | None) -> float | None:
    """Seconds."""
    return None if nanoseconds is None else nanoseconds / 1e9


def seqs(first: Moment, last: Moment | None) -> dict[str, Value]:
    """The attributes that lead back to the journal."""
    return known({sc.FIRST_SEQ: first.seq, sc.LAST_SEQ: last.seq if last is not None else None})


def model_of(facts: InstanceFacts) -> str | None:
    """The served model's name, never a path of the machine."""
    arguments = facts.facts.arguments
    name = arguments.served_model_name or arguments.model_path
    return _without_folders(name) if name else None


def resource_of(facts: InstanceFacts, host: str | None) -> ResourceSpec:
    """Who recorded this journal."""
    ranks, process = facts.facts.ranks, facts.facts.process
    version = (process.sglang if process is not None else None) or None
    attributes: dict[str, Value | None] = {
        sc.SERVICE_NAME: sc.SERVICE,
        sc.SERVICE_INSTANCE: facts.instance,
        sc.SERVICE_VERSION: version,
        sc.SGLANG_VERSION: version,
        sc.PROCESS_PID: facts.pid,
        sc.HOST_NAME: host,
        sc.TP_RANK: ranks.tp_rank,
        sc.TP_SIZE: ranks.tp_size,
        sc.PP_RANK: ranks.pp_rank,
        sc.PP_SIZE: ranks.pp_size,
        sc.DP_RANK: ranks.dp_rank,
        sc.DP_SIZE: ranks.dp_size,
    }
    return ResourceSpec(facts.instance, known(attributes))


def expected_ranks(facts: InstanceFacts) -> int:
    """How many processes serve each request of this one together."""
    return width_of(facts.facts.ranks)


def pool_attributes(facts: InstanceFacts) -> dict[str, Value]:
    """What an epoch's span says about the cache."""
    said = facts.facts.instance
    return known(
        {
            sc.PAGE_SIZE: said.page_size,
            sc.CAPACITY_L1: said.device_tokens,
            sc.CAPACITY_L2: said.host_tokens,
            sc.WRITE_POLICY: said.write_policy or None,
        }
    )


def moments_of(facts: InstanceFacts) -> Iterator[Moment]:
    """Every moment that the ledger kept, in no order."""
    yield from filter(None, _moments_of(facts))


def _moments_of(facts: InstanceFacts) -> Iterator[Moment | None]:
    for epoch in facts.epochs:
        yield epoch.begin
    for request in facts.requests:
        yield from (request.queued, request.admitted, request.released)
        yield request.match.moment if request.match else None
        yield request.decision.moment if request.decision else None
        for chunk in request.chunks:
            yield from (chunk.moment, chunk.done)
    for backup in facts.backups:
        yield from (backup.queued, backup.started, backup.acked)
    for load in facts.loads:
        yield from (load.queued, load.started, load.done)
    for call in facts.evictions:
        yield from (call.begin, call.end, *(victim.moment for victim in call.victims))
    yield from (eviction.end for eviction in facts.host_evictions)
    yield from (rejection.moment for rejection in facts.rejections)
    for prefetch in facts.prefetches:
        yield from (prefetch.asked, prefetch.done)
    for residency in facts.residencies:
        yield from (residency.since, residency.until)


def _without_folders(name: str) -> str:
    """``Qwen/Qwen3-8B`` is a name; ``/data/models/x`` is where a machine keeps ``x``."""
    return PurePath(name).name if name.startswith(("/", ".", "~")) else name
