"""What a claim is about where a model has more state than full-attention KV.

Every link speaks of the anchor pool: full-attention KV, token by token. A hybrid model also has recurrent states
or sliding-window KV, in host pools of their own. Whether those came back is not recorded event by event, so a
claim about such an instance says what it is about, and what it leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import Grade, Reason, RequestVerdict, Tier

_CLAIMS = (Grade.CONFIRMED, Grade.VERIFIED)


def beside_kv(instance: InstanceFacts) -> tuple[str, ...]:
    """The names of the host pools that no claim covers."""
    return tuple(pool.name for pool in instance.facts.instance.pools if pool.pool != 0)


def scoped(verdicts: Sequence[RequestVerdict], instances: Sequence[InstanceFacts]) -> tuple[RequestVerdict, ...]:
    """The verdicts; claims on instances with further pools say that they are about full-attention KV."""
    known = {instance.instance: instance for instance in instances}
    return tuple(_scoped(verdict, known.get(verdict.instance)) for verdict in verdicts)


def _scoped(verdict: RequestVerdict, instance: InstanceFacts | None) -> RequestVerdict:
    beside = beside_kv(instance) if instance is not None else ()
    claims = any(r.grade in _CLAIMS and r.tier is not Tier.RECOMPUTED for r in verdict.ranges)
    if instance is None or not beside or not claims:
        return verdict
    absent = _left_behind(verdict, instance, beside)
    left_out = ", ".join(beside)
    unjudged = ", ".join(name for name in beside if name not in absent)
    notes = list(verdict.notes)
    sentence = f"{verdict.sentence} (full-attention KV only, not {left_out}"
    if absent:
        names = ", ".join(absent)
        sentence += f"; state_incomplete: {names}"
        notes.append(
            f"state_incomplete: {names} did not come back: what was copied from L2 was the bytes of the full-attention "
            "KV and no others"
        )
    if unjudged:
        notes.append(
            f"claims are about full-attention KV only: whether the state in {unjudged} was reused is not judged"
        )
    return msgspec.structs.replace(
        verdict,
        sentence=f"{sentence})",
        notes=tuple(notes),
        reason=Reason.STATE_INCOMPLETE if absent else verdict.reason,
    )


def _left_behind(verdict: RequestVerdict, instance: InstanceFacts, beside: Sequence[str]) -> tuple[str, ...]:
    """The draft model's pools of which an L2 read brought nothing back.

    They hold KV for every token that the anchor pool does, so that both leave L1 and have to come back together; the
    window of sliding-window KV and a recurrent state can have stayed in L1. SGLang counts the bytes of all pools since
    0.5.18; before, those of the anchor pool alone are known.
    """
    per_token = instance.facts.instance.bytes_per_token
    process = instance.facts.process
    release = (process.sglang if process is not None else None) or ""
    if verdict.tier is not Tier.L2 or per_token is None or not _counts_all_pools(release):
        return ()
    loads = verdict.load_backs
    if not loads or any(load.done_ns is None or load.bytes != load.transfer_tokens * per_token for load in loads):
        return ()
    return tuple(name for name in beside if name.startswith("draft"))


def _counts_all_pools(release: str) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:3])
    return len(numbers) == 3 and numbers >= (0, 5, 18)
