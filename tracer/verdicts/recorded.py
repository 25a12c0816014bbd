"""Who recorded, and who did not: the way in to each scheduler, and the ranks of a server of which there is no journal.

Pure functions over what the schedulers said of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Final

import msgspec

from kvwitness.tracer.ledger.described import Ranks
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import RequestVerdict

_LIVE: Final = "recorded since kvwitness went into "
LEFT_OUT: Final = "not recorded: "

Place = tuple[int, int, int]
"""Data-parallel, pipeline-parallel and tensor-parallel rank."""


def share_ranks(ranks: Ranks) -> bool:
    """Data-parallel attention: the replicas share the ranks of the tensor-parallel group."""
    return (ranks.attn_tp_size or 0) not in (0, ranks.tp_size or 1)


def places(instances: Iterable[InstanceFacts]) -> tuple[set[Place], set[Place]]:
    """The ranks that the servers of ``instances`` consist of, and those that recorded.

    Both are empty where one of several ranks does not say which one it is.
    """
    expected: set[Place] = set()
    seen: set[Place] = set()
    for instance in instances:
        ranks = instance.facts.ranks
        dp = 1 if share_ranks(ranks) else ranks.dp_size or 1
        sizes = (dp, ranks.dp_rank), (ranks.pp_size or 1, ranks.pp_rank), (ranks.tp_size or 1, ranks.tp_rank)
        if any(size > 1 and rank is None for size, rank in sizes):
            return set(), set()
        expected.update(product(range(dp), range(sizes[1][0]), range(sizes[2][0])))
        own = [rank or 0 if size > 1 else 0 for size, rank in sizes]
        seen.add((own[0], own[1], own[2]))
    return expected, seen


def named(missing: Iterable[Place], expected: Iterable[Place]) -> str:
    """Ranks by the names of the dimensions in which there are several: ``dp 1, tp 0``."""
    wide = [i for i in range(3) if len({place[i] for place in expected}) > 1]
    names = ("dp", "pp", "tp")
    return "; ".join(", ".join(f"{names[i]} {place[i]}" for i in wide) for place in sorted(missing))


def ranks_left_out(instances: Sequence[InstanceFacts]) -> str:
    """The names of the ranks that no journal is of; "" where all recorded, or it cannot be told."""
    expected, seen = places(instances)
    return named(expected - seen, expected)


def noted(verdicts: Sequence[RequestVerdict], instances: Sequence[InstanceFacts]) -> tuple[RequestVerdict, ...]:
    """The verdicts, with what their server's schedulers owe to a way in, and which of them did not record."""
    left_out = ranks_left_out(instances)
    ways = {instance.instance: _way_in(instance) for instance in instances}
    return tuple(_noted(verdict, ways.get(verdict.instance, ""), left_out) for verdict in verdicts)


def _noted(verdict: RequestVerdict, way_in: str, left_out: str) -> RequestVerdict:
    added = tuple(filter(None, (way_in, f"{LEFT_OUT}{left_out}, nor what it served" if left_out else "")))
    return msgspec.structs.replace(verdict, notes=(*verdict.notes, *added)) if added else verdict


def _way_in(instance: InstanceFacts) -> str:
    attached = instance.facts.attach
    if attached is None or attached.way != "live":
        return ""
    stopped = attached.stopped_us or 0
    stood = f"it stood still for {stopped / 1e6:.2f} s" if stopped else "it was not stopped"
    return f"{_LIVE}{instance.instance} while it served ({attached.tool or 'unknown tool'}): {stood}"


def about_the_recording(verdicts: Iterable[RequestVerdict]) -> tuple[str, ...]:
    """The notes of :func:`noted`, each once."""
    notes = dict.fromkeys(note for verdict in verdicts for note in verdict.notes)
    return tuple(note for note in notes if note.startswith((_LIVE, LEFT_OUT)))
