"""Zip a bundle, and seal the zip so that a change of any byte of the archive itself shows.

The hashes in the manifest cover the files, not the archive's own structure (dates, attributes, the padding
of a compressed stream). The archive's comment therefore holds the sha256 of everything before the comment.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_SEAL = re.compile(rb"kvwitness sha256 ([0-9a-f]{64})")
_SEAL_BYTES: Final = len(b"kvwitness sha256 ") + 64
_END_MAGIC: Final = b"PK\x05\x06"
_END_BYTES: Final = 22
_MAX_COMMENT: Final = 0xFFFF
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""A zip needs a date; a fixed one gives the same bytes for the same bundle."""


def write_zip(files: Iterable[tuple[str, bytes]], destination: Path) -> None:
    """Zip files, given with their names, in order, into ``destination``, sealed."""
    with zipfile.ZipFile(destination, "x") as archive:
        for name, content in files:
            info = zipfile.ZipInfo(name, date_time=_EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o100644 << 16
            archive.writestr(info, content)
        # The real seal comes last: its length is part of what it covers.
        archive.comment = b" " * _SEAL_BYTES
    with destination.open("r+b") as file:
        digest = _digest_before(file.read(), _SEAL_BYTES)
        file.seek(-_SEAL_BYTES, 2)
        file.write(f"kvwitness sha256 {digest}".encode())


def seal_problem(path: Path) -> str | None:
    """What is wrong with a zip's seal; None when it fits, or when the zip was made by another program.

    A zip from another program has no comment. Its files are still covered by the manifest.
    """
    raw = path.read_bytes()
    at = raw.rfind(_END_MAGIC, max(0, len(raw) - _MAX_COMMENT - _END_BYTES))
    if at < 0 or len(raw) < at + _END_BYTES:
        return "the end of the archive is missing or damaged"
    comment = raw[at + _END_BYTES :]
    if int.from_bytes(raw[at + _END_BYTES - 2 : at + _END_BYTES], "little") != len(comment):
        return "the archive's end does not fit its length"
    if not comment:
        return None
    seal = _SEAL.fullmatch(comment)
    if seal is None:
        return "the archive's seal (its comment) is damaged"
    if seal[1].decode() != _digest_before(raw, len(comment)):
        return "the archive is not the one that its seal describes"
    return None


def _digest_before(raw: bytes, tail: int) -> str:
    return hashlib.sha256(memoryview(raw)[: len(raw) - tail]).hexdigest()
