"""Read all that a report needs from a bundle, once."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kvwitness.tracer import judgement
from kvwitness.tracer.bundle.counters import window_of
from kvwitness.tracer.bundle.ending import why_stopped
from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.bundle.layout import CONTROL, Manifest, encode_manifest, sha256
from kvwitness.tracer.bundle.read import (
    holds_control,
    open_bundle,
    read_bundle_journals,
    read_bundle_metrics,
    read_bundle_witnesses,
)
from kvwitness.tracer.bundle.reports import reports_by_rid
from kvwitness.tracer.bundle.verify import verify_bundle
from kvwitness.tracer.bundle.witnesses import Outside, derive_outside
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import RequestVerdict
from kvwitness.tracer.protocol.record import RequestRecord


class Evidence(msgspec.Struct, frozen=True):
    """A bundle as a report looks at it."""

    name: str
    manifest: Manifest
    manifest_sha256: str
    environment: dict[str, Any]
    records: tuple[RequestRecord, ...]
    verdicts: tuple[RequestVerdict, ...]
    instances: tuple[InstanceFacts, ...]
    """What the ledger says; empty for a bundle that does not verify."""
    problems: tuple[str, ...]
    """What is wrong with the bundle; empty when it verifies."""
    checked_files: int
    checked_verdicts: int
    stopped: str | None
    """Why the run did not reach its end."""
    control: Evidence | None = None
    """The control run."""
    outside: Outside | None = None
    """What was recorded from outside; None also for a bundle that does not verify."""

    @property
    def intact(self) -> bool:
        return not self.problems

    def latest(self) -> dict[str, RequestVerdict]:
        """The last verdict about each request id."""
        return {verdict.rid: verdict for verdict in self.verdicts}

    def series_of(self) -> dict[str, str]:
        """The series of each request that the client sent."""
        return {record.rid: record.series for record in self.records}


def load_evidence(path: Path) -> Evidence:
    """Open and verify the bundle at ``path``. Raises :class:`~kvwitness.tracer.bundle.errors.BundleError`."""
    control: Evidence | None = None
    if holds_control(path):
        # One that cannot be read is a problem of the whole bundle, which does not verify then.
        with suppress(BundleError):
            control = _load(path, CONTROL, None)
    return _load(path, "", control)


def _load(path: Path, part: str, control: Evidence | None) -> Evidence:
    bundle = open_bundle(path, part)
    checked = verify_bundle(path, part=part)
    instances: tuple[InstanceFacts, ...] = ()
    outside: Outside | None = None
    if checked.ok:
        window = window_of(read_bundle_metrics(path, part))
        journals = read_bundle_journals(path, part)
        instances = judgement.judge(journals, reports_by_rid(bundle.requests), window).instances
        if not part:
            # A control run holds no witnesses of its own.
            outside = derive_outside(read_bundle_witnesses(path), journals, instances)
    return Evidence(
        name=path.resolve().name,
        manifest=bundle.manifest,
        manifest_sha256=sha256(encode_manifest(bundle.manifest)),
        environment=bundle.environment,
        records=tuple(sorted(bundle.requests, key=lambda record: record.order)),
        verdicts=bundle.verdicts,
        instances=instances,
        problems=tuple(str(problem) for problem in checked.problems),
        checked_files=checked.files,
        checked_verdicts=checked.verdicts,
        stopped=why_stopped(bundle.environment),
        control=control,
        outside=outside,
    )
