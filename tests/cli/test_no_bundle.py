"""Commands that read a bundle, given something else: one line says what it is, and what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvwitness.tracer.bundle import BundleInputs, write_bundle

from .conftest import Command

READERS = [
    ("verify", "{path}"),
    ("show", "{path}"),
    ("explain", "{path}", "--rid", "C"),
    ("export", "{path}", "--otlp", "http://127.0.0.1:1"),
    ("jaeger", "{path}"),
]
of_bundles = pytest.mark.parametrize("args", READERS, ids=lambda args: args[0])


def refused(kvwitness: Command, args: tuple[str, ...], path: Path) -> str:
    result = kvwitness(*(arg.format(path=path) for arg in args))
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {path}: ")
    return line


@of_bundles
def test_nothing_there(kvwitness: Command, tmp_path: Path, args: tuple[str, ...]) -> None:
    line = refused(kvwitness, args, tmp_path / "nothing")
    assert "there is no such file or folder; name a bundle" in line


@of_bundles
def test_an_empty_folder(kvwitness: Command, tmp_path: Path, args: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    assert "neither a bundle nor journals; name a bundle" in refused(kvwitness, args, tmp_path / "empty")


@of_bundles
def test_a_file(kvwitness: Command, tmp_path: Path, args: tuple[str, ...]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "it is a file, but no zip; name a bundle" in refused(kvwitness, args, tmp_path / "notes.txt")


@of_bundles
def test_one_journal(kvwitness: Command, data: Path, args: tuple[str, ...]) -> None:
    line = refused(kvwitness, args, next(data.glob("*.kvwj")))
    assert f"it is one journal and no bundle; `kvwitness show {data}` reads" in line


@of_bundles
def test_a_folder_that_holds_bundles(kvwitness: Command, tmp_path: Path, bundle: Path, args: tuple[str, ...]) -> None:
    parent = tmp_path / "out"
    parent.mkdir()
    shutil.move(bundle, parent / "demo")
    write_bundle(parent / "night" / "run.zip", BundleInputs(journals=()))
    line = refused(kvwitness, args, parent)
    assert f"name one of them: {parent / 'demo'}, {parent / 'night' / 'run.zip'}" in line


@pytest.mark.parametrize("args", [READERS[0], READERS[3], READERS[4]], ids=lambda args: args[0])
def test_a_folder_of_journals(kvwitness: Command, data: Path, args: tuple[str, ...]) -> None:
    line = refused(kvwitness, args, data)
    assert "it holds a server's journals and no bundle; `kvwitness show` and `kvwitness explain` read it" in line


def test_journals_that_cannot_be_read(kvwitness: Command, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.kvwj").write_bytes(b"no journal")
    result = kvwitness("show", tmp_path / "data")
    assert result.exit_code == 2
    assert "none of its journals can be read; see the warnings above" in result.stderr
