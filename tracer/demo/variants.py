"""The demo's variants: what goes wrong on purpose, and what kvwitness must then say about request C."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvwitness.tracer.model import Grade, Link, RequestVerdict, Tier


class Variant(msgspec.Struct, frozen=True):
    """One way of running the demo, and the right answer about C."""

    name: str
    help: str
    missing: Link | None
    """The link that C's verdict must name as missing; None: nothing is missing."""
    words: tuple[str, ...] = ()
    """Words of which one must stand in what is said about the missing link."""
    tier: Tier | None = None
    """Where C's tokens must come from; None: not fixed by the fault."""
    stand_fault: str = ""
    """KVWITNESS_STAND_FAULT of the server."""
    recorder_fault: str = ""
    """KVWITNESS_FAULT of the recorder."""
    evict_host: bool = False
    hicache_ratio: float = 4.0
    flush: bool = False
    cut_journal: bool = False
    kill_during_c: bool = False
    digest: str = ""
    """KVWITNESS_DIGEST of the recorder; a run that asks for other digests comes before."""


PLAIN: Final = Variant("none", "nothing goes wrong: C is an L2 read, confirmed", None, tier=Tier.L2)

VARIANTS: Final[Mapping[str, Variant]] = {
    v.name: v
    for v in (
        PLAIN,
        Variant(
            "backup-never-acked",
            "the acknowledgements of the backups are not seen",
            Link.BACKED_UP,
            ("acknowledged",),
            recorder_fault="drop:BackupAcked",
        ),
        Variant(
            "load-too-short",
            "SGLang refuses the load-back: below its threshold",
            Link.READ,
            ("shorter than the load-back threshold",),
            tier=Tier.RECOMPUTED,
            stand_fault="load-back-too-short",
        ),
        Variant(
            "load-no-memory",
            "SGLang refuses the load-back: no device slots for it",
            Link.READ,
            ("allocation failed", "no device slots"),
            tier=Tier.RECOMPUTED,
            stand_fault="load-back-no-memory",
        ),
        Variant(
            "l2-evicted",
            "the prefix is pushed out of L2 as well",
            Link.RESIDENT_L2,
            ("left L2",),
            tier=Tier.RECOMPUTED,
            evict_host=True,
            hicache_ratio=1.5,
        ),
        Variant(
            "journal-cut",
            "the scheduler's journal is cut off in the middle",
            Link.USED,
            ("no prefill",),
            tier=Tier.UNKNOWN,
            cut_journal=True,
        ),
        Variant(
            "late-start",
            "the recorder starts between B and C",
            Link.BORN,
            recorder_fault="start-at-rid:-evict",
        ),
        Variant(
            "flush",
            "the cache is flushed between B and C",
            Link.RESIDENT_L2,
            ("reset",),
            tier=Tier.RECOMPUTED,
            flush=True,
        ),
        Variant(
            "byte-flip",
            "one bit in the host pool changes between the backup and the load-back",
            Link.CONTENT,
            ("came back with other bytes in layer 2",),
            tier=Tier.L2,
            stand_fault="host-flip:2",
            digest="all",
        ),
        Variant(
            "kill",
            "the scheduler is killed (SIGKILL) while C's load-back runs",
            Link.USED,
            ("no prefill",),
            tier=Tier.UNKNOWN,
            stand_fault="copy-delay:3000:h2d",
            kill_during_c=True,
        ),
    )
}


def wrong_about_c(variant: Variant, verdict: RequestVerdict | None) -> str | None:
    """Why the verdict about C is not the right one for the variant; None when it is."""
    if verdict is None:
        # Killed or cut before C was even queued: nothing is claimed, which is right for those two.
        return None if variant.cut_journal or variant.kill_during_c else "there is no verdict about C"
    said = f"C: {verdict.tier.value}, {verdict.grade.value}: {verdict.sentence}"
    if variant.missing is None:
        proven = verdict.tier is variant.tier and verdict.grade in (Grade.CONFIRMED, Grade.VERIFIED)
        return None if proven else said
    if verdict.grade in (Grade.CONFIRMED, Grade.VERIFIED):
        return f"C is called {verdict.grade.value} although {variant.help}"
    if variant.tier is not None and verdict.tier is not variant.tier:
        return f"expected tier {variant.tier.value}; {said}"
    details = [link.detail for r in verdict.ranges for link in r.missing if link.link is variant.missing]
    if not details:
        return f"the missing link {variant.missing.value} is not named; {said}"
    if variant.words and not any(word in detail for detail in details for word in variant.words):
        return f"the missing link {variant.missing.value} is explained by {details[0]!r}; {said}"
    return None
