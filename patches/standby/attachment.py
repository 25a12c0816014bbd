"""One attachment: a journal, the hooks, the snapshot, and everything back as it was."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvwitness.patches.config import Config
from kvwitness.patches.hooks import all_hooks, common, threads
from kvwitness.patches.instance import (
    anchor_pool,
    copies_in_threads,
    describe_instance,
    describe_process,
    find_pools,
    parallel_ranks,
    scheduler_ranks,
)
from kvwitness.patches.schema.control import Problem
from kvwitness.patches.schema.events import (
    Direction,
    FactKind,
    InFlight,
    SnapshotBegin,
    Tail,
    WaitingAtAttach,
)
from kvwitness.patches.standby.snapshot import Walk
from kvwitness.patches.standby.swap import Swaps
from kvwitness.patches.standby.trees import reader_for
from kvwitness.patches.witness import Launch, Witness

logger = logging.getLogger("kvwitness")

_SLICE_NS = 1_000_000
"""Time that the snapshot may take of one step of the scheduler."""
_TREES = ("HiRadixCache", "UnifiedRadixCache")
_RANKS = ("tp_rank", "pp_rank", "dp_rank", "attn_tp_rank", "moe_ep_rank")


class Refused(Exception):
    """There is nothing to attach to. ``problem`` is one of :class:`~kvwitness.patches.schema.control.Problem`."""

    def __init__(self, problem: str, text: str) -> None:
        super().__init__(text)
        self.problem = problem


def check_scheduler(scheduler: Any) -> Any:
    """The tree of a scheduler that kvwitness can be attached to. Raises :class:`Refused`."""
    tree = getattr(scheduler, "tree_cache", None)
    kinds = [kind.__name__ for kind in type(tree).__mro__]
    if getattr(tree, "cache_controller", None) is None:
        raise Refused(Problem.NO_HICACHE, f"the server runs without HiCache ({kinds[0]})")
    if not any(kind in _TREES for kind in kinds):
        raise Refused(Problem.UNKNOWN_TREE, f"{kinds[0]} is not a tree that kvwitness can be attached to")
    return tree


def ranks_of(scheduler: Any) -> dict[str, Any]:
    """The ranks of a scheduler, from wherever its release keeps them."""
    places = [place for place in (scheduler, getattr(scheduler, "ps", None)) if place is not None]
    known = {n: getattr(p, n) for p in places for n in _RANKS if getattr(p, n, None) is not None}
    return scheduler_ranks(tuple(known), tuple(known.values()), scheduler.server_args) | parallel_ranks()


class Attachment:
    """From the request to attach until everything is as it was before.

    :meth:`prepare` and :meth:`close` do file work and run on the listener's thread; :meth:`step` is the work
    that the scheduler's thread does between two steps; the rest of the time the hooks are on their own.
    """

    def __init__(self, config: Config, scheduler: Any, about: Mapping[str, Any], start: str | None) -> None:
        """``about``: what is known of the way in, for the journal; ``start``: the id that all ranks share."""
        self._scheduler = scheduler
        self._start = start
        self._about = about
        self._tree = check_scheduler(scheduler)
        self._witness = Witness(config)
        self._swaps = Swaps(all_hooks(), self._witness, scheduler)
        self._walk: Walk | None = None
        self._course: Iterator[None] | None = None
        self._left: tuple[str, ...] = ()
        self.standing = False
        """The hooks are in place."""
        self.settled = False
        """The snapshot is over."""
        self.withdrawn = False
        """Asked to end before it was settled."""
        self.pause_ns = 0
        self.longest_slice_ns = 0
        self.journal = ""

    @property
    def hooks(self) -> int:
        """Functions of SGLang that are wrapped."""
        return len(self._swaps)

    def snapshot_facts(self) -> dict[str, Any]:
        """What the snapshot found so far, and what it cost."""
        walk = self._walk
        if walk is None:
            return {"nodes": 0, "l1_tokens": 0, "l2_tokens": 0, "slices": 0, "complete": False}
        return {
            "nodes": walk.nodes,
            "l1_tokens": walk.l1_tokens,
            "l2_tokens": walk.l2_tokens,
            "slices": walk.slices,
            "longest_slice_us": self.longest_slice_ns // 1000,
            "complete": walk.complete,
        }

    # --- listener's thread ---------------------------------------------------------------------------

    def prepare(self) -> None:
        """Open the journal and write what needs no scheduler. Raises JournalError or OSError."""
        w = self._witness
        recorder = w.open_journal("scheduler")
        self.journal = str(recorder.path)
        recorder.facts(FactKind.COVERAGE, {"hooks": [state.as_facts() for state in self._swaps.states]})
        process = describe_process(w, "scheduler", self._scheduler.server_args, self._start)
        recorder.facts(FactKind.PROCESS, process)
        recorder.facts(FactKind.ATTACH, self._about)
        w.ranks = ranks_of(self._scheduler)

    def close(self, *, keep: bool) -> None:
        """End the journal; without ``keep`` it was never begun, and its file goes."""
        w = self._witness
        path = w.recorder.path if w.recorder is not None else None
        w.close_stopped()
        if path is not None and not keep:
            path.unlink(missing_ok=True)
        w.tree = w.controller = None

    # --- scheduler's thread --------------------------------------------------------------------------

    def step(self) -> bool:
        """The next slice of attaching."""
        begin = time.monotonic_ns()
        if self._course is None:
            self._course = self._attach()
        if self._walk is not None:
            self._walk.new_slice()
        finished = False
        while not finished and time.monotonic_ns() - begin < _SLICE_NS:
            finished = next(self._course, self) is self
        took = time.monotonic_ns() - begin
        if self._walk is not None and self._walk.slices:
            self.longest_slice_ns = max(self.longest_slice_ns, took)
        if finished:
            self._course = None
            self.settled = True
        return finished

    def _attach(self) -> Iterator[None]:
        while not (self.withdrawn or self._is_quiet()):
            yield
        if self.withdrawn:
            return
        begin = time.monotonic_ns()
        try:
            self._begin()
        except BaseException:
            self._roll_back()
            raise
        self.standing = True
        self.pause_ns = time.monotonic_ns() - begin
        try:
            assert self._walk is not None
            for _ in self._walk.run():
                if self.withdrawn:
                    break
                yield
        except Exception as error:
            # The snapshot ends here, and says less; what the hooks record is whole.
            logger.warning("kvwitness: the snapshot ended early", exc_info=True)
            self._witness.failed("standby.snapshot", error)
        facts = {"pause_us": self.pause_ns // 1000, "hooks": self.hooks, "snapshot": self.snapshot_facts()}
        self._witness.facts(FactKind.ATTACH, facts)

    def _is_quiet(self) -> bool:
        """SGLang 0.4 keeps no list of the copies under way that could be recorded: wait until there is none."""
        if not copies_in_threads(self._tree.cache_controller):
            return True
        return not (self._tree.ongoing_write_through or self._tree.ongoing_load_back)

    def _begin(self) -> None:
        w, tree = self._witness, self._tree
        common.is_watched(w, tree)
        w.controller = tree.cache_controller
        w.pools = find_pools(tree)
        self._swaps.put_in()
        w.start()
        w.facts(FactKind.INSTANCE, describe_instance(w))
        w.emit(SnapshotBegin, int(anchor_pool(tree).available_size()))
        self._record_in_flight()
        for req in getattr(self._scheduler, "waiting_queue", ()):
            w.emit(WaitingAtAttach, w.req_id(req), len(req.origin_input_ids), int(bool(req.output_ids)))
        self._walk = Walk(w, reader_for(w))

    def _record_in_flight(self) -> None:
        """Copies that were queued or launched unseen: their ends will be seen."""
        w = self._witness
        controller = w.controller
        if threads.in_use(w):
            return
        for direction, queue, acks in (
            (Direction.D2H, controller.write_queue, controller.ack_write_queue),
            (Direction.H2D, controller.load_queue, controller.ack_load_queue),
        ):
            for operation in queue:
                tokens = len(operation.device_indices)
                if not tokens:  # Recurrent states or window KV alone: no part of the launch that is recorded.
                    continue
                w.emit(InFlight, 0, direction, tokens, 0, tail=Tail.ints(operation.node_ids))
            for ack in acks:
                transfer, tokens = w.next_transfer(), int(getattr(ack, "num_tokens", 0))
                w.emit(InFlight, transfer, direction, tokens, 1, tail=Tail.ints(ack.node_ids))
                if direction == Direction.H2D:
                    launch = Launch(ack, ack.node_ids, tokens, int(getattr(ack, "num_bytes", 0)))
                    w.transfer_of_load[id(ack)] = (transfer, launch)
                else:
                    w.transfer_of_write.update((node, (transfer, ack)) for node in ack.node_ids)

    def _roll_back(self) -> None:
        self._witness.stop()
        self._swaps.put_back()

    def detach(self) -> None:
        """Everything back, between two steps (as the work of :class:`Ending`)."""
        self._left = self._swaps.put_back()
        self._witness.stop()
        self.standing = False

    @property
    def left(self) -> tuple[str, ...]:
        """Functions that are not the originals after detaching, because something else has changed them."""
        return self._left


class Ending:
    """The work of detaching: one piece."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def step(self) -> bool:
        self._attachment.detach()
        return True
