"""Fixtures of the report's tests: bundles of recorded runs, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.conftest import Command

from .runs import bundle_of


@pytest.fixture
def kvwitness() -> Command:
    return Command()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundle_of(tmp_path / "bundle")
