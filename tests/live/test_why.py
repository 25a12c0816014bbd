"""Why a prefix was not in L1, and why not in L2, on real servers with small pools; and who signed for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvwitness.tracer.bundle.rows import one_of_series
from kvwitness.tracer.cli.application import application
from kvwitness.tracer.cli.why import find_why
from kvwitness.tracer.demo.run import DemoOptions, run_demo
from kvwitness.tracer.demo.variants import VARIANTS
from kvwitness.tracer.model import Reason
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.releases import NEWEST
from kvwitness.tracer.verdicts.why import Because

pytestmark = [pytest.mark.stand, pytest.mark.slow, pytest.mark.timeout(1800)]


def kvwitness(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(application, [str(one) for one in arguments], prog_name="kvwitness")
    return result.exit_code, result.stdout


@pytest.mark.parametrize("release", [NEWEST, "0.5.17"])
def test_the_displacing_requests_are_named(tmp_path: Path, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = DemoOptions(release=release, variant=VARIANTS["l2-evicted"])
    result = run_demo(options, tmp_path / "bundle", SilentProgress())
    bundle = result.bundle.path
    record = one_of_series(result.run.records, "C")
    assert record is not None
    verdict = next(one for one in result.bundle.verdicts if one.rid == record.rid)
    why = find_why(bundle, verdict)
    assert why is not None
    fills = {one.rid for one in result.run.records if one.series not in "ABC"}

    assert why.l1 and why.l2
    for piece in why.l1:
        eviction = piece.eviction
        assert piece.because in (Because.EVICTED, Because.LOST) and eviction is not None
        assert eviction.rids and set(eviction.rids) <= fills
        assert eviction.free is not None and eviction.needed is not None and eviction.freed is not None
        assert sum(victim.tokens for victim in eviction.victims) == eviction.freed
        # Both releases count what is free: what was asked for is what was needed, but for the rounding to pages.
        assert eviction.overasked is not None and eviction.overasked <= 2 * 16
    evicted = [piece for piece in why.l2 if piece.because is Because.EVICTED]
    assert evicted
    for piece in evicted:
        eviction = piece.eviction
        assert eviction is not None and set(eviction.rids) <= fills and len(eviction.rids) == 1
        assert eviction.free is not None and eviction.freed is not None
        ours = [eviction.victims[place - 1] for place in piece.places]
        assert ours and all(victim.start < piece.end and piece.start < victim.end for victim in ours)
    lost = next(piece for piece in verdict.ranges if piece.reason is Reason.LEFT_L2_BEFORE_READ)
    assert any(f"request {rid}" in lost.detail for rid in fills)

    monkeypatch.setenv("COLUMNS", "120")
    code, shown = kvwitness("explain", bundle, "C")
    print(shown)
    assert code == 0
    answer, _, _ = shown.partition("\ntokens ")
    assert "Why not in L1?" in answer and "Why not in L2?" in answer and "<- this prefix" in answer
    assert len(answer.splitlines()) <= 40
    assert json.loads(kvwitness("explain", bundle, "C", "--json")[1])["why"]["l2"][0]["eviction"]["rids"]

    key = tmp_path / "me.pem"
    assert kvwitness("key", "new", key)[0] == kvwitness("sign", bundle, "--key", key)[0] == 0
    code, shown = kvwitness("verify", bundle, "--key", f"{key}.pub")
    print(shown)
    assert code == 0 and shown.startswith("signature valid: ")
    statement = json.loads((bundle / "statement.json").read_text())
    (contract,) = statement["predicate"]["hookContracts"]
    assert contract["sglang"] == release
    assert any(hook["status"] == "installed" for hook in contract["hooks"])
