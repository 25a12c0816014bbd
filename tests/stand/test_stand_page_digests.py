"""Digests of pages on real tensors, in the stand's own Python: this one has no torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_stand_copies import run_in_stand

from kvwitness.tracer.stand.environment import StandEnvironment

pytestmark = [pytest.mark.stand, pytest.mark.timeout(600)]


def test_digests_tell_equal_pages_from_different_ones(stand_environment: StandEnvironment) -> None:
    out = run_in_stand(stand_environment, str(Path(__file__).with_name("check_page_digests.py")))
    for check in (
        "equal bytes have equal digests",
        "one bit is found, with its page and layer",
        "the top bits of two words do not cancel",
        "what is in the wrong place is found",
        "a pool of another shape is one failure",
    ):
        assert check in out
