"""What the ledger knows after reading one instance's journal: plain, immutable facts with their events.

All times are nanoseconds of the instance's monotonic clock; positions are token offsets in a prompt,
half-open. ``seq`` numbers are those of the journal, so every fact can be looked up there.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvwitness.patches.schema.events import PathNode, Run
from kvwitness.tracer.ledger.chains import Chain
from kvwitness.tracer.ledger.described import Described, Hook


class Moment(msgspec.Struct, frozen=True):
    """One event: its number, its time, its kind."""

    seq: int
    t_ns: int
    kind: str


class Birth(msgspec.Struct, frozen=True):
    """What put ``[start, end)`` of ``owner``'s prefix into L1."""

    start: int
    end: int
    owner: str
    computed: Moment | None
    """The launch of the prefill pass that computed it (None: it was found there at the attaching)."""
    since: Moment
    owner_since: int = 0
    """The event from which on the owner's prefix was told."""


class Backup(msgspec.Struct, frozen=True):
    """A device-to-host copy of one node, from queue to acknowledgement."""

    id: int
    """Sequence number of the event that queued it; unique within the instance."""
    epoch: int
    rid: str | None
    """The request whose insert or allocation caused it."""
    owner: str | None
    """The request whose token prefix the copied positions belong to (None: not known)."""
    node: int
    start: int
    end: int
    tokens: int
    write_back: bool
    slots: tuple[Run, ...]
    queued: Moment
    started: Moment | None
    acked: Moment | None
    transfer: int | None
    duration_ns: int | None
    owner_since: int = 0
    """The event that queued ``owner``: an id can be used again."""
    born: tuple[Birth, ...] | None = None
    """What had put its tokens into L1, by position; None unless all of them were there from ``queued`` to ``acked``."""


class Victim(msgspec.Struct, frozen=True):
    """One node that an L1 eviction took. ``how`` is a number of :class:`~kvwitness.patches.schema.events.Eviction`."""

    moment: Moment
    node: int
    owner: str | None
    start: int
    end: int
    how: int
    tokens: int


class EvictionCall(msgspec.Struct, frozen=True):
    """One L1 eviction: who needed room, how much, and what was taken, in order."""

    call: int
    epoch: int
    cause: int
    rids: tuple[str, ...]
    """The requests whose allocation it served (several when a whole batch allocated)."""
    asked: int
    freed: int | None
    begin: Moment
    end: Moment | None
    victims: tuple[Victim, ...]
    free: int | None = None
    """Tokens that were free in L1 when it began (None: not recorded)."""


class Rejection(msgspec.Struct, frozen=True):
    """A backup that found no host slots, also after an L2 eviction for it."""

    moment: Moment
    epoch: int
    rid: str | None
    """The request whose insert or allocation asked for it."""
    owner: str | None
    """The request whose token prefix the node holds (None: not known)."""
    node: int
    start: int
    end: int
    """Positions, -1 when the ledger does not know the node."""
    tokens: int
    available: int
    """Host tokens that were free."""


class HostVictim(msgspec.Struct, frozen=True):
    """A usable copy of ``[start, end)`` of ``owner``'s prefix that left L2, and since when it was there."""

    moment: Moment
    since: Moment
    node: int
    owner: str | None
    start: int
    end: int


class HostEviction(msgspec.Struct, frozen=True):
    """One L2 eviction, with the slots that it gave up."""

    call: int
    epoch: int
    cause: int
    rid: str | None
    asked: int
    freed: int
    slots: tuple[Run, ...]
    end: Moment
    victims: tuple[HostVictim, ...] = ()
    """The usable copies among these, in order."""
    begin: Moment | None = None
    """None: not recorded. Slots that were given back since the eviction before count as its own then."""
    available: int | None = None
    """Host tokens that were free when it began."""


class StateCopy(msgspec.Struct, frozen=True):
    """Host slots of a pool beside the anchor pool, taken for the state of a request's prefix."""

    pool: int
    epoch: int
    rid: str | None
    """The request whose insert or allocation took them."""
    taken: Moment
    freed: Moment | None
    """When the first of them were given back (None: still taken when the journal ends)."""


class Residency(msgspec.Struct, frozen=True):
    """An interval in which a tier held a usable copy of ``[start, end)`` of ``owner``'s prefix."""

    tier: str
    """"L1" or "L2"."""
    epoch: int
    owner: str | None
    node: int
    start: int
    end: int
    since: Moment
    """What made it usable: the insert, the completed load, the acknowledged backup / prefetch; or where it was
    found when kvwitness was attached."""
    until: Moment | None
    """What ended it (None: still there when the journal ends)."""
    backup: int | None = None
    """L2: the :class:`Backup` whose copy this is."""
    slots: tuple[Run, ...] = ()
    computed: Moment | None = None
    """L1: the prefill pass that computed it (None: a load-back brought it)."""
    owner_since: int = 0
    """The event that queued ``owner``: an id can be used again."""


class Found(msgspec.Struct, frozen=True):
    """A node as it was found when kvwitness was attached to the running server.

    ``l1`` and ``l2`` are numbers of :class:`~kvwitness.patches.schema.events.AtAttach`.
    """

    id: int
    """Sequence number of the event that says so; unique within the instance."""
    epoch: int
    node: int
    start: int
    end: int
    l1: int
    l2: int
    slots: tuple[Run, ...]
    moment: Moment
    since: int = 0
    """The event with which the look began."""


class LoadSegment(msgspec.Struct, frozen=True):
    """Consecutive positions of a load whose slots have one origin."""

    start: int
    end: int
    origin: str
    """``backup``, ``prefetch``, ``snapshot`` (found there when kvwitness was attached) or ``unknown`` (nothing
    recorded says what these slots hold)."""
    origin_id: int
    """The :attr:`Backup.id`, the sequence number of the prefetch's end or the :attr:`Found.id`; 0 when unknown."""
    usable: bool
    """The copy that wrote the slots had been acknowledged when they were read."""
    aligned: bool
    """The slots were written for the same positions of a prefix."""
    same_prefix: bool | None
    """The digests show that the prefix written and the prefix read are equal (None: no digests)."""
    digest_to: int
    """Position to which the digests show equality; the rest of the segment (less than a cell) rests on the
    radix tree's match."""


class PageCheck(msgspec.Struct, frozen=True):
    """One page that was digested in L1 when it was backed up and again after a load had brought it back."""

    start: int
    end: int
    slot: int
    """Its first host slot."""
    backed_up: Moment
    loaded: Moment
    differing: tuple[int, ...]
    """Layers in which the two digests differ; empty: the bytes that came back are the bytes that went out."""
    sound: bool = True
    """There was one digest at either end, of every layer, in the order in which they have to be."""


class Load(msgspec.Struct, frozen=True):
    """A host-to-device copy queued for one request, from decision to completion."""

    id: int
    """Sequence number of the event that queued it."""
    epoch: int
    rid: str | None
    node: int
    start: int
    end: int
    tokens: int
    slots: tuple[Run, ...]
    queued: Moment
    started: Moment | None
    done: Moment | None
    transfer: int | None
    transfer_tokens: int | None
    transfer_bytes: int | None
    duration_ns: int | None
    backups: tuple[int, ...]
    """The :class:`Backup` ids whose slots were read, in order of position."""
    segments: tuple[LoadSegment, ...]
    freed_while_loading: bool
    """Slots were given back between the queueing and the completion of the copy."""
    waited: Moment | None = None
    """SGLang 0.4: when the scheduler processed the result of the pass that the load was launched for ..."""
    waited_layers: int = 0
    """... in how many layers that pass went on to read only after the copy had ended ..."""
    read_early: bool = False
    """... and whether it went on to read a layer before."""
    checks: tuple[PageCheck, ...] = ()
    """The pages whose content was compared, by position."""
    ended_short: int | None = None
    """Tokens with which its transfer ended, where fewer than it was launched with (then ``done`` is None)."""


class Prefetch(msgspec.Struct, frozen=True):
    """A prefetch from storage (L3) into L2."""

    rid: str | None
    epoch: int
    start: int
    completed: int
    existing: int
    loaded: int
    deadline: bool
    slots: tuple[Run, ...]
    asked: Moment | None
    done: Moment
    looked_up: Moment | None = None
    """The answer of storage that it holds these tokens."""
    unfounded: str = ""
    """Why the events do not show that it brought its tokens from storage for this request; empty when they do."""
    computed: tuple[int, ...] | None = None
    """The events at which what it brought was computed; None where that is not known."""
    queued: int = 0
    """The event that queued its request."""


class StorageTry(msgspec.Struct, frozen=True):
    """One step of a prefetch from storage."""

    rid: str | None
    what: str
    """``issued``, ``declined``, ``looked_up``, ``stopped``, ``revoked`` or ``done``."""
    start: int
    """Position from which on it was asked for; -1: this step does not say."""
    tokens: int
    """Asked for, found by the look-up, read when it was stopped, or new in L2."""
    why: str
    """Of ``stopped`` the prefetch policy."""
    moment: Moment


class StorageTrouble(msgspec.Struct, frozen=True):
    """Something raised on a storage thread; ``work`` as :class:`~kvwitness.patches.schema.events.StorageWork`."""

    work: int
    rid: str | None
    error: str
    moment: Moment


class StorageChange(msgspec.Struct, frozen=True):
    """The storage backend was attached or detached on this rank, or that was refused (``ok`` False)."""

    attach: bool
    ok: bool
    message: str
    moment: Moment


class Storage(msgspec.Struct, frozen=True):
    """What the instance did with storage (L3); what that put into L2 is in the prefetches."""

    tries: tuple[StorageTry, ...] = ()
    troubles: tuple[StorageTrouble, ...] = ()
    changes: tuple[StorageChange, ...] = ()
    queued: tuple[Moment, ...] = ()
    """Backups that were handed to the backend."""
    written: tuple[tuple[int, int, Moment], ...] = ()
    """Backups that it is through with: tokens, tokens written."""


class MatchedNode(msgspec.Struct, frozen=True):
    """One node of a matched path, with what the ledger knew of it at that moment."""

    node: int
    start: int
    end: int
    on_device: bool
    """As the tree said."""
    resident: Moment | None
    """The event that made it L1-resident (insert or completed load), when the ledger holds it resident."""
    resident_by: str | None
    """The request whose prefill or load-back that was."""
    load: int | None
    """Id of the :class:`Load` that made it resident, or that is still under way when ``resident`` is None."""
    evicted: Moment | None
    """Its last eviction from L1, when the ledger holds it evicted."""
    evicted_how: int | None
    evicted_call: int | None
    owner: str | None
    """The request whose prefix the ledger knows this node by."""
    same_prefix: bool | None
    """The digests show that the owner's prefix and this request's are equal up to the node's end."""
    known: bool
    """False: the ledger never saw where this node comes from (recorder started late, missed split), or its number
    was seen for something else, too."""
    computed: Moment | None = None
    """The prefill pass that computed it, when that is what made it resident."""
    doubt: bool = False
    """Its number was seen for other positions, or another prefix."""
    owner_since: int = 0
    """The event from which on the owner's prefix was told."""


class MatchFact(msgspec.Struct, frozen=True):
    """The cache's answer that an admission was built on."""

    moment: Moment
    device: int
    host: int
    key_tokens: int
    best_node: int
    path: tuple[PathNode, ...]
    nodes: tuple[MatchedNode, ...]
    swa_host: int
    mamba_host: int


class DecisionFact(msgspec.Struct, frozen=True):
    """The load-back decision of an admission."""

    moment: Moment
    node: int
    promised: int
    loaded: int
    wanted: int
    reason: int


class ChunkFact(msgspec.Struct, frozen=True):
    """One prefill forward pass of a request."""

    moment: Moment
    batch: int
    start: int
    end: int
    last: bool
    done: Moment | None
    output_tokens: int | None


class RequestFacts(msgspec.Struct, frozen=True):
    """One request (one attempt of it) on one instance."""

    rid: str
    attempt: int
    epoch: int
    prompt_tokens: int
    queued: Moment
    match: MatchFact | None
    decision: DecisionFact | None
    admitted: Moment | None
    admitted_prefix: int | None
    """Tokens that the admission counted as cached (device and loaded)."""
    chunks: tuple[ChunkFact, ...]
    loads: tuple[int, ...]
    """Ids of the :class:`Load` facts queued on its behalf."""
    released: Moment | None
    state: int | None
    """A number of :class:`~kvwitness.patches.schema.events.ReleaseState`; None: never released."""
    output_tokens: int | None
    cached_total: int | None
    cached_device: int | None
    cached_host: int | None
    cached_storage: int | None
    max_seq: int
    """Sequence number of the last event that concerns it."""
    prior_rid: str | None
    """An earlier request on this instance that shares the longest prefix with it, by the digests ..."""
    prior_tokens: int
    """... and how many tokens (whole digest cells) they share."""
    prior_epoch: int
    """Epoch in which that request was last inserted into the cache."""
    traceparent: str | None = None
    """W3C trace context that the client sent, when the HTTP process recorded it."""
    chain: Chain | None = None
    """The digests of its tokens: those of its id may be another request's by now."""
    wrong: str = ""
    """What contradicts itself in what is recorded of it; empty: nothing does."""
    shared_id: bool = False
    """Another request had the same id at the same time, or a pass ended that this one did not begin: whose events are
    whose is not known."""

    @property
    def first_token(self) -> Moment | None:
        """When the first output token's batch result was processed."""
        for chunk in self.chunks:
            if chunk.output_tokens:
                return chunk.done
        return None


class EpochFact(msgspec.Struct, frozen=True):
    """The time between two resets of the instance's cache."""

    index: int
    begin: Moment


class HookState(Hook, frozen=True):
    """One hook as the installer left it in this process. Those of another family than the tree's do not count."""

    since: int = 0
    """The coverage event from which on it has had this status without interruption (0: not known)."""


class Contradiction(msgspec.Struct, frozen=True):
    """A guard of the model that did not hold: what is recorded between two events contradicts itself."""

    rule: str
    first: int
    last: int
    text: str
    content: bool = False
    """It is about digests of pages: only their comparison rests on it."""


class WeightsChange(msgspec.Struct, frozen=True):
    """The weights were changed: what is computed after it has other ones (an adapter's change leaves the model's)."""

    update: int
    kind: int
    ok: bool
    flushed: bool
    label: str
    moment: Moment


class InstanceFacts(msgspec.Struct, frozen=True):
    """Everything the ledger derived from one scheduler process's journal."""

    instance: str
    role: str
    pid: int
    monotonic_ns: int
    wall_ns: int
    facts: Described
    """What it says of itself: ranks, tree class, pool sizes, page size, policies."""
    hooks: tuple[HookState, ...]
    hook_failures: dict[str, int]
    requests: tuple[RequestFacts, ...]
    backups: tuple[Backup, ...]
    evictions: tuple[EvictionCall, ...]
    host_evictions: tuple[HostEviction, ...]
    loads: tuple[Load, ...]
    prefetches: tuple[Prefetch, ...]
    residencies: tuple[Residency, ...]
    epochs: tuple[EpochFact, ...]
    gaps: tuple[tuple[int, int, str], ...]
    anomalies: tuple[str, ...]
    closed: bool
    first_seq: int
    last_seq: int
    found: tuple[Found, ...] = ()
    """What was there when kvwitness was attached; empty where it was there from the start."""
    chains: Mapping[str, Chain] = msgspec.field(default_factory=dict)
    """The prefix digests of every request, by its id."""
    last_ns: int = 0
    """Time of the last event."""
    rejections: tuple[Rejection, ...] = ()
    storage: Storage = Storage()
    remembers_from: int = 0
    """What happened before this event is known only where something that is there still rests on it (0: all is)."""
    remembers_from_ns: int = 0
    """The wall clock (ns since the epoch) then, or a little later."""
    context: frozenset[int] = frozenset()
    """Requests (the events that queued them) that are only there as what others were built on: what happened beside
    them is not remembered, and nothing may be claimed of them."""
    states: tuple[StateCopy, ...] = ()
    """Of host pools beside the anchor pool."""
    contradictions: tuple[Contradiction, ...] = ()
    """Guards of the model that did not hold; each is one of the ``gaps``, too."""
    weights: tuple[WeightsChange, ...] = ()
    told_at: int = 0
    """The event that told what the instance is (0: none did)."""

    def wall_time_ns(self, t_ns: int) -> int:
        """Wall-clock time (ns since the epoch) of a monotonic reading of this instance."""
        return self.wall_ns + (t_ns - self.monotonic_ns)
