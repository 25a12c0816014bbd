"""``kvwitness explain``: why not in L1, and why not in L2, on one screen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from journal_tools import ABC, to_bytes
from scenarios.evicting import EvictingServer, prompt

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.bundle import BundleInputs, write_bundle

from .conftest import Command

SCREEN = (100, 24)
"""Columns and lines."""
C = "a30c069e"


@pytest.fixture(autouse=True)
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(SCREEN[0]))


def folder_of(tmp_path: Path, events: Sequence[ev.Event]) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "scheduler-1-1.kvwj").write_bytes(to_bytes(events))
    return tmp_path / "data"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return folder_of(tmp_path, list(read_journal(ABC).events))


def answer(text: str) -> list[str]:
    """What stands before the links."""
    lines = text.splitlines()
    return lines[: next(i for i, line in enumerate(lines) if line.startswith("tokens "))]


def test_both_answers_fit_a_screen(kvwitness: Command, recorded: Path) -> None:
    result = kvwitness("explain", recorded, C)
    assert result.exit_code == 0
    lines = answer(result.stdout.replace("\n tokens ", "\n  tokens "))
    assert len(lines) <= SCREEN[1] and max(map(len, lines)) <= SCREEN[0]
    text = " ".join(" ".join(lines).split())
    assert "Why not in L1? (tokens 0 to 1488, which request 6edfbdb670204fc1aaa20e17a412e0c9 had)" in text
    assert "tokens 0 to 1488: evicted, its copy in L2 stayed, 2.520 s before the match" in text
    assert "by the prefill allocation of request 2d535078d43c4c23a5cdc8fc4a95a3b0 at " in text
    assert "460 tokens asked, 1536 freed [EvictBegin 95, EvictEnd 100]" in text
    assert "4. tokens 0 to 1488 of cfe530e4a7274dcba61e7c9cb97bd1c6 demoted <- this prefix" in text
    assert "In L2: tokens 0 to 1488: it was in L2, and was loaded from there" in text


def test_as_json(kvwitness: Command, recorded: Path) -> None:
    why = json.loads(kvwitness("explain", recorded, C, "--json").stdout)["why"]
    (piece,) = why["l1"]
    assert (piece["because"], piece["places"]) == ("evicted", [4])
    assert piece["eviction"]["rids"] == ["2d535078d43c4c23a5cdc8fc4a95a3b0"]
    assert [victim["outcome"] for victim in piece["eviction"]["victims"]] == ["demoted"] * 4
    assert why["l2"][0]["because"] == "there"


@pytest.mark.parametrize("name", ["bundle", "bundle.zip"])
def test_of_a_bundle(kvwitness: Command, recorded: Path, tmp_path: Path, name: str) -> None:
    bundle = write_bundle(tmp_path / name, BundleInputs(journals=tuple(recorded.iterdir()))).path
    assert "Why not in L1?" in kvwitness("explain", bundle, C).stdout


def test_an_over_eviction_is_said(kvwitness: Command, tmp_path: Path) -> None:
    server = EvictingServer(l1=448, l2=32, ignores_room=True)
    for seed in range(1, 6):
        server.send(f"victim-{seed}", prompt(seed, 64))
    server.send("big", prompt(9, 192))
    server.send("again", (*prompt(3, 64), 7))
    text = " ".join(kvwitness("explain", folder_of(tmp_path, server.events), "again").stdout.split())
    assert "by the prefill allocation of request big at " in text
    assert (
        "192 tokens asked (128 were free, and 80 needed beyond them), 192 freed; "
        "over-eviction: 112 more were asked for than needed, 112 more freed"
    ) in text
    assert "Why not in L2? (tokens 0 to 64, which request victim-3 had)" in text
    assert "no host slots for its copy: 64 tokens to store, 32 free" in text


def test_of_many_victims_the_first_ones_and_our_own_are_shown(kvwitness: Command, tmp_path: Path) -> None:
    server = EvictingServer(l1=1280, l2=4000)
    for seed in range(1, 20):
        server.send(f"victim-{seed}", prompt(seed, 64))
    server.send("big", prompt(90, 1000))
    server.send("again", (*prompt(12, 64), 7))
    text = kvwitness("explain", folder_of(tmp_path, server.events), "again").stdout
    assert "12.  tokens 0 to 64 of victim-12  demoted   <- this prefix" in text
    assert " 6.  " in text and " 7.  " not in text
    assert "and 8 more" in text or "and 9 more" in text


def test_a_request_that_nothing_was_there_for(kvwitness: Command, tmp_path: Path) -> None:
    server = EvictingServer(l1=448, l2=400)
    server.send("first", prompt(1, 64))
    text = kvwitness("explain", folder_of(tmp_path, server.events), "first").stdout
    assert "No earlier request on this instance is known to begin like it" in text
    assert "Why not" not in text


def test_one_request_has_to_be_named(kvwitness: Command, recorded: Path) -> None:
    for arguments in ((), (C, "--rid", C)):
        result = kvwitness("explain", recorded, *arguments)
        assert result.exit_code == 2
        assert "name one request" in result.stderr
    assert kvwitness("explain", recorded, "--rid", C).exit_code == 0
