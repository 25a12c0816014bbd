"""The place of a rank in its server, and which places a server consists of. Pure functions over what one rank says."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import Final

from kvwitness.tracer.ledger.described import Ranks

Place = tuple[int, int, int]
"""Data-parallel, pipeline-parallel and tensor-parallel rank."""

_MOST: Final = 1 << 16
"""No server has more ranks: whoever says so is not believed."""


def share_ranks(ranks: Ranks) -> bool:
    """Data-parallel attention: the replicas share the ranks of the tensor-parallel group."""
    return (ranks.attn_tp_size or 0) not in (0, ranks.tp_size or 1)


def sizes_of(ranks: Ranks) -> Place:
    """How many places there are in each dimension."""
    dp = 1 if share_ranks(ranks) else ranks.dp_size or 1
    return dp, ranks.pp_size or 1, ranks.tp_size or 1


def place_of(ranks: Ranks) -> Place | None:
    """Where a rank is; None where it is one of several and does not say which, or says what cannot be."""
    sizes = sizes_of(ranks)
    if min(sizes) < 1 or prod(sizes) > _MOST or (share_ranks(ranks) and not 0 < (ranks.attn_tp_size or 0) <= sizes[2]):
        return None
    said = (ranks.dp_rank, ranks.pp_rank, ranks.tp_rank)
    dp, pp, tp = (0 if size == 1 else -1 if rank is None else rank for size, rank in zip(sizes, said, strict=True))
    return (dp, pp, tp) if all(0 <= at < size for at, size in zip((dp, pp, tp), sizes, strict=True)) else None


def places_of(ranks: Ranks) -> frozenset[Place]:
    """All places of a rank's server; none where it does not know its own."""
    if place_of(ranks) is None:
        return frozenset()
    dp, pp, tp = sizes_of(ranks)
    return frozenset(product(range(dp), range(pp), range(tp)))


def replica_of(ranks: Ranks) -> frozenset[Place]:
    """The places that serve each request of this rank together; none where it does not know its own."""
    place = place_of(ranks)
    if place is None:
        return frozenset()
    _, pp, tp = sizes_of(ranks)
    first, width = 0, tp
    if share_ranks(ranks):
        width = ranks.attn_tp_size or tp
        first = place[2] // width * width
    return frozenset(product((place[0],), range(pp), range(first, first + width)))


def width_of(ranks: Ranks) -> int:
    """How many ranks serve each request of this one together."""
    return (ranks.attn_tp_size or ranks.tp_size or 1) * (ranks.pp_size or 1)


def named(missing: Iterable[Place], expected: Iterable[Place]) -> str:
    """Ranks by the names of the dimensions in which there are several: ``dp 1, tp 0``."""
    wide = [i for i in range(3) if len({place[i] for place in expected}) > 1]
    names = ("dp", "pp", "tp")
    return "; ".join(", ".join(f"{names[i]} {place[i]}" for i in wide) for place in sorted(missing))
