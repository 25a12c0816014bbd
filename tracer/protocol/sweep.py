"""Which prefix lengths a sweep goes through."""

from __future__ import annotations

from typing import Final

from kvwitness.collectors.server_info import ServerInfo

LENGTHS: Final = 6
_SHORTEST: Final = 64
_POOL_WITHOUT_SIZE: Final = 8192


def default_lengths(server: ServerInfo, behind: int) -> tuple[int, ...]:
    """Lengths in whole pages, each by the same factor longer, up to half of L1; ``behind`` tokens follow a prefix.

    Raises ``ValueError`` where L1 is too small for that.
    """
    page = server.page_size or 1
    pool = server.max_total_num_tokens or _POOL_WITHOUT_SIZE
    longest = min(pool // 2, server.max_req_input_len or pool) - behind - page
    shortest = max(2 * page, _SHORTEST)
    if longest < 2 * shortest:
        raise ValueError(f"L1 holds {pool} tokens, which is too few for lengths to compare")
    factor = (longest / shortest) ** (1 / (LENGTHS - 1))
    return tuple(dict.fromkeys(round(shortest * factor**step) // page * page for step in range(LENGTHS)))


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths as a user writes them. Raises ``ValueError``."""
    try:
        found = tuple(dict.fromkeys(int(one) for one in text.split(",")))
    except ValueError as error:
        raise ValueError(f"{text!r} is no list of numbers") from error
    if len(found) < 2 or min(found) < 1:
        raise ValueError("a sweep needs two lengths of at least one token")
    return tuple(sorted(found))
