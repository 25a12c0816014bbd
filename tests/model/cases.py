"""Situations by name, provoked on SGLang's own scheduler: what the product says of each is printed for the tests.

Page 16, L1 of 384 tokens, L2 of twice that, write_through, Rust core. A prompt of 161 tokens leaves 160 in the cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import Judgement, judge
from model import truth
from model.engine import Engine

A = tuple(random.Random("a").randrange(1, 1000) for _ in range(161))


def other(name: str, tokens: int = 161) -> tuple[int, ...]:
    """A prompt that shares nothing with any other."""
    return tuple(random.Random(name).randrange(1, 1000) for _ in range(tokens))


class Story:
    """A workload, and what comes of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.begin()

    def serve(self, rid: str, tokens: tuple[int, ...], new_tokens: int = 1) -> None:
        """One request, to its end and that of its copies."""
        self.engine.send(rid, tokens, new_tokens)
        self.finish()

    def finish(self) -> None:
        for _ in range(300):
            if self.engine.idle:
                return
            self.engine.step()
        raise AssertionError("not idle")

    def evict(self, prompts: int = 3) -> None:
        """Push what was there before out of L1; L2 keeps it."""
        for number in range(prompts):
            self.serve(f"fill{number}", other(f"fill{number}"))

    def judged(self) -> Judgement:
        assert not (found := truth.differences(self.engine)), found[:3]
        return judge([read_journal(self.engine.journal())])

    def events(self, kind: type[ev.Event]) -> list[Any]:
        return [event for event in read_journal(self.engine.journal()).events if isinstance(event, kind)]

    def told(self) -> dict[str, Any]:
        """The last verdict of every request."""
        told = {}
        for verdict in self.judged().verdicts:
            ranges = [[r.tier.value, r.grade.value, r.reason.value, r.start, r.end] for r in verdict.ranges]
            served = self.engine.served.get(verdict.rid)
            told[verdict.rid] = {
                "sentence": verdict.sentence,
                "ranges": ranges,
                # By the bytes: tokens that were reused, all of them right, and how many came from L2 just then.
                "truth": [len(served.right), all(served.right), sum(served.copied)] if served else None,
            }
        return told


def aborted_load_back(engine: Engine) -> dict[str, Any]:
    """The client goes away while its load-back runs; what it brought serves the next request from L1."""
    story = Story(engine)
    story.serve("a", A)
    story.evict()
    engine.send("c", A, 20)
    engine.step()
    loading = len(story.events(ev.LoadQueued)) - len(story.events(ev.LoadDone))
    engine.abort("c")
    story.finish()
    story.serve("d", A)
    return {"loading": loading, **story.told()}


def aborted_in_queue(engine: Engine) -> dict[str, Any]:
    """Aborted before it was admitted: nothing was loaded for it, and nothing is claimed."""
    story = Story(engine)
    story.serve("a", A)
    story.evict()
    engine.send("c", A, 1)
    engine.abort("c")
    story.finish()
    story.serve("d", A)
    return story.told()


def retracted(engine: Engine) -> dict[str, Any]:
    """Two requests decode, one is retracted and admitted again: tokens belong to its last admission alone."""
    story = Story(engine)
    story.serve("a", A)
    story.evict()
    engine.send("c", A, 20)
    engine.send("x", other("x", 60), 20)
    for _ in range(4):
        engine.step()
    engine.step(retract=True)
    story.finish()
    attempts = [event.req for event in story.events(ev.Queued) if event.retracted]
    return {"retracted": len(attempts), **story.told()}


def left_l2(engine: Engine) -> dict[str, Any]:
    """The prefix is pushed out of L2, too."""
    story = Story(engine)
    story.serve("a", A)
    story.evict(8)
    story.serve("c", A)
    return story.told()


def split_after_backup(engine: Engine) -> dict[str, Any]:
    """A's node is backed up whole, and split by another prompt: C reads both parts from the slots of one backup."""
    story = Story(engine)
    story.serve("a", A)
    story.serve("b", (*A[:80], *other("b", 60)))
    story.evict()
    story.serve("c", A)
    return {"loaded": [event.tokens for event in story.events(ev.LoadQueued)], **story.told()}


def split_while_loading(engine: Engine) -> dict[str, Any]:
    """A load-back is under way when another prompt splits its node: what it brought is L1 afterwards, both parts."""
    story = Story(engine)
    story.serve("a", A)
    story.evict()
    engine.send("c", A, 1)
    engine.send("b", (*A[:80], *other("b", 9)), 1)
    story.finish()
    story.serve("d", A)
    return story.told()


def merged_acknowledgement(engine: Engine) -> dict[str, Any]:
    """Two requests of one batch are backed up by one transfer, acknowledged by one event."""
    story = Story(engine)
    x = other("x", 97)
    engine.send("a", A, 1)
    engine.send("x", x, 1)
    story.finish()
    copies = [event for event in story.events(ev.TransferStarted) if event.direction == ev.Direction.D2H]
    story.evict()
    story.serve("c", A)
    story.serve("y", x)
    return {"nodes": max(len(event.nodes) for event in copies), **story.told()}


def overlapping_loads(engine: Engine) -> dict[str, Any]:
    """Two requests arrive together and need overlapping prefixes from L2: who loads what, and the server's counters."""
    story = Story(engine)
    longer = (*A[:112], *other("longer", 65))
    story.serve("a", A)
    story.serve("b", longer)
    story.evict()
    before = [engine.counter(f"sglang:load_back_{what}_total") for what in ("tokens", "bytes")]
    engine.send("c", A, 1)
    engine.send("d", longer, 1)
    story.finish()
    after = [engine.counter(f"sglang:load_back_{what}_total") for what in ("tokens", "bytes")]
    loads = [load for verdict in story.judged().verdicts for load in verdict.load_backs]
    # One transfer may serve several requests: its bytes are told with each, and count once.
    transfers = {load.transfer: load.bytes for load in loads}
    return {
        "server": [b - a for a, b in zip(before, after, strict=True)],
        "product": [sum(load.tokens for load in loads), sum(transfers.values())],
        **story.told(),
    }


CASES: dict[str, Callable[[Engine], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        aborted_load_back,
        aborted_in_queue,
        retracted,
        left_l2,
        split_after_backup,
        split_while_loading,
        merged_acknowledgement,
        overlapping_loads,
    )
}
