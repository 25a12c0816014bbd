"""The simulated server of the soundness suite, with an evictor that can be told to do what SGLang was seen to do."""

from __future__ import annotations

from journal_tools import journal_of
from soundness.simulate import Node, Server

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.judgement import Judgement, judge
from kvwitness.tracer.model import RequestVerdict
from kvwitness.tracer.verdicts.view import InstanceView
from kvwitness.tracer.verdicts.why import Why, why_absent

PAGE = 16


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    """A prompt that begins like no other one."""
    return tuple(seed * 10_000 + at for at in range(tokens))


class EvictingServer(Server):
    """Records the room before every eviction, as the hooks do. Nothing happens by chance."""

    def __init__(self, l1: int, l2: int, *, ignores_room: bool = False) -> None:
        """``ignores_room``: the evictor is asked for the whole allocation, whatever is free (SGLang up to 0.5.14)."""
        super().__init__(1, page=PAGE, l1=l1, l2=l2, quiet=True)
        self.ignores_room = ignores_room

    def send(self, rid: str, tokens: tuple[int, ...]) -> None:
        self.serve([(rid, tokens)])

    def make_room(self, tokens: int, cause: int, reqs: tuple[int, ...]) -> bool:
        held = self.held()
        missing = held + tokens - self.l1
        if missing <= 0:
            return True
        asked = tokens if self.ignores_room else missing
        call, freed = self.count("call"), 0
        self.emit(ev.EvictBegin, call, cause, asked, 0, 0, reqs)
        self.emit(ev.L1Room, call, self.l1 - held)
        while freed < asked:
            leaves = [
                n for n in self.nodes() if n.device and n not in self.locked and not any(c.device for c in n.children)
            ]
            if not leaves:
                break
            freed += self.take(min(leaves, key=lambda n: n.used), call)
        self.emit(ev.EvictEnd, call, freed)
        return freed >= missing

    def take(self, victim: Node, call: int) -> int:
        """One victim; the tokens that it frees."""
        backed, size = victim.slots is not None, len(victim.tokens)
        victim.device = False
        if not backed:
            self._drop(victim)
        how = ev.Eviction.DEMOTED if backed else ev.Eviction.DROPPED
        self.emit(ev.EvictedL1, call, victim.number, victim.start, victim.end, how, size, 0 if backed else size)
        return size

    def backup(self, node: Node, req: int) -> None:
        size = len(node.tokens)
        if node.slots is None and len(self.free) < size:
            self.evict_host(size - len(self.free), req)
        super().backup(node, req)

    def evict_host(self, asked: int, req: int) -> None:
        """L2 leaves that are not in L1 any more, the least recently used first."""
        call, freed = self.count("call"), 0
        self.emit(ev.EvictHostBegin, call, asked, len(self.free))
        while freed < asked:
            leaves = [n for n in self.nodes() if n.slots and not n.device and not n.children and n not in self.locked]
            if not leaves:
                break
            victim = min(leaves, key=lambda n: n.used)
            freed += len(victim.tokens)
            self._drop(victim)
        self.emit(ev.EvictHost, call, ev.Cause.BACKUP, asked, freed, req)

    # --- what is concluded ---------------------------------------------------------------------------

    def judged(self) -> Judgement:
        return judge([journal_of(self.events)])

    def verdict(self, rid: str) -> RequestVerdict:
        verdict = self.judged().verdict(rid)
        assert verdict is not None
        return verdict

    def why(self, rid: str) -> Why:
        (facts,) = self.judged().instances
        view = InstanceView(facts)
        return why_absent(view, view.requests[rid])
