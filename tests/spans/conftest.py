"""Fixtures for tests of spans: one real Jaeger for the whole run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwitness.tracer.spans.jaeger import JaegerProcess, JaegerUnavailable, find_or_build_jaeger

JAEGER_MODULE = Path(__file__).resolve().parent.parent / "jaeger"


@pytest.fixture(scope="session")
def jaeger_program(pytestconfig: pytest.Config) -> Path:
    """The Jaeger program, built on first use; without one: a failure in CI, a loud skip elsewhere."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def progress(line: str) -> None:
        # The first build takes minutes: past pytest's capture, or the run looks hung.
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", file=sys.stderr, flush=True)

    try:
        return find_or_build_jaeger(progress, JAEGER_MODULE)
    except JaegerUnavailable as unavailable:
        reason = str(unavailable)
    # Outside the handler, so that the report is the reason alone and not two chained tracebacks.
    if os.environ.get("CI"):
        pytest.fail(f"CI must run the tests against a real Jaeger: {reason}", pytrace=False)
    pytest.skip(f"NOT TESTED AGAINST A REAL JAEGER: {reason}")


@pytest.fixture(scope="session")
def jaeger(jaeger_program: Path) -> Iterator[JaegerProcess]:
    """A running Jaeger that all tests share: give each test a service name of its own."""
    with JaegerProcess(jaeger_program) as running:
        yield running
