"""The witnesses from outside that a bundle keeps, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from kvwitness.collectors.journal import Journal
from kvwitness.tracer.bundle.layout import WITNESSES
from kvwitness.tracer.bundle.source import Source, Unreadable
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.outside.agreement import Agreement, compare
from kvwitness.tracer.outside.kv_ledger import kv_ledger
from kvwitness.tracer.outside.records import FILES, Recording, parse_recording
from kvwitness.tracer.outside.statement import Statement, kv_lines, state

DERIVED: Final = "derived.json"


class Outside(msgspec.Struct, frozen=True):
    """What follows from a recording from outside; ``agreements`` where hooks recorded the same time."""

    statement: Statement
    agreements: tuple[Agreement, ...] = ()


def derive_outside(
    files: Mapping[str, bytes], journals: Sequence[Journal] = (), instances: Sequence[InstanceFacts] = ()
) -> Outside | None:
    """Derive it from the files of a recording, by name; None when there are none."""
    if not any(name in files for name in FILES):
        return None
    recording = parse_recording(files)
    return Outside(state(recording), tuple(_agreements(recording, journals, instances)))


def _agreements(
    recording: Recording, journals: Sequence[Journal], instances: Sequence[InstanceFacts]
) -> Iterator[Agreement]:
    by_rank = {ledger.rank: ledger for ledger in kv_ledger(kv_lines(recording))}
    names = {journal.instance: journal for journal in journals}
    for facts in instances:
        ranks = facts.facts.ranks
        # One rank of a group publishes for all of it: the others hold the same.
        if ranks.tp_rank or ranks.pp_rank:
            continue
        ledger = by_rank.get(ranks.dp_rank or 0)
        if ledger is not None and facts.instance in names:
            yield compare(names[facts.instance], facts, ledger)


def encode_outside(outside: Outside) -> bytes:
    """The bytes of ``witnesses/derived.json``."""
    return msgspec.json.format(msgspec.json.encode(outside), indent=2) + b"\n"


def witness_path(name: str) -> str:
    """Where the bundle keeps the file ``name`` of a recording."""
    return f"{WITNESSES}/{name}"


def witnesses_in(source: Source) -> dict[str, bytes]:
    """The files of the recording in an open bundle; what cannot be read is left out (the manifest check names it)."""
    found: dict[str, bytes] = {}
    for name in FILES:
        if witness_path(name) in source.names:
            try:
                found[name] = source.read(witness_path(name))
            except Unreadable:
                continue
    return found
