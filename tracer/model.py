"""What kvwitness concludes: tiers, grades, reasons, links, verdicts. Plain data, the same in every output.

The meaning of the grades and reasons is the evidence model (docs/evidence-model.md).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """Where the KV state of a token range came from."""

    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    RECOMPUTED = "recomputed"
    UNKNOWN = "unknown"


class Grade(StrEnum):
    """How far a claim of reuse is proven, weakest first (``refuted`` and ``recomputed`` stand apart)."""

    UNKNOWN = "unknown"
    CONSISTENT = "consistent_with_reuse"
    REPORTED = "reported"
    CONFIRMED = "confirmed"
    VERIFIED = "verified"
    REFUTED = "refuted"
    RECOMPUTED = "recomputed"
    """No reuse is claimed: the request's own prefill was seen to compute these tokens."""


GRADE_ORDER: dict[Grade, int] = {
    Grade.REFUTED: -1,
    Grade.UNKNOWN: 0,
    Grade.CONSISTENT: 1,
    Grade.REPORTED: 2,
    Grade.CONFIRMED: 3,
    Grade.VERIFIED: 4,
}
"""Strength of a claim of reuse; the weakest range decides for the request."""


class Reason(StrEnum):
    """The one reason that a range carries (closed list)."""

    L1_HIT = "l1_hit"
    L2_READ = "l2_read"
    L2_READ_PARTIAL = "l2_read_partial"
    L3_READ = "l3_read"
    RECOMPUTED = "recomputed"
    PROMISED_NOT_LOADED = "promised_not_loaded"
    RESIDENT_NOT_MATCHED = "resident_not_matched"
    NEVER_BACKED_UP = "never_backed_up"
    LEFT_L2_BEFORE_READ = "left_l2_before_read"
    PREFIX_CHANGED = "prefix_changed"
    READ_OF_UNACKNOWLEDGED_LOAD = "read_of_unacknowledged_load"
    RANKS_DIVERGE = "ranks_diverge"
    RESIDENT_ELSEWHERE = "resident_elsewhere"
    STATE_INCOMPLETE = "state_incomplete"
    CORRUPTION_SUSPECTED = "corruption_suspected"
    INVALID_MODE = "invalid_mode"
    OTHER_WEIGHTS = "other_weights"
    INCONCLUSIVE = "inconclusive"


class Link(StrEnum):
    """A link of the chain of evidence."""

    BORN = "born"
    BACKED_UP = "backed_up"
    LEFT_L1 = "left_l1"
    RESIDENT_L1 = "resident_l1"
    RESIDENT_L2 = "resident_l2"
    READ = "read"
    USED = "used"
    PREFETCHED = "prefetched"
    CONTENT = "content"
    """The bytes that came back into L1 are the bytes that went out of it (only where digests were taken)."""
    WITNESSES_AGREE = "witnesses_agree"
    RECORD_COMPLETE = "record_complete"
    """No event between the first and the last that the claim rests on is missing, on any rank."""


class EventRef(msgspec.Struct, frozen=True):
    """One recorded event: which process, which sequence number, which kind."""

    instance: str
    seq: int
    kind: str


class LinkEvidence(msgspec.Struct, frozen=True):
    """One link of the chain for a range: established or not, in words, and the events it rests on."""

    link: Link
    holds: bool
    detail: str
    """What was seen; or, when it does not hold, what is missing."""
    events: tuple[EventRef, ...] = ()
    remedy: str = ""
    """How to obtain the missing link (empty when it holds)."""


class RangeVerdict(msgspec.Struct, frozen=True):
    """What is claimed about tokens ``[start, end)`` of one request on one instance."""

    start: int
    end: int
    tier: Tier
    grade: Grade
    reason: Reason
    detail: str
    links: tuple[LinkEvidence, ...] = ()
    pages: int = 0
    """Verified: pages of the range ..."""
    pages_compared: int = 0
    """... and those whose bytes were compared."""

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def missing(self) -> tuple[LinkEvidence, ...]:
        """The links that do not hold."""
        return tuple(link for link in self.links if not link.holds)


class ServerReport(msgspec.Struct, frozen=True):
    """The server's own attribution of a request (tokens; None: not reported), and where it was read."""

    source: str
    """``response`` (cached_tokens_details) or ``scheduler`` (the request object inside SGLang)."""
    cached: int | None = None
    device: int | None = None
    host: int | None = None
    storage: int | None = None


class CrossCheck(msgspec.Struct, frozen=True):
    """Two witnesses compared. ``agrees`` None: the comparison was not possible."""

    witness: str
    agrees: bool | None
    ours: str
    theirs: str
    explanation: str = ""
    explained: bool = False
    """A disagreement that is wholly accounted for by a known fault of the server: it refutes the server's
    figures and takes nothing from ours."""


class TokensPerTier(msgspec.Struct, frozen=True):
    """Prompt tokens by where their KV state came from. The sum is the prompt, or ``unknown`` holds the rest."""

    l1: int = 0
    l2: int = 0
    l3: int = 0
    recomputed: int = 0
    unknown: int = 0


class LoadBack(msgspec.Struct, frozen=True):
    """A host-to-device transfer that served the request (times in ns of the instance's monotonic clock)."""

    transfer: int
    tokens: int
    """Tokens loaded for this request."""
    transfer_tokens: int
    """Tokens of the whole (merged) transfer, which may serve several requests."""
    bytes: int
    """Bytes of the whole transfer as the controller counts them."""
    queued_ns: int
    started_ns: int
    done_ns: int | None
    """When the scheduler saw the completion; None: never seen."""
    device_duration_ns: int | None
    """Duration between the device events around the copy; None where the device has no timing."""
    events: tuple[EventRef, ...] = ()


class RequestVerdict(msgspec.Struct, frozen=True):
    """The verdict about one request on one instance (or, combined, on all ranks of a group)."""

    rid: str
    instance: str
    epoch: int
    attempt: int
    """1 for the first admission; more after retractions. Earlier attempts' tokens are not counted twice."""
    prompt_tokens: int
    output_tokens: int | None
    finished: bool
    tokens: TokensPerTier
    ranges: tuple[RangeVerdict, ...]
    tier: Tier
    """The tier of the reused part: the lowest tier that was read, ``recomputed`` when nothing was reused."""
    grade: Grade
    reason: Reason
    sentence: str
    """The sentence for people, e.g. "L2 read confirmed"."""
    load_backs: tuple[LoadBack, ...] = ()
    reports: tuple[ServerReport, ...] = ()
    checks: tuple[CrossCheck, ...] = ()
    notes: tuple[str, ...] = ()
    queued_ns: int | None = None
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    released_ns: int | None = None
