"""Which component's state can have kept a match from finding what L2 held of the full-attention KV."""

from __future__ import annotations

from kvwitness.tracer.ledger.facts import Moment, RequestFacts
from kvwitness.tracer.verdicts.view import InstanceView


def missing_component(
    view: InstanceView, request: RequestFacts, owners: set[str | None]
) -> tuple[str, tuple[Moment, ...]]:
    """In words, with the events: the component whose state was missing, or what is not known of each.

    A hybrid model's match ends where the state of one of its components (sliding window, recurrent) is in neither tier.
    """
    match = request.match
    assert match is not None
    pools = [p for p in view.instance.facts.instance.pools if p.pool != 0]
    if not pools:
        return "this instance keeps no state beside full-attention KV, so no component explains it", ()
    words: list[str] = []
    moments: list[Moment] = []
    for pool in pools:
        name = pool.name
        if not pool.hooked:
            words.append(f"whether its {name} state was in L2 is not recorded (that pool is not hooked)")
            continue
        before = match.moment.seq
        copies = [
            copy
            for copy in view.instance.states
            if copy.pool == pool.pool and copy.epoch == request.epoch
            and copy.rid in owners and copy.taken.seq < before
        ]  # fmt: skip
        gone = [copy.freed for copy in copies if copy.freed is not None and copy.freed.seq < before]
        if not copies:
            words.append(f"component {name} missing: no copy of its {name} state to L2 was recorded")
        elif gone:
            last = max(gone, key=lambda moment: moment.seq)
            what = "its" if len(gone) == len(copies) else "some of its"
            words.append(f"component {name} missing: {what} {name} state had left L2")
            moments.append(last)
        else:
            words.append(f"its {name} state was in L2 as well")
    return "; ".join(words), tuple(moments)
