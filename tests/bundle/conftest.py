"""Fixtures: a small run and the bundles that are made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwitness.tracer.bundle import BundleInputs, write_bundle

from .runs import simple_judge, small_run


@pytest.fixture(autouse=True)
def judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvwitness.tracer.judgement.judge", simple_judge)


@pytest.fixture
def inputs(tmp_path: Path) -> BundleInputs:
    return small_run(tmp_path / "data")


@pytest.fixture(params=["folder", "zip"])
def bundle(request: pytest.FixtureRequest, tmp_path: Path, inputs: BundleInputs) -> Path:
    """An intact bundle, once as a folder and once as a zip."""
    suffix = ".zip" if request.param == "zip" else ""
    return write_bundle(tmp_path / f"bundle{suffix}", inputs, spans=lambda judged, _: ['{"resourceSpans":[]}']).path


@pytest.fixture
def folder(tmp_path: Path, inputs: BundleInputs) -> Path:
    return write_bundle(tmp_path / "bundle", inputs, spans=lambda judged, _: ['{"resourceSpans":[]}']).path
