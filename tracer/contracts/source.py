"""The files of a SGLang package: an installed folder or a wheel."""

from __future__ import annotations

import ast
import contextlib
import email.parser
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

PACKAGE: Final = "sglang"
_METADATA: Final = "METADATA"


class NotSglang(ValueError):
    """What was given holds no SGLang; the message says what is wrong with it."""


class Files(Protocol):
    """Text files of a package by their path within it, ``sglang/...``."""

    def read(self, path: str) -> str | None:
        """The text of a file; None where there is none."""


class Source:
    """A SGLang package whose modules are parsed when they are asked for, and never run."""

    def __init__(self, files: Files, version: str, label: str) -> None:
        self.version = version
        self.label = label
        """What was read, for people: a path."""
        self._files = files
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """The module's syntax tree; None where the package has no such Python file."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def is_package(self, name: str) -> bool:
        """Whether the module is a folder's ``__init__``: relative imports count from it."""
        return self._files.read(f"{name.replace('.', '/')}/__init__.py") is not None

    def _parse(self, name: str) -> ast.Module | None:
        path = name.replace(".", "/")
        text = self._files.read(f"{path}.py")
        if text is None:
            text = self._files.read(f"{path}/__init__.py")
        if text is None:
            return None
        with warnings.catch_warnings():
            # About SGLang's own string literals: nothing that a user of kvwitness can change.
            warnings.simplefilter("ignore")
            try:
                return ast.parse(text)
            except SyntaxError:
                return None


class _Folder:
    def __init__(self, site: Path) -> None:
        self._site = site

    def read(self, path: str) -> str | None:
        try:
            return (self._site / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None


class _Wheel:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive

    def read(self, path: str) -> str | None:
        try:
            return self._archive.read(path).decode("utf-8")
        except (KeyError, UnicodeDecodeError, zipfile.BadZipFile):
            return None


@contextlib.contextmanager
def open_wheel(path: Path) -> Iterator[Source]:
    """The package within a wheel file. Raises :class:`NotSglang`."""
    if not path.exists():
        raise NotSglang("there is no such file")
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise NotSglang("not a wheel") from error
    with archive:
        names = archive.namelist()
        if f"{PACKAGE}/__init__.py" not in names:
            raise NotSglang("no sglang inside")
        metadata = [name for name in names if name.endswith(f".dist-info/{_METADATA}") and name.count("/") == 1]
        version = _version(archive.read(metadata[0]).decode("utf-8", "replace")) if metadata else None
        yield Source(_Wheel(archive), version or "unknown", str(path))


def open_folder(package: Path, version: str | None = None) -> Source:
    """The installed package whose folder is ``package`` (``.../sglang``). Raises :class:`NotSglang`."""
    if package.name != PACKAGE or not (package / "__init__.py").is_file():
        raise NotSglang("no sglang inside")
    site = package.parent
    if version is None:
        found = sorted(site.glob(f"{PACKAGE}-*.dist-info/{_METADATA}"))
        version = _version(found[-1].read_text(encoding="utf-8", errors="replace")) if found else None
    return Source(_Folder(site), version or "unknown", str(package))


def _version(metadata: str) -> str | None:
    return email.parser.HeaderParser().parsestr(metadata, headersonly=True).get("Version")
