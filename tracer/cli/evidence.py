"""What ``show`` and ``explain`` look at: a bundle, or a folder of journals that may still be growing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvwitness.collectors.journal import Journal, JournalUnreadable, parse_journal
from kvwitness.tracer import judgement
from kvwitness.tracer.bundle.ending import why_stopped
from kvwitness.tracer.bundle.layout import MANIFEST, REQUESTS, VERDICTS
from kvwitness.tracer.bundle.places import no_bundle, recorded_journals
from kvwitness.tracer.bundle.read import open_bundle, read_bundle_journals, read_bundle_witnesses
from kvwitness.tracer.bundle.rows import one_of_series
from kvwitness.tracer.bundle.snapshot import snapshot_bytes
from kvwitness.tracer.bundle.verify import verify_bundle
from kvwitness.tracer.bundle.witnesses import Outside, derive_outside
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.output import note
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import RequestVerdict
from kvwitness.tracer.outside.records import FILES, is_recording
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.verdicts.l3 import storage_changes
from kvwitness.tracer.verdicts.leaks import leaks_of


class Evidence(msgspec.Struct, frozen=True):
    """Verdicts, and the client's records when there are any."""

    path: str
    verdicts: tuple[RequestVerdict, ...]
    requests: tuple[RequestRecord, ...]
    storage: tuple[str, ...]
    """What became of attachings and detachings of a storage backend (L3); not known of a bundle that is not whole."""
    leaks: tuple[str, ...]
    """Slots that stay taken, by the events."""
    intact: bool | None
    """Whether a bundle verifies: files as written, verdicts that follow from them. None for a folder of journals."""

    @property
    def doubt(self) -> str:
        """What has to stand before every sentence of a bundle that does not verify."""
        return "NOT VERIFIED: " if self.intact is False else ""


def load_evidence(path: Path) -> Evidence:
    """Open ``path``. Raises :class:`UserError`.

    A bundle is verified first (seconds): its stored sentences must not be shown as if they were proven.
    """
    if path.is_file() or (path / MANIFEST).exists():
        with bundle_errors():
            bundle = open_bundle(path)
            report = verify_bundle(path)
        if not report.ok:
            note(f"error: {path}: this bundle does not verify ({report.problems[0]}); see `kvwitness verify {path}`")
        if stopped := why_stopped(bundle.environment):
            note(f"warning: {path}: the run did not reach its end: {stopped}")
        journals = read_bundle_journals(path) if report.ok else ()
        instances = [derive(j) for j in journals if j.role == judgement.SCHEDULER_ROLE]
        storage = tuple(storage_changes(instances))
        return Evidence(str(path), bundle.verdicts, bundle.requests, storage, _leaks(instances), report.ok)
    if not path.is_dir():
        raise _nothing(path)
    if (path / REQUESTS).exists() or (path / VERDICTS).exists():
        raise UserError(f"{MANIFEST} is missing: not a complete bundle", str(path), f"see `kvwitness verify {path}`")
    judged = judgement.judge(read_folder(path))
    storage = tuple(storage_changes(judged.instances))
    return Evidence(str(path), judged.verdicts, (), storage, _leaks(judged.instances), None)


def _leaks(instances: Sequence[InstanceFacts]) -> tuple[str, ...]:
    return tuple(str(leak) for instance in instances for leak in leaks_of(instance))


def load_outside(path: Path) -> Outside | None:
    """What was recorded from outside at ``path``, a bundle or an unfinished recording; None where nothing was.

    Raises :class:`UserError`.
    """
    if is_recording(path):
        files = {name: (path / name).read_bytes() for name in FILES if (path / name).is_file()}
        return derive_outside(files)
    if not (path.is_file() or (path / MANIFEST).exists()):
        return None
    with bundle_errors():
        files = read_bundle_witnesses(path)
        journals = read_bundle_journals(path) if files else ()
    return derive_outside(files, journals, judgement.judge(journals).instances) if files else None


def read_folder(folder: Path) -> list[Journal]:
    """The journals below ``folder``, each up to one moment. Raises :class:`UserError` when there are none."""
    paths = recorded_journals(folder)
    if not paths:
        raise _nothing(folder)
    journals: list[Journal] = []
    for path in paths:
        try:
            journals.append(parse_journal(snapshot_bytes(path), path.name))
        except JournalUnreadable as error:
            note(f"warning: left out: {error}")
    if not journals:
        raise UserError("none of its journals can be read", str(folder), "see the warnings above")
    return journals


def _nothing(path: Path) -> UserError:
    error = no_bundle(
        path,
        "name a bundle, or the folder that `kvwitness serve` printed "
        "(if it is this one, no SGLang process loaded the hooks)",
    )
    return UserError(error.what, error.where, error.what_to_do)


def find_request(evidence: Evidence, wanted: str) -> RequestVerdict:
    """The verdict about the request that ``wanted`` names: an id, the unique beginning of one, or a series.

    Raises :class:`UserError`.
    """
    rids = list(dict.fromkeys(verdict.rid for verdict in evidence.verdicts))
    rid = _choose(wanted, rids, evidence.requests)
    if rid is None:
        hint = "" if evidence.requests else " (names of series, A for example, are known in bundles only)"
        raise UserError(f"no request {wanted!r}", evidence.path, f"`kvwitness show {evidence.path}` lists them{hint}")
    latest = {verdict.rid: verdict for verdict in evidence.verdicts}
    if rid not in latest:
        raise UserError(
            f"there is no verdict about {rid}", evidence.path, "its server's journals are not here: see its environment"
        )
    return latest[rid]


def _choose(wanted: str, rids: Sequence[str], records: Sequence[RequestRecord]) -> str | None:
    known = list(dict.fromkeys([*rids, *(record.rid for record in records)]))
    if wanted in known:
        return wanted
    of_series = one_of_series(records, wanted)
    if of_series is not None:
        if (count := sum(record.series == wanted for record in records)) > 1:
            note(f"{of_series.rid} is one of {count} requests of the series {wanted}")
        return of_series.rid
    begins = [rid for rid in known if rid.startswith(wanted)]
    if len(begins) > 1:
        shown = ", ".join(begins[:3]) + (", ..." if len(begins) > 3 else "")
        raise UserError(f"{len(begins)} requests begin with it ({shown})", f"--rid {wanted}", "give more of the id")
    return begins[0] if begins else None
