"""Every field of every kind of event, bent one at a time in a healthy record of every generation.

A bent field is seen (something contradicts it), or lowers what is said, or the record is as possible with it: then the
field is named here with the reason. Whatever becomes of it, it raises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import pytest
from soundness.compare import CLAIMED, journal_as_read
from soundness.fields import single_field_mutants

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.rules.fields import FREE
from rules.cases import RECORDED, SIMULATED, record

SMALL = 450
"""Events: a longer record of a generation that others are of as well adds time, and no field."""
HEALTHY = [name for name in (*RECORDED, *(f"{kind}/0" for kind in SIMULATED)) if len(record(name)) < SMALL]

AS_POSSIBLE = {
    "a prompt, an output or a page that no other one is compared with may have any digest": (
        "BackupDigested.digests* LoadDigested.digests* PrefixDigests.digests* PrefixPoint.digests* "
        "ResidentDigests.digests* BackupDigested.slot"
    ),
    "a condition of the run: shown, and alike on the ranks of a group": (
        "Facts.json.arguments* Facts.json.components* Facts.json.host_memory_mode Facts.json.io_backend "
        "Facts.json.layout Facts.json.load_back_threshold Facts.json.pools* Facts.json.storage "
        "Facts.json.storage_policy Facts.json.tree_c* Facts.json.write_*"
    ),
    "which start, host, release and rank it was: compared between ranks, and here is one": (
        "Facts.json.host Facts.json.key Facts.json.start Facts.json.role Facts.json.sglang Facts.json.ranks*"
    ),
    "what limits events: a limit that none of these events comes to is as possible": (
        "Facts.json.bytes_per_token Facts.json.copy_threads Facts.json.device_tokens Facts.json.digest_every "
        "Facts.json.family Facts.json.host_tokens Facts.json.layers"
    ),
    "words and numbers for people": (
        "Facts.json.pause_us Facts.json.snapshot* StorageChanged.message WeightsUpdated.kind WeightsUpdated.label"
    ),
    "told again by a later event, or read for a link that nothing here is confirmed by": (
        "Facts.json.hooks* Facts.kind Matched.purpose Matched.key_tokens Matched.mamba_host Matched.swa_host "
        "SnapshotEnd.complete ResidentNode.parent TransferStarted.bytes"
    ),
    "what was asked for and why: of no claim, and what followed is held against its own event": (
        "BackupQueued.write_back EvictBegin.asked* EvictBegin.cause EvictBegin.reqs* EvictHost.asked EvictHost.call "
        "EvictHost.freed HostFree.req L1Room.free LoadBackDecided.reason LoadBackDecided.wanted "
        "LoadDone.duration_ns PrefetchAsked.* PrefetchDone.deadline PrefetchRevoked.reason PrefetchStopped.*"
    ),
    "of a node, an attempt or a request that nothing is confirmed of and no later event comes back to": (
        "AbortedInQueue.req Admission.end Admission.prefix Admission.req BackupRejected.* EvictedL1.how "
        "EvictedL1.node HostFree.slots* Inserted.existing Inserted.req LoadBackDecided.req Matched.req "
        "PrefetchDone.loaded PrefixDigests.req PrefixPoint.position Queued.retracted Released.req Released.state "
        "Reset.kind StorageBack* StorageChanged.* StorageLookedUp.*"
    ),
    "what the server counts: where it differs a claim is lowered, and this release or this request has none": (
        "Released.cached_* Released.output_tokens"
    ),
    "a change of the weights after which nothing is confirmed": "WeightsUpdated.flushed WeightsUpdated.ok",
}
"""Why a record with another value of these fields is as possible as the one that was recorded."""


def outcome(events: Sequence[ev.Event]) -> tuple[dict[object, object], object, set[tuple[object, ...]]]:
    """What is said of each request; what contradicts or is missing; and each token that a tier is claimed for."""
    judged = judge([journal_as_read(events)])
    (instance,) = judged.instances
    said: dict[object, object] = {}
    claims: set[tuple[object, ...]] = set()
    for verdict in judged.verdicts:
        who = verdict.attempt, verdict.queued_ns
        said[(verdict.rid, who)] = verdict.tier, verdict.grade, verdict.reason, verdict.tokens, verdict.sentence
        for part in verdict.ranges:
            if part.grade in CLAIMED:
                claims |= {(who, part.tier, at) for at in range(part.start, part.end)}
    return said, (instance.contradictions, instance.gaps), claims


@pytest.mark.parametrize("name", HEALTHY)
def test_a_bent_field_is_seen_or_lowers_or_is_as_possible(name: str) -> None:
    events = record(name)
    first = {type(event).__name__ + str(getattr(event, "kind", "")): at for at, event in reversed([*enumerate(events)])}
    said, seen, claims = outcome(events)
    unseen: set[str] = set()
    for mutant, change in single_field_mutants(events, elements=2, only=set(first.values())):
        now = outcome(mutant)
        assert now[2] <= claims, change.words
        if now[:2] == (said, seen) and change.field not in ("seq", "t_ns"):
            unseen.add(f"{change.kind}.{change.field}")
    free = {f"{kind.__name__}.{field}" for kind, fields in FREE.items() for field in fields}
    allowed = (*free, *(field for fields in AS_POSSIBLE.values() for field in fields.split()))
    assert {field for field in unseen if not any(fnmatchcase(field, each) for each in allowed)} == set()
