"""A careful forger: whatever was changed in a bundle, its hashes fit again."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvwitness.tracer.bundle.layout import Manifest, decode_manifest, encode_manifest, entry_of, hash_line, sha256
from kvwitness.tracer.bundle.statement import Subject, decode_statement, encode_statement

SELF = {"manifest.json", "manifest.sha256", "statement.json"}
"""What the manifest does not list."""


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def reseal(folder: Path) -> None:
    """Make the manifest and the statement's subjects fit the folder again. A signature cannot be made to fit."""
    old = decode_manifest((folder / "manifest.json").read_bytes())
    listed = [name for name in files_of(folder) if name not in SELF and name != "statement.dsse.json"]
    files = tuple(entry_of(name, (folder / name).read_bytes()) for name in listed)
    write_manifest(folder, msgspec.structs.replace(old, files=files))
    statement = decode_statement((folder / "statement.json").read_bytes())
    digests = {name: sha256((folder / name).read_bytes()) for name in ("manifest.json", *listed)}
    subject = tuple(Subject(name, {"sha256": digest}) for name, digest in digests.items())
    (folder / "statement.json").write_bytes(encode_statement(msgspec.structs.replace(statement, subject=subject)))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    raw = encode_manifest(manifest)
    (folder / "manifest.json").write_bytes(raw)
    (folder / "manifest.sha256").write_bytes(hash_line(raw))
