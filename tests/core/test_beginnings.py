"""Nodes by what they begin with: the short way to a node finds each one that the long way finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvwitness.tracer.ledger.beginnings import Beginnings
from kvwitness.tracer.ledger.chains import Chain, shared_prefix

GRID = 4


def sequence(tokens: list[int], digested: int, points: list[int]) -> Chain:
    """Digests of a sequence, as far as they were recorded: here the tokens themselves."""
    cells = [bytes(tokens[: end + GRID]) for end in range(0, len(tokens) - GRID + 1, GRID)]
    return Chain("r", GRID, cells[:digested], {at: bytes(tokens[:at]) for at in points if at <= len(tokens)})


SEQUENCES = st.one_of(
    st.none(),
    st.builds(
        sequence,
        st.lists(st.integers(0, 1), min_size=0, max_size=16),
        st.integers(0, 4),
        st.lists(st.integers(1, 16), max_size=2),
    ),
    st.just(Chain("r")),
)
POOL = st.lists(SEQUENCES, min_size=1, max_size=6)
"""Several nodes are of one sequence, and so is what is asked for."""
PLACES = st.tuples(st.integers(0, 8), st.integers(0, 5))


@given(
    pool=POOL,
    nodes=st.lists(PLACES, max_size=12),
    moved=st.lists(st.tuples(st.integers(0, 11), PLACES), max_size=4),
    gone=st.sets(st.integers(0, 11), max_size=3),
    grown=st.booleans(),
    which=st.integers(0, 5),
    start=st.integers(0, 8),
    length=st.integers(1, 8),
)
def test_no_node_that_the_digests_show_to_be_equal_is_left_out(
    pool: list[Chain | None],
    nodes: list[tuple[int, int]],
    moved: list[tuple[int, tuple[int, int]]],
    gone: set[int],
    grown: bool,
    which: int,
    start: int,
    length: int,
) -> None:
    def place(at: int, number: int) -> tuple[int, Chain | None]:
        return at, pool[number % len(pool)]

    asked = pool[which % len(pool)]
    beginnings, there = Beginnings(), {number: place(*one) for number, one in enumerate(nodes)}
    for number, one in there.items():
        beginnings.put(number, *one)
    for number, (at, of) in moved:
        if number in there:
            there[number] = place(at, of)
            beginnings.put(number, *there[number])
    for number in gone & set(there):
        del there[number]
        beginnings.drop(number)
    if grown and asked is not None and asked.grid:
        # Digests of what is generated come when the node is there already.
        for _, chain in there.values():
            if chain is not None and chain.grid and chain.cells == asked.cells[: len(chain.cells)]:
                chain.cells.extend(asked.cells[len(chain.cells) :])
    end = start + length
    found = set(beginnings.like(start, end, asked))
    assert found <= {number for number, (at, _) in there.items() if at == start}
    for number, (at, chain) in there.items():
        shared = shared_prefix(asked, chain, end)
        if at == start and shared is not None and shared > start:
            assert number in found


def test_of_hundreds_only_those_with_the_same_page_are_looked_at() -> None:
    beginnings = Beginnings()
    for number in range(200):
        beginnings.put(number, 0, sequence([number] * 8, 2, []))
    assert list(beginnings.like(0, 8, sequence([7] * 8, 2, []))) == [7]
    beginnings.drop(7)
    assert list(beginnings.like(0, 8, sequence([7] * 8, 2, []))) == []
    beginnings.clear()
    assert list(beginnings.like(0, 8, sequence([8] * 8, 2, []))) == []
