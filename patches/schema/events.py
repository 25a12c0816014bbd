"""The events that kvwitness records inside SGLang: typed, versioned, without any prompt content.

Every event is a frozen dataclass with integer fields and at most one variable *tail*. Texts (request ids,
reasons) are interned: a :class:`Text` event gives the number, the other events carry it. Token positions
are offsets from the start of the prompt, half-open ranges. Host slots are indices into the host pool (L2).
Device slot numbers are never recorded: reading them would synchronise the GPU.

The declarations are the schema: ``code`` is the number on disk, the annotation order is the field order,
``LAYOUT`` is the :mod:`struct` format of the integer fields and ``TAIL`` says how the tail is encoded.
A code is never given a second meaning.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from kvwitness.patches.schema.format import RECORD_HEAD

DIGEST_BYTES: Final = 8
"""Length of one keyed prefix digest."""


class PathNode(NamedTuple):
    """One radix-tree node on the way from the root, with the token range of the prompt that it holds."""

    node: int
    start: int
    end: int
    on_device: int
    """1 when the node's KV is in L1, 0 when it is not, as the tree itself says."""


class Run(NamedTuple):
    """``length`` consecutive host slots from ``start``."""

    start: int
    length: int


class Tail:
    """Codecs of the variable part of an event. Encoding runs on the scheduler thread, decoding elsewhere."""

    @staticmethod
    def ints(values: Iterable[int]) -> bytes:
        return array("q", values).tobytes()

    @staticmethod
    def read_ints(raw: bytes) -> tuple[int, ...]:
        out = array("q")
        out.frombytes(raw)
        return tuple(out)

    @staticmethod
    def read_runs(raw: bytes) -> tuple[Run, ...]:
        flat = Tail.read_ints(raw)
        return tuple(Run(flat[i], flat[i + 1]) for i in range(0, len(flat), 2))

    @staticmethod
    def read_path(raw: bytes) -> tuple[PathNode, ...]:
        flat = Tail.read_ints(raw)
        return tuple(PathNode(*flat[i : i + 4]) for i in range(0, len(flat), 4))

    @staticmethod
    def read_digests(raw: bytes) -> tuple[bytes, ...]:
        return tuple(raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES))

    @staticmethod
    def read_text(raw: bytes) -> str:
        return raw.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Event:
    """What every event has. ``seq`` orders the events of one process; ``t_ns`` is its monotonic clock."""

    seq: int
    t_ns: int

    CODE: ClassVar[int] = 0
    PACK: ClassVar[struct.Struct]
    READ_TAIL: ClassVar[Callable[[bytes], Any] | None] = None


E = TypeVar("E", bound=type[Event])
REGISTRY: Final[dict[int, type[Event]]] = {}


def _event(code: int, layout: str, tail: Callable[[bytes], Any] | None = None) -> Callable[[E], E]:
    def register(cls: E) -> E:
        if code in REGISTRY:
            raise ValueError(f"event code {code} is taken by {REGISTRY[code].__name__}")
        expected = len(layout) + (tail is not None) + 2
        if len(fields(cls)) != expected:
            raise TypeError(f"{cls.__name__} declares {len(fields(cls))} fields, its layout {expected}")
        cls.CODE = code
        cls.PACK = struct.Struct(RECORD_HEAD + layout)
        cls.READ_TAIL = staticmethod(tail) if tail is not None else None
        REGISTRY[code] = cls
        return cls

    return register


# --- the journal itself ------------------------------------------------------------------------------


@_event(1, "I", Tail.read_text)
@dataclass(frozen=True, slots=True)
class Text(Event):
    """A text and the number that stands for it from now on (numbers are per process)."""

    id: int
    text: str


@_event(2, "I", Tail.read_text)
@dataclass(frozen=True, slots=True)
class Facts(Event):
    """A JSON object of facts. ``kind`` is a :class:`FactKind`."""

    kind: int
    json: str


class FactKind:
    """What a :class:`Facts` event is about."""

    COVERAGE: Final = 1
    """Every hook: target, status (installed, missing, unknown_signature, failed), links it serves."""
    INSTANCE: Final = 2
    """The scheduler: ranks, tree class and core, pool sizes, page size, bytes per token, policies."""
    PROCESS: Final = 3
    """Role, SGLang version, server arguments that matter."""
    PROFILE: Final = 4
    """Per hook: calls, median and total nanoseconds of its observers (KVWITNESS_PROFILE=1)."""
    ATTACH: Final = 5
    """A recorder that was attached to a running server: the way in and how long the process was stopped for it
    (``stopped_us``); then, in a second one, what the attaching and the snapshot cost."""


@_event(3, "IQ", Tail.read_text)
@dataclass(frozen=True, slots=True)
class HookFailed(Event):
    """A hook raised; SGLang went on as if it were not there. ``count`` failures of ``hook`` so far."""

    hook: int
    count: int
    error: str


@_event(4, "QQ")
@dataclass(frozen=True, slots=True)
class Closed(Event):
    """The process ended in order. A journal without it was cut off (killed, still running)."""

    lost_quota: int
    lost_oversize: int


# --- request -----------------------------------------------------------------------------------------


@_event(10, "I", Tail.read_text)
@dataclass(frozen=True, slots=True)
class HttpRequest(Event):
    """In the HTTP process: the W3C ``traceparent`` that came with request ``req``."""

    req: int
    traceparent: str


@_event(20, "IqB")
@dataclass(frozen=True, slots=True)
class Queued(Event):
    """The scheduler put the request into its waiting queue (``retracted``: again, after a retraction)."""

    req: int
    prompt_tokens: int
    retracted: int


@_event(21, "Iqq", Tail.read_digests)
@dataclass(frozen=True, slots=True)
class PrefixDigests(Event):
    """Keyed digests of the request's token prefix: digest ``i`` covers tokens ``[0, (first_cell+i+1)*grid)``.

    They say that two prefixes are equal, never what they are: the key stays on the machine.
    """

    req: int
    grid: int
    first_cell: int
    digests: tuple[bytes, ...]


@_event(22, "Iq", Tail.read_digests)
@dataclass(frozen=True, slots=True)
class PrefixPoint(Event):
    """The digest of ``[0, position)`` where ``position`` is not on the grid (prompt end, insert end)."""

    req: int
    position: int
    digests: tuple[bytes, ...]


@_event(23, "IqqqqqqqB", Tail.read_path)
@dataclass(frozen=True, slots=True)
class Matched(Event):
    """The radix cache's answer for a request: ``device`` tokens in L1, then ``host`` tokens promised by L2.

    ``req`` 0: a walk without a request (policy, touch). ``purpose`` see :class:`MatchPurpose`.
    ``path`` leads to the deepest matched node (``best_node``).
    """

    req: int
    key_tokens: int
    device: int
    host: int
    device_node: int
    best_node: int
    swa_host: int
    mamba_host: int
    purpose: int
    path: tuple[PathNode, ...]


class MatchPurpose:
    """Why the cache was asked."""

    OTHER: Final = 0
    """A probe: scheduling policy, L3 prefetch, touch."""
    ADMISSION: Final = 1
    """``Req.init_next_round_input``: the match that the following admission builds on."""


@_event(24, "IqqqqB")
@dataclass(frozen=True, slots=True)
class LoadBackDecided(Event):
    """``init_load_back`` returned: ``promised`` host tokens, ``loaded`` tokens now in L1 or on their way.

    ``wanted`` is what the tree would have copied, ``reason`` a :class:`Refusal` when nothing was loaded.
    """

    req: int
    node: int
    promised: int
    loaded: int
    wanted: int
    reason: int


class Refusal:
    """Why a promised load-back did not happen, inferred from what was called inside it."""

    NONE: Final = 0
    UNKNOWN: Final = 1
    TOO_SHORT: Final = 2
    """Below SGLang's load-back threshold."""
    NO_DEVICE_SLOTS: Final = 3
    """L1 could not be freed for it, also after eviction."""
    ALLOCATION_FAILED: Final = 4
    """The controller could not get device slots (``load`` returned None)."""
    NOTHING_TO_LOAD: Final = 5
    """The transfer was empty: already on the device, or pinned by another load-back."""

    NAMES: Final = {
        NONE: "none",
        UNKNOWN: "unknown",
        TOO_SHORT: "shorter than the load-back threshold",
        NO_DEVICE_SLOTS: "no device slots after eviction",
        ALLOCATION_FAILED: "device allocation failed",
        NOTHING_TO_LOAD: "nothing to load",
    }


@_event(25, "IBqqq")
@dataclass(frozen=True, slots=True)
class Admission(Event):
    """``PrefillAdder.add_one_req`` returned. ``admitted`` 1 when the request is in the next batch."""

    req: int
    admitted: int
    prefix: int
    end: int
    host_loaded: int


@_event(26, "IQqqB")
@dataclass(frozen=True, slots=True)
class Prefill(Event):
    """A forward pass that computes tokens ``[start, end)`` of the request was launched in batch ``batch``.

    ``last`` is 0 for all chunks of a chunked prefill but the last.
    """

    req: int
    batch: int
    start: int
    end: int
    last: int


@_event(27, "IQq")
@dataclass(frozen=True, slots=True)
class PrefillDone(Event):
    """The result of the request's prefill batch was processed; ``output_tokens`` exist now (0: more chunks)."""

    req: int
    batch: int
    output_tokens: int


@_event(28, "IBqqqqq")
@dataclass(frozen=True, slots=True)
class Released(Event):
    """The request gave its KV row back. ``state`` is a :class:`ReleaseState`.

    ``cached_*`` is the server's own attribution at that moment (tokens), recorded as a witness.
    """

    req: int
    state: int
    output_tokens: int
    cached_total: int
    cached_device: int
    cached_host: int
    cached_storage: int


class ReleaseState:
    """How a request gave its KV row back."""

    FINISHED: Final = 1
    ABORTED: Final = 2
    RETRACTED: Final = 3


@_event(29, "I")
@dataclass(frozen=True, slots=True)
class AbortedInQueue(Event):
    """The request was aborted before it was admitted."""

    req: int


# --- L1 ----------------------------------------------------------------------------------------------


@_event(40, "Iqqq", Tail.read_path)
@dataclass(frozen=True, slots=True)
class Inserted(Event):
    """The tree holds ``[0, key_tokens)`` of the request in L1; ``existing`` of them were there already."""

    req: int
    key_tokens: int
    existing: int
    node: int
    path: tuple[PathNode, ...]


@_event(41, "QBqqq", Tail.read_ints)
@dataclass(frozen=True, slots=True)
class EvictBegin(Event):
    """L1 eviction ``call`` begins: ``asked`` full-attention tokens, for ``cause`` (:class:`Cause`) of ``reqs``."""

    call: int
    cause: int
    asked: int
    asked_swa: int
    asked_mamba: int
    reqs: tuple[int, ...]


class Cause:
    """Whose allocation an eviction serves."""

    UNKNOWN: Final = 0
    PREFILL: Final = 1
    DECODE: Final = 2
    LOAD_BACK: Final = 3
    BACKUP: Final = 4
    PREFETCH: Final = 5

    NAMES: Final = {
        UNKNOWN: "unknown",
        PREFILL: "prefill allocation",
        DECODE: "decode allocation",
        LOAD_BACK: "load-back",
        BACKUP: "backup",
        PREFETCH: "prefetch",
    }


@_event(42, "Qq")
@dataclass(frozen=True, slots=True)
class EvictEnd(Event):
    """L1 eviction ``call`` ended after ``freed`` full-attention tokens."""

    call: int
    freed: int


@_event(43, "QqqqBqq")
@dataclass(frozen=True, slots=True)
class EvictedL1(Event):
    """One node left L1 within eviction ``call``. ``how`` is a :class:`Eviction`; -1 positions: not known."""

    call: int
    node: int
    start: int
    end: int
    how: int
    tokens: int
    unbacked: int


class Eviction:
    """What became of a node that the evictor chose."""

    DEMOTED: Final = 1
    """A host copy existed and stays."""
    DROPPED: Final = 2
    """No host copy: the KV is lost."""
    STAGED: Final = 3
    """write_back: it must be written back first; DEMOTED, DROPPED or KEPT follows for the same node."""
    KEPT: Final = 4
    """The backup failed and the node could not be dropped: it stays in L1."""
    DROPPED_HOST_PRESSURE: Final = 5
    """write_back: the backup failed for lack of host slots, node and subtree are lost."""

    NAMES: Final = {
        DEMOTED: "demoted",
        DROPPED: "dropped without a backup",
        STAGED: "written back first",
        KEPT: "kept",
        DROPPED_HOST_PRESSURE: "dropped for lack of host memory",
    }


@_event(44, "B")
@dataclass(frozen=True, slots=True)
class Reset(Event):
    """The whole cache was reset (start, flush): a new epoch. ``kind`` 1: tree, 2: controller."""

    kind: int


# --- L2 ----------------------------------------------------------------------------------------------


@_event(60, "IqqqqB", Tail.read_runs)
@dataclass(frozen=True, slots=True)
class BackupQueued(Event):
    """A device-to-host copy of node ``node`` (positions ``[start, end)``) into ``slots`` was queued.

    ``req`` is the request whose insert or allocation caused it (0: not known). ``write_back`` 1 when it is
    a write-back during eviction. Slot ``i`` of ``slots`` holds position ``start + i``.
    """

    req: int
    node: int
    start: int
    end: int
    tokens: int
    write_back: int
    slots: tuple[Run, ...]


@_event(61, "Iqqq")
@dataclass(frozen=True, slots=True)
class BackupRejected(Event):
    """No host slots for a backup of ``tokens`` tokens of ``node``; ``available`` host tokens were free."""

    req: int
    node: int
    tokens: int
    available: int


@_event(62, "QBqqB", Tail.read_ints)
@dataclass(frozen=True, slots=True)
class TransferStarted(Event):
    """A (merged) copy was launched. ``direction`` :class:`Direction`; ``nodes`` in the order queued.

    ``tokens`` and ``bytes`` as the controller itself counts them, all layers included. ``timed`` 1 when
    device events with timing bracket it.
    """

    transfer: int
    direction: int
    tokens: int
    bytes: int
    timed: int
    nodes: tuple[int, ...]


class Direction:
    """Which way a transfer copies."""

    D2H: Final = 1
    H2D: Final = 2


@_event(63, "Qqq")
@dataclass(frozen=True, slots=True)
class BackupAcked(Event):
    """The copy of ``node`` to the host is complete. ``duration_ns`` of its transfer on the device, -1: untimed."""

    transfer: int
    node: int
    duration_ns: int


@_event(64, "Iqqqq", Tail.read_runs)
@dataclass(frozen=True, slots=True)
class LoadQueued(Event):
    """A host-to-device copy of ``slots`` was queued on behalf of ``req``: positions ``[start, end)``.

    ``node`` is the anchor of the load-back (the deepest matched node).
    """

    req: int
    node: int
    start: int
    end: int
    tokens: int
    slots: tuple[Run, ...]


@_event(65, "Qqqq", Tail.read_ints)
@dataclass(frozen=True, slots=True)
class LoadDone(Event):
    """A host-to-device transfer completed and was acknowledged by the scheduler."""

    transfer: int
    tokens: int
    bytes: int
    duration_ns: int
    nodes: tuple[int, ...]


@_event(66, "BIq", Tail.read_runs)
@dataclass(frozen=True, slots=True)
class HostAlloc(Event):
    """Host slots were taken from pool ``pool`` (see the instance facts), by ``req`` if known.

    ``available`` free slots are left, by the pool's own count: a missed event shows as a jump in it.
    """

    pool: int
    req: int
    available: int
    slots: tuple[Run, ...]


@_event(67, "BIq", Tail.read_runs)
@dataclass(frozen=True, slots=True)
class HostFree(Event):
    """Host slots of pool ``pool`` were given back: what they held is no longer in L2."""

    pool: int
    req: int
    available: int
    slots: tuple[Run, ...]


@_event(68, "Bq")
@dataclass(frozen=True, slots=True)
class HostClear(Event):
    """Host pool ``pool`` was emptied; ``available`` slots are free now."""

    pool: int
    available: int


@_event(69, "QBqqI")
@dataclass(frozen=True, slots=True)
class EvictHost(Event):
    """L2 eviction for ``req``'s ``cause`` ended: ``asked`` and ``freed`` tokens. Its frees precede it."""

    call: int
    cause: int
    asked: int
    freed: int
    req: int


@_event(70, "QqB")
@dataclass(frozen=True, slots=True)
class LoadWaited(Event):
    """SGLang 0.4 to 0.5.1: the forward pass that host-to-device ``transfer`` was launched for is over.

    In ``layers`` layers the copy had ended before the pass went on to read them. ``early`` 1: it went on to
    read a layer whose copy had not ended.
    """

    transfer: int
    layers: int
    early: int


# --- L3 ----------------------------------------------------------------------------------------------


@_event(80, "Iqqqb")
@dataclass(frozen=True, slots=True)
class PrefetchAsked(Event):
    """A prefetch from storage was asked for: ``tokens`` from position ``start``. ``issued`` 0: declined."""

    req: int
    node: int
    start: int
    tokens: int
    issued: int


@_event(81, "Iqqqqb", Tail.read_runs)
@dataclass(frozen=True, slots=True)
class PrefetchDone(Event):
    """The prefetch ended: ``completed`` tokens from position ``start``, of which the first ``existing`` were
    in L2 already (their new copies were freed) and ``loaded`` were put into L2 (``slots`` from ``start``).

    ``deadline`` 1: cut short by the deadline of the prefetch policy ``timeout``.
    """

    req: int
    start: int
    completed: int
    existing: int
    loaded: int
    deadline: int
    slots: tuple[Run, ...]


@_event(82, "II")
@dataclass(frozen=True, slots=True)
class PrefetchRevoked(Event):
    """The prefetch of ``req`` ended without anything usable; ``reason`` is an interned text."""

    req: int
    reason: int


@_event(83, "qq")
@dataclass(frozen=True, slots=True)
class StorageBackupQueued(Event):
    """Node ``node``'s host copy (``tokens``) was handed to the storage backend."""

    node: int
    tokens: int


@_event(84, "BB", Tail.read_text)
@dataclass(frozen=True, slots=True)
class StorageChanged(Event):
    """The storage backend was attached (``attach`` 1) or detached (0); ``ok`` 0 when SGLang refused."""

    attach: int
    ok: int
    message: str


# --- room before an eviction --------------------------------------------------------------------------


@_event(120, "Qq")
@dataclass(frozen=True, slots=True)
class L1Room(Event):
    """``free`` full-attention tokens of L1 were free when L1 eviction ``call`` began; -1: the allocator did not say."""

    call: int
    free: int


@_event(121, "Qqq")
@dataclass(frozen=True, slots=True)
class EvictHostBegin(Event):
    """L2 eviction ``call`` of ``asked`` tokens begins, with ``available`` host tokens free. EvictHost ends it."""

    call: int
    asked: int
    available: int


# --- attached to a running server --------------------------------------------------------------------


@_event(90, "q")
@dataclass(frozen=True, slots=True)
class SnapshotBegin(Event):
    """The hooks stand from here on; what follows says what was there already. Not in a journal from the start.

    ``available`` slots of the anchor host pool are free.
    """

    available: int


@_event(91, "QBqB", Tail.read_ints)
@dataclass(frozen=True, slots=True)
class InFlight(Event):
    """Copies of ``nodes`` that were under way, ``direction`` :class:`Direction`: nothing is known of what they move.

    ``launched`` 1: transfer ``transfer``, whose end is still to come. 0 (and transfer 0): queued, not launched.
    """

    transfer: int
    direction: int
    tokens: int
    launched: int
    nodes: tuple[int, ...]


@_event(92, "IqB")
@dataclass(frozen=True, slots=True)
class WaitingAtAttach(Event):
    """The request was in the scheduler's waiting queue already (``retracted``: it has output tokens)."""

    req: int
    prompt_tokens: int
    retracted: int


@_event(93, "qqq", Tail.read_digests)
@dataclass(frozen=True, slots=True)
class ResidentDigests(Event):
    """Keyed digests of the prefix that ends with ``node``: those of its own cells, from ``first_cell`` on.

    They continue those of the parent that the node's :class:`ResidentNode` names, which comes next.
    """

    node: int
    grid: int
    first_cell: int
    digests: tuple[bytes, ...]


@_event(94, "qqqqBB", Tail.read_runs)
@dataclass(frozen=True, slots=True)
class ResidentNode(Event):
    """What the tree says of ``node`` at this moment: positions ``[start, end)`` below ``parent`` (-1: the root).

    ``l1`` and ``l2`` are numbers of :class:`AtAttach`; slot ``i`` of ``slots`` holds position ``start + i`` and
    is given where ``l2`` is RESIDENT.
    """

    node: int
    parent: int
    start: int
    end: int
    l1: int
    l2: int
    slots: tuple[Run, ...]


class AtAttach:
    """Whether a tier held a node when it was looked at."""

    ABSENT: Final = 0
    RESIDENT: Final = 1
    """A usable copy: computed or loaded completely (L1), acknowledged (L2)."""
    UNDER_WAY: Final = 2
    """A copy to this tier was under way, or may have been: no claim rests on it."""


@_event(95, "qqqB")
@dataclass(frozen=True, slots=True)
class SnapshotEnd(Event):
    """``nodes`` were looked at, with so many tokens in each tier. ``complete`` 0: others were not reached."""

    nodes: int
    l1_tokens: int
    l2_tokens: int
    complete: int


@_event(102, "Iq")
@dataclass(frozen=True, slots=True)
class StorageLookedUp(Event):
    """The look-up for ``req``'s prefetch was answered: storage holds the next ``tokens`` of its prompt."""

    req: int
    tokens: int


@_event(103, "BI", Tail.read_text)
@dataclass(frozen=True, slots=True)
class StorageFailed(Event):
    """Something raised on a storage thread; ``work`` is a :class:`StorageWork`, ``req`` 0 for a backup."""

    work: int
    req: int
    error: str


class StorageWork:
    """What a storage thread was doing."""

    LOOK_UP: Final = 1
    READ: Final = 2
    WRITE: Final = 3

    NAMES: Final = {LOOK_UP: "look-up", READ: "page transfer", WRITE: "backup"}


@_event(104, "qq")
@dataclass(frozen=True, slots=True)
class StorageBackedUp(Event):
    """The backup thread is through with one backup: ``completed`` of ``tokens`` tokens were written to storage."""

    tokens: int
    completed: int


@_event(105, "IIqq")
@dataclass(frozen=True, slots=True)
class PrefetchStopped(Event):
    """The prefetch ``policy`` (an interned text) ended ``req``'s prefetch while it was under way.

    ``completed`` tokens had been read by then, of ``found`` that the look-up had found (0: none, or no answer yet).
    PrefetchDone or PrefetchRevoked follows. A prefetch that had ended before it was looked at leaves no such event.
    """

    req: int
    policy: int
    found: int
    completed: int


# --- content of pages --------------------------------------------------------------------------------


@_event(100, "Qq", Tail.read_digests)
@dataclass(frozen=True, slots=True)
class BackupDigested(Event):
    """Keyed digests, one per layer, of one page in L1 as ``transfer`` copied it to the host page of ``slot``.

    ``slot`` is the page's first host slot. Taken in the stream of the copy, before its acknowledgement.
    """

    transfer: int
    slot: int
    digests: tuple[bytes, ...]


@_event(101, "Qq", Tail.read_digests)
@dataclass(frozen=True, slots=True)
class LoadDigested(Event):
    """The same for one page in L1 after ``transfer`` had copied it from the host page of ``slot``.

    Taken after the copy and before this event; what happened to the page in L1 in between is in other events.
    """

    transfer: int
    slot: int
    digests: tuple[bytes, ...]


# --- weights -----------------------------------------------------------------------------------------


@_event(130, "IBBB", Tail.read_text)
@dataclass(frozen=True, slots=True)
class WeightsUpdated(Event):
    """The scheduler returned from a change of the model's weights: what is computed from here on has other ones.

    ``update`` counts the changes of this process from 1; ``kind`` is a :class:`WeightsKind`. ``ok`` 0: SGLang says that
    it failed, and which weights there are now is not known. ``flushed`` 1: SGLang was asked to empty the cache with it.
    ``label`` is the version that the client gave them (empty: none).
    """

    update: int
    kind: int
    ok: int
    flushed: int
    label: str


class WeightsKind:
    """How the weights were changed. An adapter's KV has a cache namespace of its own; the base model's stays."""

    DISK: Final = 1
    TENSORS: Final = 2
    DISTRIBUTED: Final = 3
    IPC: Final = 4
    LORA_LOADED: Final = 5
    LORA_UNLOADED: Final = 6
    CHECK: Final = 7
    """SGLang's check of an update fills the weights with random values first."""

    NAMES: Final = {
        DISK: "from disk",
        TENSORS: "from tensors",
        DISTRIBUTED: "from a distributed group",
        IPC: "from another process",
        LORA_LOADED: "LoRA adapter loaded",
        LORA_UNLOADED: "LoRA adapter unloaded",
        CHECK: "by a check that overwrites them",
    }


def decode(code: int, seq: int, t_ns: int, raw_fields: Sequence[int], tail: bytes) -> Event | None:
    """The event for one record's parts; None for a code that this version does not know."""
    cls = REGISTRY.get(code)
    if cls is None:
        return None
    make: Callable[..., Event] = cls
    read = cls.READ_TAIL
    if read is None:
        return make(seq, t_ns, *raw_fields)
    return make(seq, t_ns, *raw_fields, read(tail))
