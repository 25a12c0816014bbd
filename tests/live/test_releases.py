"""The demo on real servers of older releases, and on one whose code is not what the hooks know."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvwitness.tracer.bundle.rows import one_of_series
from kvwitness.tracer.demo.declined import run_declined, wrong_about_probe
from kvwitness.tracer.demo.matrix import run_matrix
from kvwitness.tracer.demo.run import DemoOptions, run_demo
from kvwitness.tracer.demo.variants import Variant, wrong_about_c
from kvwitness.tracer.model import Grade, Link, Tier
from kvwitness.tracer.stand.environment import StandEnvironment
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.releases import NEWEST, RELEASES

pytestmark = [pytest.mark.stand, pytest.mark.timeout(1800)]

SAMPLE = ("0.5.17", "0.4.9.post6")
"""A HiRadixCache release with plugins, and the oldest one that runs. (The newest is in test_product.)"""


@pytest.mark.parametrize(
    "release",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in RELEASES if name != NEWEST],
)
def test_a_repeat_request_gets_a_proven_tier(tmp_path: Path, release: str) -> None:
    (row,) = run_matrix([release], tmp_path, SilentProgress())
    assert row.right, row
    assert row.tree_class == "HiRadixCache"
    assert not row.not_understood


@pytest.mark.slow
def test_a_pass_that_did_not_wait_for_its_load_is_not_a_read(tmp_path: Path) -> None:
    """SGLang 0.4: where the loading thread wakes up late the forward pass reads slots that nothing was copied to."""
    variant = Variant(
        "load-late",
        "the forward pass does not wait for the load-back",
        Link.READ,
        ("before its copy had ended",),
        tier=Tier.L2,
        stand_fault="load-late:400",
    )
    result = run_demo(DemoOptions(release="0.4.9.post6", variant=variant), tmp_path / "bundle", SilentProgress())
    a, c = (one_of_series(result.run.records, series) for series in "AC")
    assert a is not None and c is not None and a.text != c.text, "the answer is wrong, which is the point"
    verdict = next(v for v in result.bundle.verdicts if v.rid == c.rid)
    assert wrong_about_c(variant, verdict) is None


@pytest.mark.slow
def test_a_reported_host_hit_that_was_never_loaded_is_refuted(tmp_path: Path) -> None:
    result = run_declined("0.5.17", tmp_path / "bundle", SilentProgress())
    assert wrong_about_probe(result.probe, capped=False) is None
    probe = result.probe
    assert probe is not None and "shorter than the load-back threshold" in probe.sentence
    response = next(check for check in probe.checks if "response" in check.witness)
    assert response.agrees is False and response.explained
    assert response.theirs.startswith("device 1994, host 6")


@pytest.mark.slow
def test_a_function_with_another_signature_is_not_hooked_and_its_link_is_lost(
    tmp_path: Path, stand_environment: StandEnvironment
) -> None:
    """SGLang with a renamed parameter: it serves as before, and what the hook would have shown is missing."""
    code = "import importlib.util; print(importlib.util.find_spec('sglang').submodule_search_locations[0])"
    found = subprocess.run([str(stand_environment.python), "-c", code], check=True, capture_output=True, text=True)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    subprocess.run(["cp", "-rs", found.stdout.strip(), str(overlay / "sglang")], check=True)
    changed = overlay / "sglang/srt/mem_cache/hybrid_cache/hybrid_cache_controller.py"
    source = changed.read_text()
    head, body = source.split("    def write(\n", 1)
    write, rest = re.split(r"(?=\n    def )", body, maxsplit=1)
    changed.unlink()
    changed.write_text(head + "    def write(\n" + write.replace("device_indices", "device_rows") + rest)
    options = DemoOptions(overlay=overlay)
    result = run_demo(options, tmp_path / "bundle", SilentProgress())
    assert all(record.error is None for record in result.run.records)
    record = one_of_series(result.run.records, "C")
    verdict = next(v for v in result.bundle.verdicts if record is not None and v.rid == record.rid)
    assert verdict.grade is not Grade.CONFIRMED
    lost = {link.link: link.detail for r in verdict.ranges for link in r.missing}
    assert "controller.write is not installed (unknown_signature" in lost[Link.BACKED_UP]
