"""Digests of pages on a real SGLang server: equal bytes are verified, a flipped bit is called corruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwitness.tracer.bundle.rows import one_of_series
from kvwitness.tracer.bundle.verify import verify_bundle
from kvwitness.tracer.demo.run import DemoOptions, run_demo
from kvwitness.tracer.demo.variants import VARIANTS
from kvwitness.tracer.model import Grade, Reason, RequestVerdict, Tier
from kvwitness.tracer.stand.progress import SilentProgress

pytestmark = [pytest.mark.stand, pytest.mark.slow, pytest.mark.timeout(1800)]


def about_c(options: DemoOptions, bundle: Path) -> RequestVerdict:
    result = run_demo(options, bundle, SilentProgress())
    record = one_of_series(result.run.records, "C")
    assert record is not None
    assert verify_bundle(bundle).ok
    return next(verdict for verdict in result.bundle.verdicts if verdict.rid == record.rid)


def test_a_byte_flip_in_the_host_pool_is_called_corruption(tmp_path: Path) -> None:
    c = about_c(DemoOptions(variant=VARIANTS["byte-flip"]), tmp_path / "bundle")
    assert (c.tier, c.grade, c.reason) == (Tier.L2, Grade.REFUTED, Reason.CORRUPTION_SUSPECTED)
    assert c.sentence.startswith("L2 read corrupted: the page of tokens 0 to 16 (host slots ")
    assert "came back with other bytes in layer 2: event " in c.sentence


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"digest": "all"}, id="rust-core"),
        pytest.param({"digest": "all", "tree_core": "python", "write_policy": "write_back"}, id="python-write_back"),
        pytest.param({"digest": "1/4", "page_size": 1, "overlap": True}, id="page1-overlap"),
        *(
            pytest.param({"digest": "sample", "release": release}, id=release)
            for release in ("0.5.17", "0.5.14", "0.5.12.post1", "0.5.10.post1", "0.5.8", "0.5.6.post2")
        ),
    ],
)
def test_equal_bytes_are_verified(tmp_path: Path, options: dict[str, str]) -> None:
    c = about_c(DemoOptions(**options), tmp_path / "bundle")  # type: ignore[arg-type]
    assert (c.tier, c.grade) == (Tier.L2, Grade.VERIFIED)
    # Under write_back A's own last page is a node, and so a range, of its own.
    reads = [r for r in c.ranges if r.tier is Tier.L2]
    compared, pages = sum(r.pages_compared for r in reads), sum(r.pages for r in reads)
    if options["digest"] == "all":
        assert c.sentence == "L2 read verified" and compared == pages
    else:
        assert 0 < compared < pages
        assert c.sentence == f"L2 read verified ({compared} of {pages} pages sampled)"


def test_a_release_that_copies_in_threads_says_why_nothing_was_compared(tmp_path: Path) -> None:
    c = about_c(DemoOptions(release="0.4.10.post2", digest="all"), tmp_path / "bundle")
    assert c.grade is Grade.CONFIRMED
    assert any("was not compared: hook controller.start_" in note for note in c.notes)
