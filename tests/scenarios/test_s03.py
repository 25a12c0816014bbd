"""S03 (sglang#27108): write-back; the copy fails, and the node is demoted as if there were one."""

from __future__ import annotations

from soundness.simulate import Node

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.model import Grade, Reason
from kvwitness.tracer.verdicts.why import Because

from .evicting import EvictingServer, prompt

A, X, Y = (prompt(seed, 64) for seed in range(3))


class FailingWriteBack(EvictingServer):
    def backup(self, node: Node, req: int) -> None:
        """Nothing is copied at an insert."""

    def take(self, victim: Node, call: int) -> int:
        size = len(victim.tokens)
        for how in (ev.Eviction.STAGED, ev.Eviction.DEMOTED):
            tokens = size if how == ev.Eviction.DEMOTED else 0
            self.emit(ev.EvictedL1, call, victim.number, victim.start, victim.end, how, tokens, 0)
        victim.device = False
        self._drop(victim)
        return size


def test_a_node_that_was_demoted_without_a_copy_was_never_backed_up() -> None:
    server = FailingWriteBack(l1=144, l2=400)
    for rid, tokens in (("a", A), ("x", X), ("y", Y), ("again", (*A, 1))):
        server.send(rid, tokens)
    verdict = server.verdict("again")
    assert verdict.grade is Grade.RECOMPUTED
    lost = next(piece for piece in verdict.ranges if piece.reason is Reason.NEVER_BACKED_UP)
    assert lost.detail == (
        "no backup of this prefix of request a to L2 was acknowledged; the tree demoted it from L1 all the same "
        "for request y"
    )
    why = server.why("again")
    assert [(p.because, p.answer) for p in why.l1] == [
        (Because.LOST, "demoted, and no acknowledged copy in L2 was recorded: lost")
    ]
    assert [p.because for p in why.l2] == [Because.NEVER]
