"""The state of kvwitness inside one SGLang process: the journal and who is doing what right now.

There is at most one :class:`Witness` per process. Its context fields (``current ...``) are only touched on
the scheduler's own thread, which is also the only thread that walks the radix cache.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import platform
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvwitness.patches.config import Config
from kvwitness.patches.digests import Chain, grid_for, load_key
from kvwitness.patches.page_digests import Digester
from kvwitness.patches.profile import HookTimes
from kvwitness.patches.recorder import JournalError, Recorder
from kvwitness.patches.schema.events import Cause, Event, FactKind, PathNode, PrefixDigests, PrefixPoint, Tail

logger = logging.getLogger("kvwitness")


_HEADS_IN_PYTHON = 1024
"""From here on tensor operations find the breaks between runs faster (they take 50 to 100 microseconds at least)."""


_ENDED_KEPT = 1024
"""Requests whose ids keep their numbers after their end. Without a limit a server's memory would grow with each."""


def _ignore(*_: Any, **__: Any) -> None:
    """Stands in for ``emit`` while nothing is recorded."""


def _no_path(_: Any) -> list[PathNode]:
    """Stands in for ``find_path`` until there is a tree."""
    return []


class Allocation:
    """Whose need for memory is being served: a cause and the requests, resolved only when an event needs them."""

    __slots__ = ("cause", "reqs")

    def __init__(self, cause: int, reqs: Iterable[Any]) -> None:
        self.cause = cause
        self.reqs = reqs


class LoadAttempt:
    """What happened inside one ``init_load_back`` call."""

    __slots__ = ("load_called", "load_failed", "other_pools", "req", "spec_built", "wanted")

    def __init__(self, req: Any) -> None:
        self.req = req
        self.wanted = 0
        self.spec_built = False
        self.other_pools = False
        self.load_called = False
        self.load_failed = False


class Launch:
    """A copy that the controller launched, and what of it the claims are about."""

    __slots__ = ("ack", "nodes", "size", "tokens")

    def __init__(self, ack: Any, nodes: Sequence[int], tokens: int, size: int) -> None:
        self.ack = ack
        """SGLang's own acknowledgement of it, kept alive: it is known by its ``id``."""
        self.nodes = nodes
        """Those of which full-attention KV is copied."""
        self.tokens = tokens
        self.size = size
        """Bytes, of all pools that take part."""


class ThreadLoad:
    """SGLang 0.4: a launched load, and how the forward pass that it is for read what it brings."""

    __slots__ = ("batch", "begun", "early", "layers", "slot", "transfer", "upto")

    def __init__(self, transfer: int, upto: int, slot: int | None) -> None:
        self.transfer = transfer
        self.upto = upto
        """Tokens of all loads launched so far, this one included."""
        self.slot = slot
        """Number of the layer count that its batch waits for; None where there is only one."""
        self.batch = 0
        self.begun = False
        """The batch's forward pass was told ``slot``."""
        self.layers: set[int] = set()
        """Layers whose copy had ended before the pass went on to read them."""
        self.early = False
        """The pass went on to read a layer whose copy had not ended."""


class Witness:
    """Journal, context and tables of one process. Methods called from hooks may raise; the guard catches."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.recording = False
        """Hooks look at this first; False until a journal is open."""
        self.emit: Callable[..., None] = _ignore
        self.recorder: Recorder | None = None
        self.on_open: list[Callable[[], None]] = []
        self.digest_key = b""
        self.times = HookTimes() if config.profile else None
        self.digester: Digester | None = None
        """Digests KV pages, where that was asked for and the journal is open."""
        # --- what is being watched
        self.tree: Any = None
        self.family = ""
        """Family of the tree's hooks (kvwitness.patches.contract.Hook.family)."""
        self.controller: Any = None
        self.page_size = 1
        self.pools: dict[int, int] = {}
        self.find_path: Callable[[Any], list[PathNode]] = _no_path
        """How this release's tree tells the path to one of its nodes (kvwitness.patches.hooks.nodes)."""
        self.ranks: dict[str, Any] = {}
        """This process's ranks, as the scheduler was called with them."""
        # --- what is going on (scheduler thread)
        self.allocations: list[Allocation] = []
        self.inserting: Any = None
        self.matching: Any = None
        """The request whose ``init_next_round_input`` is running; not every release passes it to the match."""
        self.match_purpose = 0
        self.loading: LoadAttempt | None = None
        self.evict_calls: list[int] = []
        self.nodes_at_hand: dict[int, Any] = {}
        """Node objects by id, while a function that got them runs: the controller is told ids only."""
        self.submissions: list[Launch] | None = None
        """Copies launched inside the ``write`` that is running: they are recorded after it."""
        self.staged: list[tuple[int, int, int, int]] = []
        """write_back: nodes that left the tree's L1 and whose copy is not complete."""
        self.prefetching: Any = None
        """The request of whose prefetch from storage the tree looks whether it may end."""
        self.prefetch_ended = False
        """It had ended by itself before the tree looked."""
        self.host_inserted: tuple[int, int, bytes] | None = None
        """What that put into L2: tokens, how many of them were there already, slots."""
        # --- tables
        self.chains: dict[str, Chain] = {}
        self.batches: dict[str, list[int]] = {}
        """Request id -> its passes whose results were not processed yet."""
        self._ended: deque[str] = deque()
        """Requests that are over, and of which a last event may still come under the number that they have."""
        self.transfer_of_write: dict[int, tuple[int, Any]] = {}
        self.transfer_of_load: dict[int, tuple[int, Launch]] = {}
        self.storage_starts: dict[str, int] = {}
        """HiRadixCache: request id -> position from which on its prefetch was asked for."""
        self.handed_over: dict[int, int] = {}
        """SGLang 0.4: node -> tokens of the loads that wait for a batch to be ready."""
        self.thread_loads: list[tuple[int, tuple[int, ...], int]] = []
        """SGLang 0.4: transfer, nodes and tokens of the loads under way."""
        self.thread_tokens = 0
        """SGLang 0.4: tokens of all loads launched since the cache was reset."""
        self.thread_reads: tuple[ThreadLoad, ...] = ()
        """SGLang 0.4: launched loads whose batch is not over (replaced, never changed: other threads read it)."""
        self.layer_tokens = 0
        """SGLang 0.4: tokens of the layer that the loading thread has copied and not counted (that thread)."""
        self.layers_loaded: dict[int, int] = {}
        """SGLang 0.4: layer -> tokens loaded since the cache was reset (written by the loading thread)."""
        self.thread_acks: set[int] = set()
        """SGLang 0.4: acknowledged nodes of loads that are not complete."""
        self.copied: dict[int, int] = {}
        """Direction -> tokens times layers whose copy was called; only ever added to, by the copying thread."""
        self.accounted: dict[int, int] = {}
        """Direction -> how much of that belongs to transfers that were recorded (scheduler thread)."""
        self.next_call = itertools.count(1).__next__
        self.next_transfer = itertools.count(1).__next__
        self.next_batch = itertools.count(1).__next__
        self.next_update = itertools.count(1).__next__
        """Changes of the weights."""

    # --- journal -------------------------------------------------------------------------------------

    def open(self, role: str) -> None:
        """Open the journal (I/O: called while the process starts, never while it serves). Fails open."""
        if self.recorder is not None:
            return
        try:
            self.open_journal(role)
        except (JournalError, OSError) as error:
            logger.warning("kvwitness records nothing in this process: %s", error)
            return
        if not self.config.faults.start_at_rid:
            self.start()

    def open_journal(self, role: str) -> Recorder:
        """Only the file work of :meth:`open`; raises :class:`JournalError` or OSError."""
        info = {
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "command": Path(sys.argv[0]).name if sys.argv else "",
        }
        recorder = Recorder(self.config.directory, role=role, quota_bytes=self.config.quota_bytes, info=info)
        try:
            self.digest_key = load_key(self.config.directory)
        except OSError:
            recorder.close()
            recorder.path.unlink(missing_ok=True)
            raise
        self.recorder = recorder
        atexit.register(self.close)
        return recorder

    def close(self) -> None:
        """The process ends in order."""
        if self.recorder is not None:
            if self.digester is not None:
                self.digester.stop()
                self.digester.join()
            if self.times is not None:
                self.facts(FactKind.PROFILE, self.times.as_facts())
            self.recording = False
            self.recorder.close()

    def stop(self) -> None:
        """From now on nothing is recorded (scheduler thread); the journal is closed by whoever opened it."""
        if self.times is not None:
            self.facts(FactKind.PROFILE, self.times.as_facts())
        self.recording = False
        self.emit = _ignore
        if self.digester is not None:
            self.digester.stop()

    def close_stopped(self) -> None:
        """The file work after :meth:`stop`: nothing of this object is left behind in the process."""
        atexit.unregister(self.close)
        if self.digester is not None:
            self.digester.join()
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def start(self) -> None:
        """From now on events are recorded."""
        if self.recorder is None or self.recording:
            return
        emit = self.recorder.emit
        dropped = self.config.faults.dropped_events
        if dropped:

            def emit_without(event: type[Event], *values: int, tail: bytes = b"") -> None:
                if event.__name__ not in dropped:
                    self._emit_all(event, *values, tail=tail)

            self._emit_all = emit
            emit = emit_without
        self.emit = emit
        if self.config.digest_every:
            self.digester = Digester(self, self.config.digest_every)
        self.recording = True
        for action in self.on_open:
            action()

    _emit_all: Callable[..., None] = staticmethod(_ignore)

    def starts_with(self, req: Any) -> bool:
        """Whether a late start waits for this request."""
        text = self.config.faults.start_at_rid
        return bool(text) and not self.recording and text in req.rid

    def failed(self, hook: str, error: BaseException) -> None:
        """A hook raised. Count it; never raise."""
        try:
            if self.recorder is not None:
                self.recorder.hook_failed(hook, error)
        except Exception:
            logger.debug("kvwitness could not count a failure of %s", hook, exc_info=True)

    def facts(self, kind: int, facts: dict[str, Any]) -> None:
        """Record a JSON object, when recording."""
        if self.recorder is not None and self.recording:
            self.recorder.facts(kind, facts)

    # --- requests ------------------------------------------------------------------------------------

    def req_id(self, req: Any) -> int:
        """The number of the request's id; 0 for None."""
        if req is None or self.recorder is None:
            return 0
        return self.recorder.text(req.rid)

    def text(self, value: str) -> int:
        """The number of a text; 0 when nothing is recorded."""
        return 0 if self.recorder is None else self.recorder.text(value)

    def current_req(self) -> Any:
        """The request on whose behalf the scheduler works right now, if that is known."""
        if self.loading is not None:
            return self.loading.req
        return self.inserting

    def allocation(self) -> tuple[int, list[int]]:
        """Cause and request numbers of the allocation in progress."""
        if self.allocations:
            top = self.allocations[-1]
            return top.cause, [self.req_id(req) for req in top.reqs]
        if self.inserting is not None:
            return Cause.BACKUP, [self.req_id(self.inserting)]
        return Cause.UNKNOWN, []

    def digest(self, req: Any, tokens: Any, points: Iterable[int] = ()) -> None:
        """Record the prefix digests of ``tokens`` (the request's sequence so far) that are new."""
        rid = req.rid
        chain = self.chains.get(rid)
        if chain is None:
            namespace = (getattr(req, "extra_key", None), getattr(req, "cache_salt", None))
            chain = self.chains[rid] = Chain(self.digest_key, grid_for(self.page_size), namespace)
        number = self.req_id(req)
        first, new = chain.extend(tokens)
        if new:
            self.emit(PrefixDigests, number, chain.grid, first, tail=b"".join(new))
        for position in points:
            digest = chain.point(tokens, position)
            if digest is not None:
                self.emit(PrefixPoint, number, position, tail=digest)

    def forget(self, req: Any) -> None:
        """The request is over: drop what was kept for it.

        Its last pass may still be under way: PrefillDone of a request that ends with its first token comes after this.
        """
        rid = req.rid
        self.chains.pop(rid, None)
        self._ended.append(rid)
        if len(self._ended) > _ENDED_KEPT:
            oldest = self._ended.popleft()
            # An id can be in use again: then it comes here again.
            if oldest not in self.chains and self.recorder is not None:
                self.recorder.forget_text(oldest)
                self.batches.pop(oldest, None)

    # --- host slots ----------------------------------------------------------------------------------

    def slot_runs(self, indices: Any) -> bytes:
        """Host slot indices (a CPU tensor) as (start, length) runs; empty when they are not readable here.

        Only page heads are read: within a page the slots of a host pool are consecutive.
        """
        count = len(indices)
        if count == 0 or indices.device.type != "cpu":
            return b""
        page = self.page_size if count % self.page_size == 0 else 1
        heads = indices[::page]
        flat: list[int] = []
        if len(heads) > _HEADS_IN_PYTHON:
            breaks = ((heads[1:] - heads[:-1]) != page).nonzero().flatten().tolist()
            starts = [0, *(i + 1 for i in breaks)]
            lengths = [b - a for a, b in zip(starts, [*starts[1:], len(heads)], strict=True)]
            for head, length in zip(heads[starts].tolist(), lengths, strict=True):
                flat += (head, length * page)
            return Tail.ints(flat)
        pages = heads.tolist()
        start = expected = pages[0]
        for head in pages:
            if head != expected:
                flat += (start, expected - start)
                start = head
            expected = head + page
        flat += (start, expected - start)
        return Tail.ints(flat)

    def path_of(self, node: Any) -> list[PathNode]:
        """The tree's path to ``node`` (an id, or the node object of older releases); [] when it is not known."""
        try:
            return self.find_path(node)
        except (KeyError, IndexError, NotImplementedError):
            return []

    def path_tail(self, node: Any) -> bytes:
        """:meth:`path_of` encoded for an event."""
        return Tail.ints(itertools.chain.from_iterable(self.path_of(node)))

    def span_of(self, node: Any) -> tuple[int, int]:
        """Token positions ``[start, end)`` that ``node`` holds; (-1, -1) when the tree does not know it."""
        path = self.path_of(node)
        return (path[-1].start, path[-1].end) if path else (-1, -1)
