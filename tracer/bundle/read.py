"""Open a bundle: its records, its verdicts, its journals."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvwitness.collectors.journal import Journal, JournalUnreadable, parse_journal
from kvwitness.patches.schema.format import JOURNAL_SUFFIX
from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.bundle.layout import (
    CONTROL,
    ENVIRONMENT,
    JOURNALS,
    MANIFEST,
    METRICS,
    REQUESTS,
    SPANS,
    VERDICTS,
    Manifest,
    ManifestInvalid,
    decode_manifest,
    not_as_written,
    one_line,
)
from kvwitness.tracer.bundle.source import Problem, Source, Unreadable, open_source
from kvwitness.tracer.bundle.witnesses import witnesses_in
from kvwitness.tracer.model import RequestVerdict
from kvwitness.tracer.protocol.record import RequestRecord

T = TypeVar("T")


class FileInvalid(ValueError):
    """A file of the bundle does not hold what its name says; the message says what is wrong with it."""


class Bundle(msgspec.Struct, frozen=True):
    """What a bundle says, without its journals."""

    path: Path
    manifest: Manifest
    environment: dict[str, Any]
    requests: tuple[RequestRecord, ...]
    verdicts: tuple[RequestVerdict, ...]
    changed: tuple[Problem, ...]
    """Files that are not as they were written; empty in an intact bundle."""


def open_bundle(path: Path, part: str = "") -> Bundle:
    """Read a bundle (``part``: one within it) and check its files against the manifest, without judging again.

    Raises :class:`BundleError` when a part that is needed cannot be read.
    """
    # Imported here because verifying builds on reading.
    from kvwitness.tracer.bundle.verify import check_files

    with open_source(path, part) as source:
        checked = check_files(source)
        try:
            return Bundle(
                path=path,
                manifest=decode_manifest(_read(source, MANIFEST)),
                environment=parse_environment(_read(source, ENVIRONMENT)),
                requests=parse_requests(_read(source, REQUESTS)),
                verdicts=parse_verdicts(_read(source, VERDICTS)),
                changed=checked.problems,
            )
        except (FileInvalid, ManifestInvalid) as error:
            raise _broken(path, error) from error


def read_bundle_journals(path: Path, part: str = "") -> tuple[Journal, ...]:
    """All journals of a bundle, by name. Raises :class:`BundleError`."""
    with open_source(path, part) as source:
        try:
            return tuple(parse_bundle_journal(name, _read(source, name)) for name in journal_names(source))
        except FileInvalid as error:
            raise _broken(path, error) from error


def holds_control(path: Path) -> bool:
    """Whether a bundle holds a control run. Raises :class:`BundleError`."""
    with open_source(path) as source:
        return f"{CONTROL}{MANIFEST}" in source.names


def read_bundle_spans(path: Path) -> bytes | None:
    """The bundle's OTLP/JSON lines; None when it was written without. Raises :class:`BundleError`."""
    with open_source(path) as source:
        if SPANS not in source.names:
            return None
        try:
            return _read(source, SPANS)
        except FileInvalid as error:
            raise _broken(path, error) from error


def read_bundle_metrics(path: Path, part: str = "") -> dict[str, str]:
    """The metrics that a bundle keeps, by moment. Raises :class:`BundleError`."""
    with open_source(path, part) as source:
        return metrics_in(source)


def read_bundle_witnesses(path: Path) -> dict[str, bytes]:
    """The files of the recording from outside in a bundle; empty without one. Raises :class:`BundleError`."""
    with open_source(path) as source:
        return witnesses_in(source)


def metrics_in(source: Source) -> dict[str, str]:
    """The metrics in an open bundle, by moment; what cannot be read is left out (the manifest check names it)."""
    found: dict[str, str] = {}
    for name in sorted(source.names):
        moment = name.removeprefix(f"{METRICS}/").removesuffix(".prom")
        if name == f"{METRICS}/{moment}.prom":
            with contextlib.suppress(Unreadable):
                found[moment] = source.read(name).decode("utf-8", "replace")
    return found


def journal_names(source: Source) -> tuple[str, ...]:
    """The journals of a bundle in the order in which they are judged."""
    return tuple(sorted(n for n in source.names if n.startswith(f"{JOURNALS}/") and n.endswith(JOURNAL_SUFFIX)))


def parse_bundle_journal(name: str, raw: bytes) -> Journal:
    """Read one journal. Raises :class:`FileInvalid`."""
    try:
        return parse_journal(raw, name.removeprefix(f"{JOURNALS}/"))
    except JournalUnreadable as error:
        raise FileInvalid(f"{name}: {one_line(error)}") from error


def parse_environment(raw: bytes) -> dict[str, Any]:
    """Read ``environment.json``. Raises :class:`FileInvalid`."""
    return _decode(ENVIRONMENT, raw, dict[str, Any])


def parse_verdicts(raw: bytes) -> tuple[RequestVerdict, ...]:
    """Read ``verdicts.json``. Raises :class:`FileInvalid`."""
    return _decode(VERDICTS, raw, tuple[RequestVerdict, ...])


def parse_requests(raw: bytes) -> tuple[RequestRecord, ...]:
    """Read ``requests.jsonl``. Raises :class:`FileInvalid`."""
    lines = enumerate(raw.split(b"\n"), start=1)
    return tuple(_decode(f"{REQUESTS}, line {number}", line, RequestRecord) for number, line in lines if line.strip())


def _decode(name: str, raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileInvalid(f"{name}: {not_as_written(error)}") from error


def _read(source: Source, name: str) -> bytes:
    if name not in source.names:
        container = "; ".join(str(problem) for problem in source.problems[:1])
        raise FileInvalid(f"{name}: it is missing" + (f" ({container})" if container else ""))
    try:
        return source.read(name)
    except Unreadable as error:
        raise FileInvalid(f"{name}: {one_line(error)}") from error


def _broken(path: Path, error: Exception) -> BundleError:
    return BundleError(one_line(error), str(path), f"`kvwitness verify {path}` says what else is wrong with it")
