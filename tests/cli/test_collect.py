"""What `kvwitness collect` says when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvwitness.tracer.bundle import BundleInputs, write_bundle

from .conftest import Command

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect_live(*args: Any, **options: Any) -> int:
        return 0

    monkeypatch.setattr("kvwitness.tracer.cli.collect.collect_live", collect_live)


def test_it_says_what_it_follows_and_where_to(kvwitness: Command, data: Path) -> None:
    first, second, *_ = kvwitness("collect", "--dir", data, "--otlp", NOWHERE).stderr.splitlines()
    assert first == f"following {data} (2 journals); spans go to {NOWHERE} over http, until Ctrl-C"
    assert second.startswith(f"warning: {NOWHERE}: nothing listens on port 1 (connection refused); start an OTLP")


def test_the_parent_of_a_data_folder(kvwitness: Command, data: Path, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    data.rename(parent / "20260102")
    line = kvwitness("collect", "--dir", parent, "--otlp", NOWHERE).stderr.splitlines()[0]
    assert line.startswith(f"following {parent / '20260102'} (2 journals); ")


def test_a_folder_without_journals(kvwitness: Command, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    line = kvwitness("collect", "--dir", tmp_path / "data", "--otlp", NOWHERE).stderr.splitlines()[0]
    assert "no journals there yet, waiting for a server that records into it" in line
    write_bundle(tmp_path / "data" / "bundle", BundleInputs(journals=()))
    line = kvwitness("collect", "--dir", tmp_path / "data", "--otlp", NOWHERE).stderr.splitlines()[0]
    assert "no journals there yet, it holds bundles (`kvwitness export` sends theirs), waiting" in line


def test_a_bundle_is_exported_and_not_followed(kvwitness: Command, bundle: Path) -> None:
    result = kvwitness("collect", "--dir", bundle, "--otlp", NOWHERE)
    assert result.exit_code == 2
    assert "it is a bundle, not a server's folder; `kvwitness export` sends its spans" in result.stderr
