"""Random workloads, as a Hypothesis state machine."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model import truth
from model.engine import Engine

_BASES = tuple(tuple(random.Random(seed).randrange(1, 1000) for _ in range(300)) for seed in range(4))
"""Prompts that requests share a beginning of."""
_REQUEST = st.tuples(
    st.integers(0, len(_BASES) - 1),
    st.integers(1, 70),
    st.integers(0, 2),
    st.sampled_from((0, 0, 1, 3, 9, 30)),
    st.sampled_from((1, 1, 2, 5, 20)),
)
"""Base, how much of it, branch, how much of that, tokens to generate."""
_MOST_STEPS = 400


class Workload(RuleBasedStateMachine):
    """Requests whose prefixes share, diverge and split, in pools that are too small for them.

    ``engine`` and ``tally`` are set by whoever runs it: there is one scheduler in a process.
    """

    engine: Engine
    tally: truth.Tally

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.scale = 4 if self.engine.settings.page_size >= 16 else 1
        """Prompts are as long as the pools are large."""
        self.sent: list[str] = []
        self.broken = False

    @initialize()
    def begin(self) -> None:
        self.engine.begin()

    def _open(self) -> set[str]:
        return {req.rid for req in self.engine.open_requests() if not req.finished()}

    # --- rules ---------------------------------------------------------------------------------------

    @rule(asked=st.lists(_REQUEST, min_size=1, max_size=4), steps=st.integers(0, 6))
    def send(self, asked: list[tuple[int, int, int, int, int]], steps: int) -> None:
        """Requests that arrive together: each the first tokens of a base, and some of one of three branches."""
        for base, keep, branch, more, new_tokens in asked:
            behind = tuple(random.Random(100 * base + branch).randrange(1, 1000) for _ in range(more))
            self._send((*_BASES[base][: keep * self.scale], *behind), new_tokens)
        self.run(steps)

    def _send(self, tokens: tuple[int, ...], new_tokens: int) -> None:
        self.count += 1
        rid = f"r{self.count}"
        self.sent.append(rid)
        self.engine.send(rid, tokens, new_tokens)

    @rule(which=st.integers(0, 30), more=st.sampled_from((0, 1, 5)))
    @precondition(lambda self: self.sent)
    def again(self, which: int, more: int) -> None:
        """The prompt of an earlier request, and what it was answered: the next turn of a conversation."""
        known = [rid for rid in self.sent if rid in self.engine.requests]
        if not known:
            return
        req = self.engine.requests[known[which % len(known)]]
        tokens = (*req.origin_input_ids, *req.output_ids)[: 70 * self.scale]
        self._send((*tokens, *range(1, 1 + more)), 2)
        self.run(3)

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            self._agree()

    @rule()
    def run_until_idle(self) -> None:
        self._drain()

    @rule()
    def retract(self) -> None:
        """SGLang's own test switch: as if decoding ran out of memory."""
        self.engine.step(retract=True)

    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        running = sorted(self._open())
        if running:
            self.engine.abort(running[which % len(running)])

    @rule()
    @precondition(lambda self: self.engine.idle)
    def flush(self) -> None:
        self.engine.flush()

    # --- checks --------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self._agree()

    def _agree(self) -> None:
        if self.broken or not hasattr(self.engine, "device"):
            return
        found = truth.differences(self.engine)
        self.tally.checks += 1
        if found:
            self.broken = True
            raise AssertionError("\n".join(found[:6]))

    def _drain(self) -> None:
        for _ in range(_MOST_STEPS):
            if self.engine.idle:
                return
            self.engine.step()
            if not self.broken:
                self._agree()
        raise AssertionError(f"not idle after {_MOST_STEPS} steps")

    def teardown(self) -> None:
        if self.broken:
            for rid in self._open():
                self.engine.abort(rid)
        self._drain()
        if not self.broken:
            assert not (refused := truth.count(self.engine, self.tally)), "\n".join(refused[:6])
