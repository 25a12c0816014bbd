"""Facts made by hand, for what the recorded run does not show. Event n happens n milliseconds after the start."""

from __future__ import annotations

from typing import Any

import msgspec
from journal_tools import described

from kvwitness.patches.schema.events import PathNode, Run
from kvwitness.tracer.judgement import Judgement
from kvwitness.tracer.ledger.facts import (
    ChunkFact,
    DecisionFact,
    EpochFact,
    HostEviction,
    InstanceFacts,
    Load,
    LoadSegment,
    MatchFact,
    Moment,
    Prefetch,
    RequestFacts,
    Residency,
)
from kvwitness.tracer.verdicts.combine import combine
from kvwitness.tracer.verdicts.request import judge_request
from kvwitness.tracer.verdicts.view import InstanceView

WALL_NS = 1_700_000_000_000_000_000


def at(seq: int, kind: str = "Event") -> Moment:
    return Moment(seq, seq * 1_000_000, kind)


def wall(seq: int) -> int:
    return WALL_NS + seq * 1_000_000


def request(rid: str, queued: int, released: int | None, state: int | None = 1, **changes: Any) -> RequestFacts:
    """100 tokens, admitted and computed at once."""
    made = RequestFacts(
        rid=rid,
        attempt=1,
        epoch=1,
        prompt_tokens=100,
        queued=at(queued),
        match=None,
        decision=None,
        admitted=at(queued + 2),
        admitted_prefix=0,
        chunks=(ChunkFact(at(queued + 3), 1, 0, 100, True, at(queued + 4), 1),),
        loads=(),
        released=at(released) if released is not None else None,
        state=state if released is not None else None,
        output_tokens=4 if released is not None else None,
        cached_total=None,
        cached_device=None,
        cached_host=None,
        cached_storage=None,
        max_seq=released or queued + 4,
        prior_rid=None,
        prior_tokens=0,
        prior_epoch=0,
    )
    return msgspec.structs.replace(made, **changes)


def match(seq: int, device: int, host: int, *nodes: Any) -> MatchFact:
    path = (PathNode(5, 0, device + host, int(host == 0)),)
    return MatchFact(at(seq), device, host, 100, 5, path, nodes, 0, 0)


def instance(name: str = "scheduler-1-1", *, ranks: dict[str, Any] | None = None, **facts: Any) -> InstanceFacts:
    made = InstanceFacts(
        instance=name,
        role="scheduler",
        pid=1,
        monotonic_ns=0,
        wall_ns=WALL_NS,
        facts=described({"ranks": ranks or {}, "page_size": 16}),
        hooks=(),
        hook_failures={},
        requests=(),
        backups=(),
        evictions=(),
        host_evictions=(),
        loads=(),
        prefetches=(),
        residencies=(),
        epochs=(EpochFact(1, at(1)),),
        gaps=(),
        anomalies=(),
        closed=False,
        first_seq=1,
        last_seq=100,
    )
    return msgspec.structs.replace(made, **facts)


def judged(*instances: InstanceFacts) -> Judgement:
    verdicts = [judge_request(InstanceView(one), request, ()) for one in instances for request in one.requests]
    return Judgement(instances, combine(verdicts, instances))


def load(number: int, rid: str | None, origin: int, done: int | None, **changes: Any) -> Load:
    """Tokens 0 to 64, whose slots prefetch ``origin`` filled."""
    made = Load(
        id=number,
        epoch=1,
        rid=rid,
        node=5,
        start=0,
        end=64,
        tokens=64,
        slots=(Run(0, 64),),
        queued=at(number),
        started=at(number + 1),
        done=at(done) if done is not None else None,
        transfer=1,
        transfer_tokens=64,
        transfer_bytes=64_000,
        duration_ns=2_500_000,
        backups=(),
        segments=(LoadSegment(0, 64, "prefetch", origin, usable=True, aligned=True, same_prefix=True, digest_to=64),),
        freed_while_loading=False,
    )
    return msgspec.structs.replace(made, **changes)


def prefetch(rid: str | None, asked: int, done: int) -> Prefetch:
    return Prefetch(rid, 1, 0, 64, 0, 64, False, (Run(0, 64),), at(asked), at(done))


def l2(since: int, until: int | None) -> Residency:
    return Residency("L2", 1, "L", -1, 0, 64, at(since), at(until) if until else None, None, (Run(0, 64),))


def refused(seq: int, reason: int) -> DecisionFact:
    return DecisionFact(at(seq), 5, promised=64, loaded=0, wanted=64, reason=reason)


def host_eviction(rid: str | None, end: int) -> HostEviction:
    runs = tuple(Run(2 * i, 1) for i in range(100))
    return HostEviction(1, 1, 3, rid, 64, 100, runs, at(end))
