"""Add a signature to a bundle that is there already."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kvwitness.tracer.bundle.archive import write_zip
from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.bundle.layout import ENVELOPE, STATEMENT, one_line
from kvwitness.tracer.bundle.places import is_bundle_folder
from kvwitness.tracer.bundle.signing import EnvelopeInvalid, PrivateKey, sign_statement
from kvwitness.tracer.bundle.source import Source, Unreadable, open_source
from kvwitness.tracer.bundle.verify import verify_bundle


class Signed(msgspec.Struct, frozen=True):
    """A signature that was added."""

    path: Path
    key: str
    """Id of the key."""


def sign_bundle(path: Path, key: PrivateKey) -> Signed:
    """Sign the statement of the bundle at ``path``, a folder or a zip, beside the signatures that it has.

    Raises :class:`BundleError`; also for a bundle that does not verify, as nobody should sign that.
    """
    report = verify_bundle(path)
    if not report.ok:
        raise BundleError(f"it does not verify ({report.problems[0]})", str(path), f"see `kvwitness verify {path}`")
    with open_source(path) as source:
        if STATEMENT not in source.names:
            raise BundleError(
                f"it has no {STATEMENT}: an older kvwitness wrote it", str(path), "make the bundle again, and sign that"
            )
        try:
            before = source.read(ENVELOPE) if ENVELOPE in source.names else None
            envelope = sign_statement(source.read(STATEMENT), key, before)
            if is_bundle_folder(path):
                _replace(path, path / ENVELOPE, lambda fresh: fresh.write_bytes(envelope))
            else:
                _replace(path, path, lambda fresh: write_zip(_files(source, envelope), fresh))
        except (EnvelopeInvalid, Unreadable, OSError) as error:
            raise BundleError(f"it cannot be signed: {one_line(error)}", str(path), "it was left as it is") from error
    return Signed(path, key.public_key.keyid)


def _files(source: Source, envelope: bytes) -> Iterator[tuple[str, bytes]]:
    for name in sorted({*source.names, ENVELOPE}):
        yield name, envelope if name == ENVELOPE else source.read(name)


def _replace(bundle: Path, target: Path, write: Callable[[Path], object]) -> None:
    """Write the new file beside the bundle, where it is in nobody's way, and put it in place."""
    fresh = bundle.with_name(f".{bundle.name}.signed-{uuid.uuid4().hex[:8]}")
    try:
        write(fresh)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
