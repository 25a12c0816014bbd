"""Write an evidence bundle: everything first into a folder next to it, then one rename."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvwitness.collectors.journal import Journal, JournalUnreadable, parse_journal
from kvwitness.tracer import judgement
from kvwitness.tracer.bundle.archive import write_zip
from kvwitness.tracer.bundle.counters import window_of
from kvwitness.tracer.bundle.crate import render_crate
from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.bundle.layout import (
    BUNDLE_SCHEMA,
    CONTROL,
    CRATE,
    ENVIRONMENT,
    MANIFEST,
    MANIFEST_HASH,
    REQUESTS,
    SPANS,
    STATEMENT,
    SUMMARY,
    VERDICTS,
    FileEntry,
    Manifest,
    SkippedJournal,
    encode_manifest,
    entry_of,
    hash_line,
    journal_path,
    metrics_path,
    one_line,
    pretty_json,
)
from kvwitness.tracer.bundle.reports import reports_by_rid
from kvwitness.tracer.bundle.snapshot import snapshot_bytes
from kvwitness.tracer.bundle.spans import SpanLines, span_file
from kvwitness.tracer.bundle.spare import Spare
from kvwitness.tracer.bundle.statement import encode_statement, make_statement
from kvwitness.tracer.bundle.summary import render_summary
from kvwitness.tracer.bundle.version import kvwitness_version
from kvwitness.tracer.bundle.witnesses import DERIVED, derive_outside, encode_outside, witness_path
from kvwitness.tracer.model import RequestVerdict
from kvwitness.tracer.protocol.record import RequestRecord


class BundleInputs(msgspec.Struct, frozen=True):
    """What goes into a bundle. The journals may still be written to by their processes."""

    journals: tuple[Path, ...]
    requests: tuple[RequestRecord, ...] = ()
    environment: dict[str, Any] = {}
    metrics: dict[str, str] = {}
    """The server's metrics as it answered them, by moment: ``before``, ``after``, and others of one word."""
    witnesses: dict[str, bytes] = {}
    """The files of a recording from outside, by name."""
    created: str | None = None
    """UTC, ISO 8601; None: now."""
    control: BundleInputs | None = None
    """The control run."""


class BundleInfo(msgspec.Struct, frozen=True):
    """A bundle that was written."""

    path: Path
    manifest: Manifest
    verdicts: tuple[RequestVerdict, ...]


def check_destination(destination: Path, *, replace: bool = False) -> None:
    """Refuse a destination that :func:`write_bundle` would refuse, before the work of a run is done.

    Raises :class:`BundleError`.
    """
    if not replace and _occupied(destination):
        raise BundleError("something is there already", str(destination), "name another place, or add --replace")
    if _occupied(destination) and not _looks_like_a_bundle(destination):
        raise BundleError("it is not a bundle and is not replaced", str(destination), "name another place")
    parent = _nearest_folder(destination)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise BundleError("nothing can be written there", str(parent), "name a place that you may write to")


def write_bundle(
    destination: Path,
    inputs: BundleInputs,
    *,
    spans: SpanLines | None = None,
    replace: bool = False,
    spare: Spare | None = None,
) -> BundleInfo:
    """Write a bundle to the folder ``destination``, or to a zip when its name ends in ``.zip``.

    An existing non-empty ``destination`` is only replaced when ``replace`` says so. On a full disk ``spare`` is given
    back, and the bundle is written without the journals, which stay where they are; it says so. Raises
    :class:`BundleError`; what was gathered until then is kept, and the error says where.
    """
    check_destination(destination, replace=replace)
    partial = destination.with_name(f".{destination.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        try:
            info = _fill(partial, destination, inputs, spans)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or spare is None:
                raise
            spare.release()
            shutil.rmtree(partial)
            partial.mkdir()
            info = _fill(partial, destination, _without_journals(inputs), None, _left_out(inputs))
        if destination.suffix == ".zip":
            _publish_zip(partial, destination, info.manifest, replace)
        else:
            _publish_folder(partial, destination, replace)
    except Exception as error:  # whatever fails, a span writer or the disk, the user must learn where the evidence is
        raise _unfinished(error, partial, destination, inputs) from error
    return info


def _without_journals(inputs: BundleInputs) -> BundleInputs:
    """What is small and exists nowhere else."""
    return msgspec.structs.replace(inputs, journals=(), metrics={}, control=None)


def _left_out(inputs: BundleInputs) -> tuple[SkippedJournal, ...]:
    return tuple(SkippedJournal(path.name, f"the disk was full; it is still {path}") for path in inputs.journals)


def _fill(
    folder: Path,
    destination: Path,
    inputs: BundleInputs,
    spans: SpanLines | None,
    left_out: tuple[SkippedJournal, ...] = (),
) -> BundleInfo:
    """Write every file of the bundle. What exists nowhere else comes first, then what describes the rest."""
    files: dict[str, FileEntry] = {}

    def add(path: str, content: bytes) -> None:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        files[path] = entry_of(path, content)

    add(REQUESTS, b"".join(msgspec.json.encode(record) + b"\n" for record in inputs.requests))
    for moment, text in inputs.metrics.items():
        add(metrics_path(moment), text.encode("utf-8", "replace"))
    add(ENVIRONMENT, pretty_json(inputs.environment, order="sorted"))

    journals, unreadable = _add_journals(inputs.journals, add)
    skipped = (*left_out, *unreadable)
    judged = judgement.judge(journals, reports_by_rid(inputs.requests), window_of(inputs.metrics))
    add(VERDICTS, pretty_json(judged.verdicts))
    for name, content in inputs.witnesses.items():
        add(witness_path(name), content)
    outside = derive_outside(inputs.witnesses, journals, judged.instances)
    if outside is not None:
        add(witness_path(DERIVED), encode_outside(outside))
    if spans is not None:
        add(SPANS, span_file(spans(judged, inputs.requests)))
    if inputs.control is not None:
        files |= _add_control(folder, inputs.control, spans)

    created = inputs.created or datetime.now(UTC).isoformat(timespec="seconds")
    version = kvwitness_version()
    # As a reader will find it, so that the check of what follows from it sees the same order.
    environment = msgspec.json.decode((folder / ENVIRONMENT).read_bytes())
    summary = render_summary(
        created=created,
        version=version,
        verdicts=judged.verdicts,
        records=inputs.requests,
        environment=environment,
        skipped=skipped,
        outside=outside,
    )
    add(SUMMARY, summary.encode())
    described = [files[path] for path in sorted(files)]
    crate = render_crate(
        created=created, version=version, files=described, verdicts=judged.verdicts, environment=environment
    )
    add(CRATE, crate)
    manifest = Manifest(
        schema=BUNDLE_SCHEMA,
        kvwitness=version,
        created=created,
        skipped_journals=skipped,
        files=tuple(files[path] for path in sorted(files)),
    )
    raw = encode_manifest(manifest)
    (folder / MANIFEST).write_bytes(raw)
    (folder / MANIFEST_HASH).write_bytes(hash_line(raw))
    # Last, and only here: it is about everything else, also when a run was stopped early or went on later.
    (folder / STATEMENT).write_bytes(encode_statement(make_statement(manifest, judged, environment)))
    return BundleInfo(path=destination, manifest=manifest, verdicts=judged.verdicts)


def _add_control(folder: Path, control: BundleInputs, spans: SpanLines | None) -> dict[str, FileEntry]:
    """Write the control run as a bundle of its own within the bundle, which lists all of its files."""
    own = folder / CONTROL
    own.mkdir()
    manifest = _fill(own, own, control, spans).manifest
    names = [MANIFEST, MANIFEST_HASH, STATEMENT, *(entry.path for entry in manifest.files)]
    return {CONTROL + name: entry_of(CONTROL + name, (own / name).read_bytes()) for name in names}


def _add_journals(
    paths: Sequence[Path], add: Callable[[str, bytes], None]
) -> tuple[list[Journal], tuple[SkippedJournal, ...]]:
    """Copy the journals and read the copies, by name: what is judged is what the bundle holds."""
    twice = [name for name, count in Counter(path.name for path in paths).items() if count > 1]
    if twice:
        raise BundleError(f"two journals have the name {twice[0]}", str(paths[0].parent), "bundle them one by one")
    journals: list[Journal] = []
    skipped: list[SkippedJournal] = []
    for path in sorted(paths, key=lambda path: path.name):
        try:
            content = snapshot_bytes(path)
            journal = parse_journal(content, path.name)
        except JournalUnreadable as error:
            # A stray file must not cost the whole run its bundle; the bundle says that it was there.
            skipped.append(SkippedJournal(path.name, one_line(error).removeprefix(f"{path.parent}/")))
            continue
        add(journal_path(path.name), content)
        journals.append(journal)
    return journals, tuple(skipped)


def _publish_folder(partial: Path, destination: Path, replace: bool) -> None:
    """Put the folder in place. An old bundle is moved aside first, and comes back when that fails."""
    if not replace or not _occupied(destination):
        partial.rename(destination)  # onto an empty folder or onto nothing; refused by the system otherwise
        return
    old = destination.with_name(f".{destination.name}.old-{uuid.uuid4().hex[:8]}")
    destination.rename(old)
    try:
        partial.rename(destination)
    except OSError:
        old.rename(destination)
        raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink()


def _publish_zip(partial: Path, destination: Path, manifest: Manifest, replace: bool) -> None:
    fresh = partial.with_name(f"{partial.name}.zip")
    names = sorted([MANIFEST, MANIFEST_HASH, STATEMENT, *(entry.path for entry in manifest.files)])
    try:
        write_zip(((name, (partial / name).read_bytes()) for name in names), fresh)
        if not replace and _occupied(destination):
            raise BundleError("something was put there meanwhile", str(destination), "name another place")
        fresh.replace(destination)
    finally:
        fresh.unlink(missing_ok=True)
    shutil.rmtree(partial)


def _unfinished(error: Exception, partial: Path, destination: Path, inputs: BundleInputs) -> BundleError:
    reason = error.what if isinstance(error, BundleError) else f"{type(error).__name__}: {one_line(error)}"
    kept = [str(partial)] if partial.is_dir() else []
    kept += sorted({str(path.parent) for path in inputs.journals})
    return BundleError(
        f"the bundle could not be finished: {reason}",
        str(destination),
        "nothing recorded is lost: it is in " + " and ".join(kept) if kept else "nothing was recorded yet",
    )


def _occupied(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.is_symlink() or path.exists()


def _looks_like_a_bundle(path: Path) -> bool:
    return (path / MANIFEST).is_file() if path.is_dir() else zipfile.is_zipfile(path)


def _nearest_folder(path: Path) -> Path:
    """The closest parent of ``path`` that exists."""
    return next(parent for parent in path.absolute().parents if parent.exists())
