"""What is at a path: a bundle, journals, bundles further in, or nothing of that."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Final

from kvwitness.collectors.journal import find_journals
from kvwitness.patches.schema.format import FILE_MAGIC
from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.bundle.layout import JOURNALS, MANIFEST, MANIFEST_HASH, REQUESTS, VERDICTS

_SIGNS: Final = (MANIFEST, MANIFEST_HASH, VERDICTS)
"""A folder with one of these is taken for a bundle, so that a damaged one is still checked, and no other is walked."""
_NAMED: Final = 3
_NAME_A_BUNDLE: Final = "name a bundle, the folder or .zip that `kvwitness run abc` or `kvwitness demo` wrote"
_ZIP_BEGIN: Final = b"PK\x03\x04"
_ZIP_END: Final = b"PK\x05\x06"
_LONGEST_ZIP_END: Final = 22 + 0xFFFF


def is_bundle_folder(path: Path) -> bool:
    """Whether the folder ``path`` is a bundle, or what is left of one."""
    return path.is_dir() and any(os.path.lexists(path / name) for name in _SIGNS)


def is_archive(path: Path) -> bool:
    """Whether the file ``path`` is a zip, or what is left of one. Raises ``OSError``."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(len(_ZIP_BEGIN))
        file.seek(max(0, path.stat().st_size - _LONGEST_ZIP_END))
        # Of a zip that was cut off there may be a few bytes left, or only the name.
        cut_off = _ZIP_BEGIN.startswith(begin) and (begin != b"" or path.suffix == ".zip")
        return cut_off or _ZIP_END in file.read()


def recorded_journals(folder: Path) -> list[Path]:
    """The journals that processes wrote below ``folder``, without the copies in bundles that are kept there too."""
    return [path for path in find_journals(folder) if not _is_copy(path)]


def _is_copy(path: Path) -> bool:
    bundle = path.parent.parent
    return path.parent.name == JOURNALS and ((bundle / REQUESTS).exists() or (bundle / MANIFEST).exists())


def no_bundle(path: Path, what_to_do: str = _NAME_A_BUNDLE) -> BundleError:
    """The error for a ``path`` that holds no bundle: it says what is there instead.

    ``what_to_do`` is said where nothing better is known.
    """
    if not os.path.lexists(path):
        return BundleError("there is no such file or folder", str(path), what_to_do)
    if path.is_file():
        return _no_archive(path, what_to_do)
    if bundles := bundles_within(path):
        more = f" and {len(bundles) - _NAMED} more" if len(bundles) > _NAMED else ""
        named = ", ".join(str(one) for one in bundles[:_NAMED])
        return BundleError("it is no bundle, but holds some", str(path), f"name one of them: {named}{more}")
    if recorded_journals(path):
        return BundleError(
            "it holds a server's journals and no bundle",
            str(path),
            "`kvwitness show` and `kvwitness explain` read it as it is, `kvwitness run abc` makes a bundle",
        )
    return BundleError("it holds neither a bundle nor journals", str(path), what_to_do)


def bundles_within(folder: Path) -> list[Path]:
    """The bundles in ``folder`` and in the folders right below it."""
    folders = [path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{MANIFEST_HASH}")]
    archives = [path for depth in ("*.zip", "*/*.zip") for path in folder.glob(depth) if _holds_manifest(path)]
    return sorted([*folders, *archives])


def _holds_manifest(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.rpartition("/")[2] == MANIFEST_HASH for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def _no_archive(path: Path, what_to_do: str) -> BundleError:
    try:
        with path.open("rb") as file:
            journal = file.read(len(FILE_MAGIC)) == FILE_MAGIC
    except OSError as error:
        return BundleError(error.strerror or str(error), str(path), "make it readable")
    if journal:
        return BundleError(
            "it is one journal and no bundle", str(path), f"`kvwitness show {path.parent}` reads all that are there"
        )
    return BundleError("it is a file, but no zip", str(path), what_to_do)
