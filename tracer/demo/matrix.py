"""The demo on several releases: what each builds, what of it is hooked, and what A, B and C turn out to be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.bundle.read import read_bundle_journals
from kvwitness.tracer.bundle.rows import one_of_series
from kvwitness.tracer.demo.run import DemoOptions, DemoResult, run_demo
from kvwitness.tracer.judgement import SCHEDULER_ROLE
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.ledger.described import Instance
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import Grade, RequestVerdict, Tier
from kvwitness.tracer.protocol.client import ServerUnavailable
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.stand.building import StandBuildError
from kvwitness.tracer.stand.progress import Progress
from kvwitness.tracer.stand.server import StandServerError
from kvwitness.tracer.verdicts.links import relevant_hooks

_ATTEMPTS = 4
_RIGHT = {
    "A": (Tier.RECOMPUTED, Grade.RECOMPUTED),
    "B": (Tier.L1, Grade.CONFIRMED),
    "C": (Tier.L2, Grade.CONFIRMED),
}


class MatrixRow(msgspec.Struct, frozen=True):
    """One release. ``error`` when the demo could not be run on it."""

    release: str
    tree_class: str = ""
    tree_core: str = ""
    installed: int = 0
    """Hooks of the tree's family that stand in the scheduler."""
    not_understood: tuple[str, ...] = ()
    """Hooks whose function has a signature that is not known."""
    missing: tuple[str, ...] = ()
    """Hooks whose function does not exist in this release."""
    sentences: dict[str, str] = {}
    same_tokens: bool | None = None
    """Whether C's answer equals A's (None: one of them is missing)."""
    right: bool = False
    """A recomputed, B an L1 read and C an L2 read, both confirmed, and C's answer equal to A's."""
    error: str = ""
    attempts: int = 1
    """Runs it took: SGLang 0.4 does not always wait for its own load-back, and then C is no L2 read."""


def run_matrix(releases: Iterable[str], out: Path, progress: Progress) -> Iterator[MatrixRow]:
    """Run the demo on each release, one after the other; bundles go to ``out/<release>``."""
    for release in releases:
        progress.phase(f"--- SGLang {release}")
        try:
            yield _attempted(release, out / release, progress)
        except (StandBuildError, StandServerError, ServerUnavailable, BundleError) as error:
            yield MatrixRow(release, error=" ".join(str(error).split())[:300])


def _attempted(release: str, out: Path, progress: Progress) -> MatrixRow:
    for attempt in range(1, _ATTEMPTS + 1):
        result = run_demo(DemoOptions(release=release), out, progress)
        if result.run.interrupted:
            raise KeyboardInterrupt
        row = row_of(release, result, attempt)
        if row.right or not _read_too_early(result) or _is_right("C", _verdicts(result)["C"]):
            break
        progress.phase(f"SGLang {release} did not wait for its load-back: once more")
    return row


def _read_too_early(result: DemoResult) -> bool:
    """Whether the server's forward pass was not seen to wait for the load-back of C (SGLang 0.4 to 0.5.1)."""
    instance, c = _instance(result.bundle.path), one_of_series(result.run.records, "C")
    if instance is None or c is None or not instance.facts.instance.copy_threads:
        return False
    loads = [load for load in instance.loads if load.rid == c.rid]
    return any(load.read_early or load.waited_layers != instance.facts.instance.layers for load in loads)


def _verdicts(result: DemoResult) -> dict[str, RequestVerdict | None]:
    latest = {verdict.rid: verdict for verdict in result.bundle.verdicts}
    records = {series: one_of_series(result.run.records, series) for series in _RIGHT}
    return {s: latest.get(record.rid) if record is not None else None for s, record in records.items()}


def row_of(release: str, result: DemoResult, attempt: int = 1, repeated: str | None = "A") -> MatrixRow:
    """What a demo came to. ``repeated``: the request whose answer C's is compared with; None: with none."""
    first = one_of_series(result.run.records, repeated) if repeated is not None else None
    verdicts = _verdicts(result)
    instance = _instance(result.bundle.path)
    hooks = relevant_hooks(instance) if instance is not None else []
    same = _same_answer(first, one_of_series(result.run.records, "C"))
    said = instance.facts.instance if instance is not None else Instance()
    return MatrixRow(
        release=release,
        tree_class=said.tree_class or "",
        tree_core=(said.tree_core or "").replace("NoneType", "-"),
        installed=sum(hook.status == "installed" for hook in hooks),
        not_understood=tuple(hook.name for hook in hooks if hook.status == "unknown_signature"),
        missing=tuple(hook.name for hook in hooks if hook.status in ("missing", "pending")),
        sentences={s: v.sentence if v is not None else "no verdict" for s, v in verdicts.items()},
        same_tokens=same,
        attempts=attempt,
        right=(same is True or repeated is None) and all(_is_right(s, v) for s, v in verdicts.items()),
    )


def _is_right(series: str, verdict: RequestVerdict | None) -> bool:
    return verdict is not None and (verdict.tier, verdict.grade) == _RIGHT[series]


def _instance(bundle: Path) -> InstanceFacts | None:
    for journal in read_bundle_journals(bundle):
        if journal.role == SCHEDULER_ROLE:
            return derive(journal)
    return None


def _same_answer(a: RequestRecord | None, c: RequestRecord | None) -> bool | None:
    """By token ids; SGLang 0.4 answers with text only."""
    if a is None or c is None or a.error or c.error:
        return None
    if a.output_ids or c.output_ids:
        return a.output_ids == c.output_ids
    return a.text == c.text
