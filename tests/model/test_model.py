"""A fixed sample of random workloads on SGLang's own caches (more: make soundness-model)."""

from __future__ import annotations

import json

import pytest

from model.start import start
from stand_fixtures import stand_environment

__all__ = ["stand_environment"]

pytestmark = [pytest.mark.stand, pytest.mark.timeout(600)]


def test_the_ledger_s_residency_is_the_pools_and_a_confirmed_read_has_the_right_bytes() -> None:
    """Two settings, Rust and Python core; each agrees with the bytes in the pools after every step."""
    result = start("--workloads", "6", "--steps", "12", "--settings", "0", "1")
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 2
    for row in rows:
        assert row["checks"] > 100
        # An agreement on nothing would show nothing.
        assert row["L1 evictions"] > 10 and row["tokens confirmed L1"] > 0
    assert any(row.get("tokens confirmed L2", 0) > 0 for row in rows)
