"""Fixtures of the report's tests: bundles of recorded runs, and the command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli.conftest import Command

from .runs import bundle_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture
def kvwitness() -> Command:
    return Command()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundle_of(tmp_path / "bundle")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    # Only tests of the page in a browser need it.
    from playwright.sync_api import sync_playwright

    program = os.environ.get("KVWITNESS_CHROMIUM") or shutil.which("chromium")
    assert program, "no Chromium: `make browser` installs one, KVWITNESS_CHROMIUM names one"
    with sync_playwright() as playwright:
        # A root user has no sandbox to use; the page is the test's own.
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()
