"""Situations by name and a fixed sample of random workloads, on SGLang's own scheduler and caches.

More of the latter: make soundness-model.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from model.start import start

pytestmark = [pytest.mark.stand, pytest.mark.timeout(600)]
Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """What one process per setting (Rust and Python core) printed."""
    result = start("--cases", "--workloads", "6", "--steps", "16", "--settings", "0", "1")
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.fixture
def told(rows: list[dict[str, Any]], request: pytest.FixtureRequest) -> Any:
    """What was said in the situation that the test is named after."""
    name = request.function.__name__.removeprefix("test_")
    return next(row["told"] for row in rows if row.get("case") == name)


def claimed(told: Told, rid: str) -> dict[str, int]:
    """Confirmed tokens of a request, by tier."""
    found: dict[str, int] = {}
    for tier, grade, _, start_, end in told[rid]["ranges"]:
        if grade == "confirmed":
            found[tier] = found.get(tier, 0) + end - start_
    return found


def test_the_ledger_s_residency_is_the_pools_and_a_confirmed_read_has_the_right_bytes(
    rows: list[dict[str, Any]],
) -> None:
    """After every step; ``model.run`` ends otherwise where they differ."""
    sampled = [row for row in rows if "setting" in row]
    assert [row["setting"].split(",")[0] for row in sampled] == ["rust", "python"]
    # An agreement on nothing would show nothing.
    assert all(row["checks"] > 30 and row["tokens confirmed L1"] > 0 for row in sampled)
    for what in ("L1 evictions", "tokens confirmed L2"):
        assert sum(row.get(what, 0) for row in sampled) > 5


def test_aborted_load_back(told: Any) -> None:
    assert told["loading"] == 1
    assert claimed(told, "c") == {}
    assert told["c"]["sentence"].endswith("missing link used (the request was aborted)")
    assert claimed(told, "d") == {"L1": 160}
    assert told["d"]["truth"] == [160, True, 0]


def test_aborted_in_queue(told: Any) -> None:
    assert claimed(told, "c") == {}
    assert claimed(told, "d") == {"L2": 160}


def test_retracted(told: Any) -> None:
    """By the bytes its last admission found everything in L1: that is what it is told, and once."""
    assert told["retracted"] == 1
    assert told["c"]["truth"] == [160, True, 0]
    assert claimed(told, "c") == {"L1": 160}
    assert told["c"]["sentence"] == "L1 read confirmed"


def test_left_l2(told: Any) -> None:
    assert told["c"]["sentence"].startswith("recomputed: left L2 before the read")
    assert "displaced by the backup of request fill" in told["c"]["sentence"]
    assert told["c"]["truth"] == [0, True, 0]


def test_split_after_backup(told: Any) -> None:
    assert told["loaded"] == [160]
    assert claimed(told, "c") == {"L2": 160}
    assert told["c"]["truth"] == [160, True, 160]


def test_split_while_loading(told: Any) -> None:
    assert claimed(told, "c") == {"L2": 160}
    assert claimed(told, "b") == {}
    assert "was not complete before this request used it" in told["b"]["sentence"]
    assert claimed(told, "d") == {"L1": 160}


def test_merged_acknowledgement(told: Any) -> None:
    assert told["nodes"] == 2
    assert (claimed(told, "c"), claimed(told, "y")) == ({"L2": 160}, {"L2": 96})


def test_overlapping_loads(told: Any) -> None:
    """The second request waits in L1 for what the first one loads: its tokens are not counted again as L2's."""
    assert told["server"] == told["product"]
    assert told["product"][0] == 224
    assert claimed(told, "c") == {"L2": 160}
    ranges = told["d"]["ranges"]
    assert sum(end - begin for tier, _, _, begin, end in ranges if tier == "L2") == 64
    assert [[tier, begin, end] for tier, grade, _, begin, end in ranges if grade == "confirmed"] == [["L2", 112, 176]]
