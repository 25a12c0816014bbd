"""Copies of the checkout, in which files are changed: the checkout itself never is."""

from __future__ import annotations

import compileall
import hashlib
import py_compile
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mutants.settings import Settings


def copy(settings: Settings, to: Path) -> None:
    """A fresh copy of the checkout at ``to``."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(settings.root, to, symlinks=True, ignore=shutil.ignore_patterns(*settings.leave_out))
    # By its time and size alone a changed file could be taken for the unchanged one: `<` and `>` are equally long.
    compileall.compile_dir(to, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


@contextmanager
def changed(file: Path, text: str) -> Iterator[None]:
    """``file`` with another text for a while."""
    before = file.read_bytes()
    file.write_text(text, "utf-8")
    try:
        yield
    finally:
        file.write_bytes(before)


def digest(root: Path, but: tuple[str, ...]) -> str:
    """Of every file below ``root``, except for pages of text and what begins with one of ``but``."""
    seen = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and "__pycache__" not in path.parts and not name.startswith(but) and path.suffix != ".md":
            seen.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return seen.hexdigest()
