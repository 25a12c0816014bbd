"""The releases of `kvwitness matrix` on narrow terminals and in files."""

from __future__ import annotations

import pytest

from kvwitness.tracer.cli.matrix import print_releases
from kvwitness.tracer.demo.matrix import MatrixRow

ROWS = [
    MatrixRow(
        "0.5.17",
        tree_class="HiRadixCache",
        tree_core="-",
        installed=41,
        sentences={"A": "recomputed", "B": "L1 read confirmed", "C": "L2 read confirmed"},
        same_tokens=True,
        right=True,
    ),
    MatrixRow("0.5.8", error="the server did not start"),
]


def test_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_releases(ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "SGLang 0.5.17, tree HiRadixCache, core -, hooks 41, not understood 0, missing 0,"
    assert lines[1] == "C = A yes"
    assert lines[2:] == [
        "  A: recomputed",
        "  B: L1 read confirmed",
        "  C: L2 read confirmed",
        "SGLang 0.5.8",
        "  error: the server did not start",
    ]


def test_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_releases(ROWS)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line and "─" not in line]
    assert lines[0][:4] == ["SGLang", "tree", "core", "hooks"]
    assert lines[1][-5:] == ["L2", "read", "confirmed", "yes", "-"]  # and no error
    assert lines[2][0] == "0.5.8" and lines[2][-5:] == ["the", "server", "did", "not", "start"]
