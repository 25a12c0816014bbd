"""The prompts of one instance by their digests: which were sent before, and which end where."""

from __future__ import annotations

from collections import defaultdict

from kvwitness.tracer.ledger.facts import InstanceFacts, RequestFacts


class PromptIndex:
    """Built once per instance, in the order of the requests' queueing."""

    def __init__(self, instance: InstanceFacts) -> None:
        self._chains = instance.chains
        self._first: dict[tuple[int, bytes], int] = {}
        """Length and digest of a whole prompt -> the event that first queued it."""
        self._tails: dict[bytes, dict[int, dict[bytes, int]]] = defaultdict(lambda: defaultdict(dict))
        """Last whole cell -> lengths of the prompts that end behind it -> their digests -> that event."""
        for request in instance.requests:
            chain = instance.chains.get(request.rid)
            length = request.prompt_tokens
            digest = chain.points.get(length) if chain is not None else None
            if chain is None or digest is None:
                continue
            queued = request.queued.seq
            self._first.setdefault((length, digest), queued)
            if chain.cells and len(chain.cells) * chain.grid <= length:
                self._tails[chain.cells[-1]][length].setdefault(digest, queued)

    def may_continue(self, request: RequestFacts, common: int) -> bool:
        """Whether an earlier prompt is this one, or may be a beginning of it, beyond its first ``common`` tokens."""
        chain, before = self._chains.get(request.rid), request.queued.seq
        if chain is None or not chain.grid:
            return False
        own = chain.points.get(request.prompt_tokens)
        if own is not None and self._first.get((request.prompt_tokens, own), before) < before:
            return True
        cell = common // chain.grid - 1
        tails = self._tails.get(chain.cells[cell], {}) if 0 <= cell < len(chain.cells) else {}
        for length, digests in tails.items():
            if length <= common:
                continue
            point = chain.points.get(length)
            seen = digests.values() if point is None else (digests[point],) if point in digests else ()
            if any(queued < before for queued in seen):
                return True
        return False
