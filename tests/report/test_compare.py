"""``kvwitness compare``: equal conditions are compared, others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .runs import ENVIRONMENT, abc_records, bundle_of, record


def test_runs_under_equal_conditions(kvwitness: Any, bundle: Path, tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "run": {**ENVIRONMENT["run"], "id": "y", "seed": 7, "findings": ["something"]}}
    other = bundle_of(tmp_path / "other", abc_records(ttft_s=0.04), environment=environment)
    result = kvwitness("compare", bundle, other)
    assert result.exit_code == 0
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith(" C ")]
    assert row == ["C", "50.0", "(n=1)", "40.0", "(n=1)", "-10.0", "-", "1", "L2", "confirmed", "1", "L2", "confirmed"]
    assert "no interval for" in result.stdout
    assert "unknown in both: host.gpus" in result.stdout


def test_different_conditions_are_named_and_refused(kvwitness: Any, bundle: Path, tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "server": {"version": "0.5.22", "page_size": 16}, "extra": "yes"}
    other = bundle_of(tmp_path / "other", environment=environment)
    result = kvwitness("compare", bundle, other)
    assert (result.exit_code, result.stdout) == (2, "")
    *named, line = result.stderr.splitlines()
    assert named == ["server.version: 0.5.23 | 0.5.22", "extra: not there | yes"]
    assert "2 conditions differ: server.version, extra; make the runs alike, or add --allow-differences" in line
    told = json.loads(kvwitness("compare", bundle, other, "--json").stdout)
    assert told["compared"] is False and "series" not in told
    assert [one["name"] for one in told["differences"]] == ["server.version", "extra"]
    allowed = kvwitness("compare", bundle, other, "--allow-differences")
    assert allowed.exit_code == 0
    assert "differs: server.version: 0.5.23 | 0.5.22" in allowed.stdout
    assert " C " in allowed.stdout
    assert json.loads(kvwitness("compare", bundle, other, "--allow-differences", "--json").stdout)["compared"] is True


def test_server_arguments_are_conditions_and_its_state_is_not(kvwitness: Any, tmp_path: Path) -> None:
    def bundle(name: str, **answered: Any) -> Path:
        return bundle_of(tmp_path / name, environment={**ENVIRONMENT, "raw": {"server_info": answered}})

    one = bundle("one", tp_size=1, port=30000, internal_states=[{"x": 1}], schedule_policy="fcfs")
    same = bundle("same", tp_size=1, port=30001, internal_states=[{"x": 2}], schedule_policy="fcfs")
    other = bundle("other", tp_size=1, port=30000, schedule_policy="lpm")
    assert kvwitness("compare", one, same).exit_code == 0
    assert "arguments.schedule_policy: fcfs | lpm" in kvwitness("compare", one, other).stderr


def test_hundreds_of_conditions_that_one_run_does_not_know(kvwitness: Any, tmp_path: Path) -> None:
    answered = {f"argument_{number:03}": number for number in range(300)}
    one = bundle_of(tmp_path / "one", environment={**ENVIRONMENT, "raw": {"server_info": answered}})
    two = bundle_of(tmp_path / "two", environment={**ENVIRONMENT, "server": {"version": "0.5.22", "page_size": 16}})
    result = kvwitness("compare", one, two)
    version, arguments, error = result.stderr.splitlines()
    assert version == "server.version: 0.5.23 | 0.5.22"
    names = ", ".join(f"argument_{number:03}" for number in range(8))
    assert arguments == f"arguments: 300 conditions are known of one alone ({names}, and 292 more)"
    assert "301 conditions differ: server.version, arguments.argument_000" in error and len(error) < 600
    assert len(json.loads(kvwitness("compare", one, two, "--json").stdout)["differences"]) == 301


def test_intervals_of_differences(kvwitness: Any, tmp_path: Path) -> None:
    def bundle(name: str, base: float) -> Path:
        more = [record(f"c{number}", "C", 100 + number, ttft_s=base + number / 1e3) for number in range(10)]
        return bundle_of(tmp_path / name, [*abc_records(ttft_s=base), *more])

    told = json.loads(kvwitness("compare", bundle("one", 0.05), bundle("other", 0.09), "--json").stdout)
    (c,) = [pair for pair in told["series"] if pair["series"] == "C"]
    assert c["difference"]["interval"]["low"] > 30
    assert c["reads_one"] == "1 L2 confirmed, 10 reported"


def test_a_bundle_that_does_not_verify_is_not_compared(kvwitness: Any, bundle: Path) -> None:
    (bundle / "summary.md").write_text("all fine")
    result = kvwitness("compare", bundle, bundle)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "this bundle does not verify (changed: summary.md" in line


def test_traffic_has_no_series_to_compare(kvwitness: Any, tmp_path: Path) -> None:
    path = bundle_of(tmp_path / "b", [])
    assert "neither bundle holds requests of a series" in kvwitness("compare", path, path).stdout
