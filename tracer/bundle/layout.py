"""What is in an evidence bundle, under which names, and its manifest.

A bundle is a folder, or a zip of that folder::

    manifest.json      size and sha256 of every other file     manifest.sha256   sha256 of manifest.json
    environment.json   host, server, settings, what is unknown
    journals/*.kvwj    what the processes recorded             requests.jsonl    what the client sent and saw
    verdicts.json      what follows from those two             spans.otlp.jsonl  the same as OTLP/JSON (optional)
    metrics/*.prom     the server's counters                   summary.md        all of it for people
    witnesses/*        what was seen from outside (optional)   with derived.json: what follows from that
    statement.json     in-toto statement about all of these    statement.dsse.json   the same, signed (optional)
    ro-crate-metadata.json   what the bundle is, for archives
    control/           the control run, a bundle of its own (optional)

``sha256sum -c manifest.sha256`` works inside the folder. Schema 1 had neither statement nor RO-Crate.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Final, Literal

import msgspec

BUNDLE_SCHEMA: Final = 2
"""Bumped when a file changes its name or meaning. Readers refuse a newer one."""

MANIFEST: Final = "manifest.json"
MANIFEST_HASH: Final = "manifest.sha256"
ENVIRONMENT: Final = "environment.json"
REQUESTS: Final = "requests.jsonl"
VERDICTS: Final = "verdicts.json"
SPANS: Final = "spans.otlp.jsonl"
SUMMARY: Final = "summary.md"
CRATE: Final = "ro-crate-metadata.json"
STATEMENT: Final = "statement.json"
ENVELOPE: Final = "statement.dsse.json"
JOURNALS: Final = "journals"
METRICS: Final = "metrics"
WITNESSES: Final = "witnesses"
CONTROL: Final = "control/"
"""In front of the files of the control run, which is a bundle of its own within the bundle."""

STATEMENT_SCHEMA: Final = 2
"""Bundles of this schema and newer have a statement."""

SELF_DESCRIBING: Final = frozenset({MANIFEST, MANIFEST_HASH, STATEMENT, ENVELOPE})
"""The files that the manifest does not list: what describes it cannot be described by it."""

REQUIRED: Final = (ENVIRONMENT, REQUESTS, VERDICTS, SUMMARY)
"""Without one of these a manifest describes no bundle."""

_WORD = re.compile(r"[A-Za-z0-9_-]+")
_PLACE = re.compile(r"at `\$\.?(.*)`$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the bundle. ``path`` is relative, with forward slashes."""

    path: str
    bytes: int
    sha256: str


class SkippedJournal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that was found among the journals and could not be taken along, and why."""

    name: str
    reason: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of ``manifest.json``. ``files`` are ordered by path."""

    schema: int
    kvwitness: str
    """Version that wrote the bundle."""
    created: str
    """UTC, ISO 8601."""
    skipped_journals: tuple[SkippedJournal, ...]
    files: tuple[FileEntry, ...]


class ManifestInvalid(ValueError):
    """``manifest.json`` is not a manifest that this version reads; the message says why."""


def entry_of(path: str, content: bytes) -> FileEntry:
    """The manifest's line about a file."""
    return FileEntry(path=path, bytes=len(content), sha256=sha256(content))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``: the same manifest gives the same bytes."""
    return pretty_json(manifest)


def decode_manifest(raw: bytes) -> Manifest:
    """Read ``manifest.json``. Raises :class:`ManifestInvalid`; names in it are not checked for safety here."""
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestInvalid(f"{MANIFEST}: {not_as_written(error)}") from error
    if manifest.schema > BUNDLE_SCHEMA:
        raise ManifestInvalid(
            f"bundle schema {manifest.schema} is newer than this kvwitness reads ({BUNDLE_SCHEMA}); update kvwitness"
        )
    return manifest


def pretty_json(value: Any, order: Literal["sorted"] | None = None) -> bytes:
    """JSON as every file of the bundle has it: indented, with a line end."""
    return msgspec.json.format(msgspec.json.encode(value, order=order), indent=2) + b"\n"


def hash_line(manifest: bytes) -> bytes:
    """The bytes of ``manifest.sha256`` that go with these bytes of ``manifest.json``."""
    return f"{sha256(manifest)}  {MANIFEST}\n".encode()


def journal_path(name: str) -> str:
    """Where the bundle keeps the journal file ``name``."""
    return f"{JOURNALS}/{name}"


def metrics_path(moment: str) -> str:
    """Where the bundle keeps the metrics of ``moment``. Raises ``ValueError`` when that is not one plain word."""
    if not _WORD.fullmatch(moment):
        raise ValueError(f"{moment!r} is not a name for a moment")
    return f"{METRICS}/{moment}.prom"


def unsafe_name(path: str) -> str | None:
    """Why a path from a manifest or an archive must not be followed; None when it stays inside the bundle."""
    if not path:
        return "an empty name"
    if _CONTROL.search(path):
        return "a control character in the name"
    if "\\" in path or PureWindowsPath(path).drive:
        return "a backslash or a drive in the name"
    if path.startswith("/"):
        return "an absolute path"
    if ".." in PurePosixPath(path).parts:
        return "a path that leads out of the bundle"
    if path == "." or str(PurePosixPath(path)) != path:
        return "a path that is not in its plain form"
    return None


def not_as_written(error: Exception) -> str:
    """In words what msgspec found in a file that kvwitness did not write so."""
    if not isinstance(error, msgspec.ValidationError):
        return "it is not JSON, or is cut off"
    place = _PLACE.search(str(error))
    return f"it is not as kvwitness writes it{f' (at {place[1]})' if place else ''}"


def one_line(error: object) -> str:
    """An error's message without line breaks or control characters, at a length that fits a line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return _CONTROL.sub("?", text)[:300]
