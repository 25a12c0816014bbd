"""The releases of `kvwitness matrix` on narrow terminals and in files."""

from __future__ import annotations

import pytest

from kvwitness.tracer.cli.matrix import print_releases, print_settings
from kvwitness.tracer.demo.matrix import MatrixRow
from kvwitness.tracer.demo.settings import SETTINGS, SettingRow, refusal

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
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


def test_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sentences = {"A": "recomputed", "B": "L1 read confirmed", "C": "L2 read confirmed"}
    rows = [
        SettingRow("direct-page_first", "direct, page_first_direct", sentences=sentences, same_tokens=True, right=True),
        SettingRow("direct-page_head", "", refused="ValueError: page_head needs the kernel backend"),
    ]
    print_settings(rows, {"direct-page_first": "confirms all 2 confirmed ranges"})
    assert capsys.readouterr().out.splitlines() == [
        "direct-page_first (SGLang: direct, page_first_direct)",
        "  A: recomputed",
        "  B: L1 read confirmed",
        "  C: L2 read confirmed",
        "  C's answer: the same",
        "  oracle: confirms all 2 confirmed ranges",
        "direct-page_head",
        "  refused by SGLang: ValueError: page_head needs the kernel backend",
    ]


def test_what_sglang_refuses_is_told_in_its_own_line() -> None:
    log = "the server ended\n  Traceback (most recent call last):\n  ValueError: this does not go together\n  bye"
    assert refusal(log) == "ValueError: this does not go together"
    assert refusal("the server was not healthy after 300 s") == ""


def test_every_setting_of_the_issue_is_there() -> None:
    options = [setting.options for setting in SETTINGS.values()]
    policies = {"write_through", "write_through_selective", "write_back"}
    assert {o.write_policy for o in options} == policies
    pairs = {(io, layout) for io in ("direct", "kernel") for layout in LAYOUTS}
    assert {(o.io_backend, o.mem_layout) for o in options} == pairs
    assert {o.page_size for o in options} >= {1, 16, 64}
    assert {o.overlap for o in options} == {True, False}
    assert {o.tree_core for o in options} >= {None, "python"}
    assert {o.model for o in options} == {"qwen2", "dsv2", "mellum", "lfm2"}
    assert {(o.tp_size, o.dp_size) for o in options} == {(1, 1), (2, 1), (1, 2)}
    assert any("--chunked-prefill-size" in o.server_args for o in options)
