"""Read the files of a bundle, a folder or a zip, without trusting a single name or byte in it."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

import msgspec

from kvwitness.tracer.bundle.archive import seal_problem
from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.bundle.layout import MANIFEST, one_line, unsafe_name
from kvwitness.tracer.bundle.places import is_archive, is_bundle_folder, no_bundle

MAX_FILE_BYTES: Final = 2 << 30
"""Nothing larger is read into memory, whatever an archive says about itself."""

# What zipfile raises on a damaged or hostile archive, by reading its code and by trying.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    IndexError,
)


class ProblemKind(StrEnum):
    """What is wrong with a file of a bundle."""

    CHANGED = "changed"
    MISSING = "missing"
    ADDED = "added"
    MALFORMED = "malformed"
    UNSAFE = "unsafe"
    VERDICT = "verdict"
    SIGNATURE = "signature"


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong, in one line."""

    kind: ProblemKind
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.path}: {self.message}"


def problem(kind: ProblemKind, path: str, message: object) -> Problem:
    """A :class:`Problem` whose texts are safe to print, wherever they came from."""
    return Problem(kind, one_line(path.encode("utf-8", "backslashreplace").decode()), one_line(message))


class Unreadable(Exception):
    """A file of the bundle cannot be read; the message says why."""


class Source(Protocol):
    """The files of a bundle by their safe relative names."""

    @property
    def names(self) -> frozenset[str]: ...

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with the container itself, and every name in it that is not followed."""

    def size(self, name: str) -> int: ...

    def read(self, name: str) -> bytes:
        """The whole file. Raises :class:`Unreadable`."""


class PartSource:
    """The bundle within a bundle: the files whose names begin with ``prefix``, without it."""

    problems: tuple[Problem, ...] = ()
    """Those of the container are the outer bundle's."""

    def __init__(self, source: Source, prefix: str) -> None:
        self._source = source
        self._prefix = prefix

    @property
    def names(self) -> frozenset[str]:
        length = len(self._prefix)
        return frozenset(name[length:] for name in self._source.names if name.startswith(self._prefix))

    def size(self, name: str) -> int:
        return self._source.size(self._prefix + name)

    def read(self, name: str) -> bytes:
        return self._source.read(self._prefix + name)


@contextmanager
def open_source(path: Path, part: str = "") -> Iterator[Source]:
    """The bundle at ``path``, or the one within it under ``part``.

    Raises :class:`BundleError` when there is nothing that could be one.
    """
    with _open_whole(path) as source:
        yield PartSource(source, part) if part else source


@contextmanager
def _open_whole(path: Path) -> Iterator[Source]:
    if is_bundle_folder(path):
        yield FolderSource(path)
        return
    try:
        archive = is_archive(path)
    except OSError as error:
        raise BundleError(error.strerror or str(error), str(path), "make it readable") from error
    if not archive:
        raise no_bundle(path)
    with _open_zip(path) as source:
        yield source


class FolderSource:
    """A bundle that is a folder. Links and special files are named and never opened."""

    def __init__(self, root: Path) -> None:
        self._sizes: dict[str, int] = {}
        self._problems: list[Problem] = []
        self._root = root
        self._walk("")

    def _walk(self, folder: str) -> None:
        try:
            with os.scandir(self._root / folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            self._problems.append(problem(ProblemKind.MALFORMED, folder or ".", error.strerror or error))
            return
        for entry in entries:
            name = f"{folder}{entry.name}"
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                self._problems.append(problem(ProblemKind.MALFORMED, name, error.strerror or error))
                continue
            if stat.S_ISDIR(status.st_mode):
                self._walk(f"{name}/")
            elif (reason := _not_plain(status.st_mode) or unsafe_name(name)) is not None:
                self._problems.append(problem(ProblemKind.UNSAFE, name, f"{reason}; it was not followed"))
            else:
                self._sizes[name] = status.st_size

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._sizes)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._problems)

    def size(self, name: str) -> int:
        return self._sizes[name]

    def read(self, name: str) -> bytes:
        _check_size(self._sizes[name])
        try:
            fd = os.open(self._root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                return file.read(MAX_FILE_BYTES)
        except OSError as error:
            raise Unreadable(error.strerror or str(error)) from error


class ZipSource:
    """A bundle that is a zip, also one that was zipped together with the folder around it."""

    def __init__(self, archive: zipfile.ZipFile, problems: list[Problem]) -> None:
        self._archive = archive
        self._problems = problems
        self._entries: dict[str, zipfile.ZipInfo] = {}
        infos = archive.infolist()
        twice = {name for name, count in Counter(info.orig_filename for info in infos).items() if count > 1}
        problems.extend(problem(ProblemKind.UNSAFE, name, "it is in the archive more than once") for name in twice)
        for info in infos:
            name = info.orig_filename
            if (reason := _unsafe_entry(info)) is not None:
                problems.append(problem(ProblemKind.UNSAFE, name, f"{reason}; it was not followed"))
            elif not info.is_dir() and name not in twice:
                self._entries[name] = info
        self._strip_folder()

    def _strip_folder(self) -> None:
        tops = {name.partition("/")[0] for name in self._entries}
        if MANIFEST in self._entries or len(tops) != 1:
            return
        folder = f"{tops.pop()}/"
        if f"{folder}{MANIFEST}" in self._entries:
            self._entries = {name.removeprefix(folder): info for name, info in self._entries.items()}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._problems)

    def size(self, name: str) -> int:
        return self._entries[name].file_size

    def read(self, name: str) -> bytes:
        info = self._entries[name]
        _check_size(info.file_size)
        try:
            with self._archive.open(info) as file:
                # zipfile never gives more than the size that the entry declares, which was checked.
                return file.read()
        except _ZIP_ERRORS as error:
            raise Unreadable("the archive is damaged here") from error


class _NoSource:
    """An archive that does not open: a container problem and no files."""

    names: frozenset[str] = frozenset()

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)

    def size(self, name: str) -> int:
        raise KeyError(name)

    def read(self, name: str) -> bytes:
        raise Unreadable("the archive does not open")


@contextmanager
def _open_zip(path: Path) -> Iterator[Source]:
    problems: list[Problem] = []
    try:
        reason = seal_problem(path)
    except OSError as error:
        raise BundleError(error.strerror or str(error), str(path), "make it readable") from error
    if reason is not None:
        problems.append(problem(ProblemKind.CHANGED, path.name, reason))
    try:
        archive = zipfile.ZipFile(path)
    except _ZIP_ERRORS:
        problems.append(problem(ProblemKind.MALFORMED, path.name, "not a zip, or a damaged one"))
        yield _NoSource(problems)
        return
    with archive:
        yield ZipSource(archive, problems)


def _unsafe_entry(info: zipfile.ZipInfo) -> str | None:
    mode = info.external_attr >> 16
    if mode and stat.S_IFMT(mode) and (reason := _not_plain(mode)) and not info.is_dir():
        return reason
    if info.flag_bits & 0x1:
        return "an encrypted entry"
    name = info.orig_filename
    return unsafe_name(name.removesuffix("/") if info.is_dir() else name)


def _not_plain(mode: int) -> str | None:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return None if stat.S_ISREG(mode) else "not a plain file"


def _check_size(size: int) -> None:
    if size >= MAX_FILE_BYTES:
        raise Unreadable(f"{size} bytes are more than this kvwitness reads ({MAX_FILE_BYTES})")
