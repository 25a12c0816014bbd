"""Check a bundle: every byte against the manifest, every verdict against the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from kvwitness.tracer import judgement
from kvwitness.tracer.bundle.compare import first_difference
from kvwitness.tracer.bundle.counters import window_of
from kvwitness.tracer.bundle.layout import (
    CONTROL,
    ENVELOPE,
    ENVIRONMENT,
    MANIFEST,
    MANIFEST_HASH,
    REQUESTS,
    REQUIRED,
    SELF_DESCRIBING,
    SPANS,
    STATEMENT,
    STATEMENT_SCHEMA,
    SUMMARY,
    VERDICTS,
    FileEntry,
    Manifest,
    ManifestInvalid,
    decode_manifest,
    encode_manifest,
    hash_line,
    one_line,
    sha256,
    unsafe_name,
)
from kvwitness.tracer.bundle.read import (
    FileInvalid,
    journal_names,
    metrics_in,
    parse_bundle_journal,
    parse_environment,
    parse_requests,
    parse_verdicts,
)
from kvwitness.tracer.bundle.reports import reports_by_rid
from kvwitness.tracer.bundle.signing import EnvelopeInvalid, Outcome, PublicKey, SignatureCheck, check_signature
from kvwitness.tracer.bundle.source import PartSource, Problem, ProblemKind, Source, Unreadable, open_source, problem
from kvwitness.tracer.bundle.spans import SpanLines, span_file
from kvwitness.tracer.bundle.statement import (
    Statement,
    StatementInvalid,
    decode_statement,
    digests_of,
    encode_statement,
    make_statement,
    predicate_difference,
)
from kvwitness.tracer.bundle.summary import render_summary
from kvwitness.tracer.bundle.version import kvwitness_version
from kvwitness.tracer.bundle.witnesses import (
    DERIVED,
    Outside,
    derive_outside,
    encode_outside,
    witness_path,
    witnesses_in,
)


class FileCheck(msgspec.Struct, frozen=True):
    """The bundle's files against its manifest (None when it cannot be read)."""

    manifest: Manifest | None
    problems: tuple[Problem, ...]
    files: int
    """Number of files that were compared."""
    statement: Statement | None = None


class VerifyReport(msgspec.Struct, frozen=True):
    """What :func:`verify_bundle` found. ``ok`` only when nothing at all is wrong."""

    path: str
    ok: bool
    problems: tuple[Problem, ...]
    files: int
    verdicts: int
    """Number of verdicts that were derived again and compared."""
    written_by: str | None
    """The kvwitness version that wrote the bundle."""
    checked_by: str
    signature: SignatureCheck | None = None
    """None for an unsigned bundle, when no key was asked for."""


def verify_bundle(
    path: Path, *, spans: SpanLines | None = None, key: PublicKey | None = None, part: str = ""
) -> VerifyReport:
    """Check the bundle at ``path``, a folder or a zip, and the control run in it. With ``spans`` its spans are
    derived again, too. With ``part`` only the bundle of that name within it is checked.

    With ``key`` it has to be signed by it: every :class:`~kvwitness.tracer.bundle.signing.Outcome` but ``valid`` is
    a :class:`Problem`.

    Everything wrong *in* it becomes a :class:`Problem`. Raises
    :class:`~kvwitness.tracer.bundle.errors.BundleError` only when there is no bundle to check.
    """
    with open_source(path, part) as source:
        checked = check_files(source)
        problems, count = _check_verdicts(source, checked, spans)
        signature, wrong = _check_signature(source, key)
        if f"{CONTROL}{MANIFEST}" in source.names:
            found, more = _check_control(PartSource(source, CONTROL), spans)
            problems, count = (*problems, *found), count + more
    problems = (*checked.problems, *problems, *wrong)
    return VerifyReport(
        path=str(path),
        ok=not problems,
        problems=problems,
        files=checked.files,
        verdicts=count,
        written_by=checked.manifest.kvwitness if checked.manifest else None,
        checked_by=kvwitness_version(),
        signature=signature,
    )


def _check_control(source: Source, spans: SpanLines | None) -> tuple[tuple[Problem, ...], int]:
    """The control run's own files and verdicts, under the names that they have in the whole bundle."""
    checked = check_files(source)
    problems, count = _check_verdicts(source, checked, spans)
    return tuple(problem(one.kind, CONTROL + one.path, one.message) for one in (*checked.problems, *problems)), count


# --- the files -----------------------------------------------------------------------------------------


def check_files(source: Source) -> FileCheck:
    """Compare the files of a bundle with its manifest, and the manifest with its hash."""
    problems = list(source.problems)
    known = {one.path for one in problems}
    manifest, raw = _check_manifest(source, problems)
    if manifest is None or raw is None:
        return FileCheck(manifest=None, problems=tuple(problems), files=0)
    listed = _listed(manifest, problems)
    for entry in listed.values():
        # A link in place of a file is named once, as a link.
        if entry.path not in known and (found := _check_entry(source, entry)) is not None:
            problems.append(found)
    for name in sorted(source.names - listed.keys() - SELF_DESCRIBING):
        problems.append(problem(ProblemKind.ADDED, name, "it is not in the manifest"))
    statement = _check_statement(source, manifest, raw, listed, problems)
    files = len(listed) + len(source.names & SELF_DESCRIBING)
    return FileCheck(manifest=manifest, problems=tuple(problems), files=files, statement=statement)


def _check_manifest(source: Source, problems: list[Problem]) -> tuple[Manifest | None, bytes | None]:
    raw = _read(source, MANIFEST, problems)
    stored = _read(source, MANIFEST_HASH, problems)
    if raw is None:
        return None, None
    if stored is not None and stored != hash_line(raw):
        problems.append(
            problem(
                ProblemKind.CHANGED, MANIFEST, f"its hash is not the one in {MANIFEST_HASH}: one of them was changed"
            )
        )
    try:
        manifest = decode_manifest(raw)
    except ManifestInvalid as error:
        problems.append(problem(ProblemKind.MALFORMED, MANIFEST, error))
        return None, None
    if encode_manifest(manifest) != raw:
        problems.append(problem(ProblemKind.CHANGED, MANIFEST, "it is not in the form that kvwitness writes"))
    return manifest, raw


def _listed(manifest: Manifest, problems: list[Problem]) -> dict[str, FileEntry]:
    """The manifest's entries that may be followed, by path."""
    listed: dict[str, FileEntry] = {}
    for entry in manifest.files:
        if (reason := unsafe_name(entry.path)) is not None:
            problems.append(problem(ProblemKind.UNSAFE, MANIFEST, f"it lists {entry.path!r}: {reason}"))
        elif entry.path in SELF_DESCRIBING or entry.path in listed:
            problems.append(problem(ProblemKind.MALFORMED, MANIFEST, f"it must not list {entry.path} here"))
        else:
            listed[entry.path] = entry
    for name in REQUIRED:
        if name not in listed:
            problems.append(problem(ProblemKind.MALFORMED, MANIFEST, f"it does not list {name}"))
    return listed


def _check_entry(source: Source, entry: FileEntry) -> Problem | None:
    if entry.path not in source.names:
        return problem(ProblemKind.MISSING, entry.path, "it is in the manifest but not in the bundle")
    size = source.size(entry.path)
    if size != entry.bytes:
        return problem(ProblemKind.CHANGED, entry.path, f"it has {size} bytes instead of {entry.bytes}")
    try:
        content = source.read(entry.path)
    except Unreadable as error:
        return problem(ProblemKind.CHANGED, entry.path, error)
    if sha256(content) != entry.sha256:
        return problem(ProblemKind.CHANGED, entry.path, "its content is not what the manifest says (sha256)")
    return None


def _check_statement(
    source: Source, manifest: Manifest, raw: bytes, listed: dict[str, FileEntry], problems: list[Problem]
) -> Statement | None:
    """Read the statement, and compare its subjects with the manifest: what it says of the verdicts comes later."""
    if manifest.schema < STATEMENT_SCHEMA:
        return None
    stated = _read(source, STATEMENT, problems)
    if stated is None:
        return None
    try:
        statement = decode_statement(stated)
    except StatementInvalid as error:
        problems.append(problem(ProblemKind.MALFORMED, STATEMENT, error))
        return None
    if encode_statement(statement) != stated:
        problems.append(problem(ProblemKind.CHANGED, STATEMENT, "it is not in the form that kvwitness writes"))
    known = {one.path for one in problems}
    expected = {MANIFEST: sha256(raw)} | {path: entry.sha256 for path, entry in listed.items()}
    digests = digests_of(statement)
    for name in sorted(expected.keys() | digests.keys()):
        if expected.get(name) != digests.get(name) and name not in known:
            problems.append(
                problem(ProblemKind.CHANGED, name, f"it is not the file that {STATEMENT} is about (sha256)")
            )
    return statement


def _check_signature(source: Source, key: PublicKey | None) -> tuple[SignatureCheck | None, tuple[Problem, ...]]:
    """Of a bundle without a readable statement nothing is signed."""
    try:
        envelope = source.read(ENVELOPE) if ENVELOPE in source.names else None
        statement = source.read(STATEMENT) if STATEMENT in source.names else b""
        found = check_signature(statement, envelope, key)
    except (EnvelopeInvalid, Unreadable) as error:
        return None, (problem(ProblemKind.SIGNATURE, ENVELOPE, error),)
    if found is None or found.outcome in (Outcome.VALID, Outcome.NOT_CHECKED):
        return found, ()
    words = found.outcome.value.replace("_", " ")
    return found, (problem(ProblemKind.SIGNATURE, ENVELOPE, f"{words}: {found.detail}"),)


def _read(source: Source, name: str, problems: list[Problem]) -> bytes | None:
    if name not in source.names:
        if all(one.path != name for one in problems):
            problems.append(problem(ProblemKind.MISSING, name, "it is not in the bundle"))
        return None
    try:
        return source.read(name)
    except Unreadable as error:
        problems.append(problem(ProblemKind.CHANGED, name, error))
        return None


# --- the verdicts --------------------------------------------------------------------------------------


def _check_verdicts(source: Source, checked: FileCheck, spans: SpanLines | None) -> tuple[tuple[Problem, ...], int]:
    """Judge the evidence again and compare; also of a bundle whose files were changed, to say what it did."""
    manifest = checked.manifest
    if not {REQUESTS, VERDICTS} <= source.names:
        return (), 0  # Already reported as missing, and nothing to compare without them.
    try:
        requests = parse_requests(source.read(REQUESTS))
        stored = parse_verdicts(source.read(VERDICTS))
        journals = [parse_bundle_journal(name, source.read(name)) for name in journal_names(source)]
    except FileInvalid as error:
        name, _, message = str(error).partition(": ")
        return (problem(ProblemKind.MALFORMED, name, message),), 0
    except Unreadable:
        return (), 0  # Already reported as changed.
    try:
        judged = judgement.judge(journals, reports_by_rid(requests), window_of(metrics_in(source)))
        outside = derive_outside(witnesses_in(source), journals, judged.instances)
    except Exception as error:  # whatever a forged journal does to the judge must not hide the report
        message = f"the verdicts cannot be derived again: {type(error).__name__}: {one_line(error)}"
        return (problem(ProblemKind.VERDICT, VERDICTS, message),), 0
    derived = judged.verdicts
    difference = first_difference(stored, derived)
    if difference is not None:
        return (problem(ProblemKind.VERDICT, VERDICTS, f"{difference}{_other_version(manifest)}"),), len(derived)
    found = _check_outside(source, manifest, outside) + _check_summary(source, manifest, outside)
    found += _check_predicate(source, checked, judged)
    if spans is not None:
        found += _check_spans(source, manifest, lambda: spans(judged, requests))
    return found, len(derived)


def _other_version(manifest: Manifest | None) -> str:
    mine = kvwitness_version()
    if manifest is None or manifest.kvwitness == mine:
        return ""
    return f" (the bundle was written by kvwitness {manifest.kvwitness}, this is {mine})"


def _check_spans(source: Source, manifest: Manifest | None, lines: Callable[[], Iterable[str]]) -> tuple[Problem, ...]:
    """Traces are what people look at. Their names and attributes are one version's."""
    if manifest is None or manifest.kvwitness != kvwitness_version() or SPANS not in source.names:
        return ()
    try:
        shown = source.read(SPANS)
    except Unreadable:
        return ()  # Already reported as changed.
    if shown != span_file(lines()):
        return (problem(ProblemKind.VERDICT, SPANS, "its spans are not those that follow from the journals"),)
    return ()


def _check_outside(source: Source, manifest: Manifest | None, outside: Outside | None) -> tuple[Problem, ...]:
    """What is said to follow from the witnesses. Its form is one version's."""
    name = witness_path(DERIVED)
    if manifest is None or manifest.kvwitness != kvwitness_version() or name not in source.names:
        return ()
    try:
        shown = source.read(name)
    except Unreadable:
        return ()  # Already reported as changed.
    if outside is None or shown != encode_outside(outside):
        return (problem(ProblemKind.VERDICT, name, "it does not follow from what the witnesses said"),)
    return ()


def _check_predicate(source: Source, checked: FileCheck, judged: judgement.Judgement) -> tuple[Problem, ...]:
    """What is signed must be what the evidence says. Its wording is one version's."""
    manifest, statement = checked.manifest, checked.statement
    if manifest is None or statement is None or manifest.kvwitness != kvwitness_version():
        return ()
    try:
        derived = make_statement(manifest, judged, parse_environment(source.read(ENVIRONMENT)))
    except (KeyError, FileInvalid, Unreadable):
        return ()  # Already reported as missing or changed.
    difference = predicate_difference(statement.predicate, derived.predicate)
    return () if difference is None else (problem(ProblemKind.VERDICT, STATEMENT, difference),)


def _check_summary(source: Source, manifest: Manifest | None, outside: Outside | None) -> tuple[Problem, ...]:
    """The summary is what people read, so it must say what the evidence says. Its wording is one version's."""
    if manifest is None or manifest.kvwitness != kvwitness_version() or not {SUMMARY, ENVIRONMENT} <= source.names:
        return ()
    try:
        shown = source.read(SUMMARY)
        expected = render_summary(
            created=manifest.created,
            version=manifest.kvwitness,
            verdicts=parse_verdicts(source.read(VERDICTS)),
            records=parse_requests(source.read(REQUESTS)),
            environment=parse_environment(source.read(ENVIRONMENT)),
            skipped=manifest.skipped_journals,
            outside=outside,
        )
    except (FileInvalid, Unreadable) as error:
        return (problem(ProblemKind.MALFORMED, ENVIRONMENT, error),)
    if shown != expected.encode():
        return (problem(ProblemKind.VERDICT, SUMMARY, "it does not say what the bundle's evidence says"),)
    return ()
