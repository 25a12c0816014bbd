"""Whether C sent A's prompt again, and from which token on it did not. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from kvwitness.tracer.ledger.chains import Chain, first_difference
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.report.load import Evidence
from kvwitness.tracer.verdicts.changed import tokens_in_words


def changed_prompts(evidence: Evidence) -> dict[str, str]:
    """By request id of C: where its prompt differs from that of the A of its round, in words.

    By the token ids where the bundle keeps them; else by the digests in the journals, which also tell what the server
    made of equal prompts (template, adapter, cache salt); else by the prompts' hashes, which tell no place.
    """
    chains = {rid: chain for instance in evidence.instances for rid, chain in instance.chains.items()}
    page = max((instance.facts.instance.page_size or 1 for instance in evidence.instances), default=1)
    found: dict[str, str] = {}
    for record in evidence.records:
        if record.series == "C" and (first := _first_asked(evidence, record)) is not None:
            where = _where(first, record, chains, page)
            if where is not None:
                found[record.rid] = f"request {record.rid} is not request {first.rid} again: {where}"
    return found


def _first_asked(evidence: Evidence, repeat: RequestRecord) -> RequestRecord | None:
    """The A of the same round; None where there is none, or several and nothing tells which."""
    asked = [one for one in evidence.records if one.series == "A" and one.round == repeat.round]
    return asked[0] if len({one.prompt_sha256 for one in asked}) == 1 else None


def _where(a: RequestRecord, c: RequestRecord, chains: Mapping[str, Chain], page: int) -> str | None:
    if a.prompt_ids and c.prompt_ids:
        pairs = enumerate(zip_longest(a.prompt_ids, c.prompt_ids))
        at = next((at for at, (mine, theirs) in pairs if mine != theirs), None)
        if at is not None:
            return f"it differs first in {tokens_in_words(at, at + 1, page)}"
    end = min(a.prompt_tokens, c.prompt_tokens)
    found = first_difference(chains.get(a.rid), chains.get(c.rid), end)
    if found is not None:
        return f"it differs first in {tokens_in_words(*found, page)}"
    if a.prompt_sha256 != c.prompt_sha256:
        return "another prompt was sent (by its hash), and where it differs is not recorded"
    return None
