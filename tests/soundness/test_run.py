"""The search itself: what it prints and keeps can be believed, and it can be interrupted, gone on with and replayed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from journal_tools import ABC

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.schema import events as ev
from soundness import judged, search
from soundness.compare import Difference, Outcome
from soundness.run import main
from soundness.search import Tally, read_tally
from soundness.simulate import LIVELY, simulated
from soundness.state import State
from soundness.written import Mutant, read, write

RUN = Path(__file__).parent / "run.py"


@pytest.fixture
def contradicting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle that refuses all that is confirmed of L2."""

    def compare(journals: judged.Journals) -> Outcome:
        loads = [e for events in journals for e in events if isinstance(e, ev.LoadQueued)]
        return Outcome(tuple(Difference("c", "L2", e.start, e.end, "never") for e in loads), (), 1)

    monkeypatch.setattr(judged, "outcome", compare)


def test_a_mutant_comes_back_from_its_file(tmp_path: Path) -> None:
    journals = (simulated(1, digested=1.0, habits=LIVELY).events, list(read_journal(ABC).events))
    mutant = Mutant("name", ("one", "two"), journals, "claim: why", nothing=True)
    write(tmp_path / "sub" / "mutant.json", mutant)
    assert read(tmp_path / "sub" / "mutant.json") == mutant


def test_false_confirmations_are_kept_and_judged_again(
    tmp_path: Path, contradicting: None, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = search.search(range(40), 3, conditions=search.Conditions(keep=tmp_path))
    assert tally.false and tally.false[0].kind == "never"
    found = next(found for found in tally.false if found.file and not found.mutant.startswith("ranks"))
    assert main(["--replay", found.file]) == 1
    out = capsys.readouterr().out
    assert out.startswith(found.mutant) and "FALSE CONFIRMATION" in out
    assert all(step in out for step in found.recipe)


def test_what_cannot_be_judged_is_a_failure_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(journals: judged.Journals) -> Outcome:
        raise KeyError("pools")

    monkeypatch.setattr(judged, "outcome", compare)
    monkeypatch.setattr(search, "_untouched", lambda *_: (Outcome((), (), 0), ()))
    tally = search.search(range(20), 3)
    assert tally.false == [] and tally.broken
    assert all("KeyError" in found.claim for found in tally.broken)


def test_what_was_tried_is_counted_and_what_never_changed_anything_is_named() -> None:
    events = search.sources.small()["simulated plain"]
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.Released) and e.cached_host)
    tally = search.exhaust("simulated plain", [at], None)
    fields = {name for event, name, _ in tally.tried if event == "Released"}
    assert {"seq", "t_ns", "req", "state", "output_tokens", "cached_device"} <= fields
    assert tally.tried == tally.alone and sum(tally.tried.values()) == tally.mutants
    unchanging = {(name, mutator) for _, name, mutator in tally.unchanging()}
    assert ("cached_device", "one more") not in unchanging
    assert 0 < len(unchanging) < len(tally.tried)
    again = read_tally(json.loads(json.dumps(tally.plain())))
    assert again == tally


def test_a_search_that_was_cut_off_goes_on_and_comes_to_the_same(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    asked = ["--seed", "5", "--mutants", "130", "--jobs", "1"]
    codes = {main([*asked, "--state", str(folder)]) for folder in (whole, part)}
    assert codes <= {0, 1}
    lines = [line for line in (part / "chunks.jsonl").read_text("utf-8").splitlines() if line]
    assert len(lines) == 2
    # Killed while it wrote the second line.
    (part / "chunks.jsonl").write_text(lines[0] + "\n" + lines[1][:200], "utf-8")
    assert main(["--resume", "--state", str(part), "--jobs", "1"]) in codes
    sums = [json.loads((folder / "summary.json").read_text("utf-8")) for folder in (whole, part)]
    for told in sums:
        for found in told["false"] + told["broken"]:
            found.pop("file")
        told["false"].sort(key=str)
        told["broken"].sort(key=str)
    assert sums[0] == sums[1]
    assert sums[0]["mutants"] == 130 and not sums[0]["interrupted"]


def test_nothing_to_go_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--resume", "--state", str(tmp_path / "none")]) == 2
    assert "nothing to go on with" in capsys.readouterr().err


def test_seeds_are_drawn_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        main(["--mutants", "2", "--seeds", "2", "--jobs", "1", "--state", str(tmp_path)])
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed ")]
    assert first != second
    task = State(tmp_path).task()
    assert task is not None and second == f"seed {task.seeds[0]} {task.seeds[1]}: 2 mutants each"


@pytest.mark.parametrize("times", [1, 2])
def test_interrupted_it_says_what_it_knows_and_ends(tmp_path: Path, times: int) -> None:
    command = [sys.executable, str(RUN), "--mutants", "100000", "--jobs", "1", "--state", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None and process.stdout is not None
    assert process.stdout.readline().startswith("seed ")
    assert "1 of " in process.stderr.readline()
    for _ in range(times):
        # As a terminal does: to the workers as well.
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert "false confirmations" in out and "interrupted: --resume" in err
    told = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert told["interrupted"] and told["mutants"] >= 100
    assert sum(tally.mutants for tally in State(tmp_path).finished().values()) <= told["mutants"]


def test_sums_add_up() -> None:
    one, two = search.search(range(10), 1), search.search(range(10, 20), 1)
    both, whole = Tally(), search.search(range(20), 1)
    both.add(one)
    both.add(two)
    assert both == whole
