"""What a claim is about where a model has more state than full-attention KV.

Every link speaks of the anchor pool: full-attention KV, token by token. A hybrid model also has recurrent states
or sliding-window KV, in host pools of their own. Whether those came back is not recorded event by event, so a
claim about such an instance says what it is about, and what it leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import Grade, RequestVerdict, Tier

_CLAIMS = (Grade.CONFIRMED, Grade.VERIFIED)


def beside_kv(instance: InstanceFacts) -> tuple[str, ...]:
    """The names of the host pools that no claim covers."""
    pools = instance.facts.get("pools") or ()
    return tuple(str(pool.get("name", "?")) for pool in pools if pool.get("pool") != 0)


def scoped(verdicts: Sequence[RequestVerdict], instances: Sequence[InstanceFacts]) -> tuple[RequestVerdict, ...]:
    """The verdicts; claims on instances with further pools say that they are about full-attention KV."""
    beside = {instance.instance: beside_kv(instance) for instance in instances}
    return tuple(_scoped(verdict, beside.get(verdict.instance, ())) for verdict in verdicts)


def _scoped(verdict: RequestVerdict, beside: tuple[str, ...]) -> RequestVerdict:
    claims = any(r.grade in _CLAIMS and r.tier is not Tier.RECOMPUTED for r in verdict.ranges)
    if not beside or not claims:
        return verdict
    left_out = ", ".join(beside)
    note = f"claims are about full-attention KV only: whether the state in {left_out} was reused is not judged"
    return msgspec.structs.replace(
        verdict,
        sentence=f"{verdict.sentence} (full-attention KV only, not {left_out})",
        notes=(*verdict.notes, note),
    )
