"""The requests on narrow and on wide terminals, and in files."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from kvwitness.tracer.bundle.rows import Row
from kvwitness.tracer.cli.table import print_requests
from kvwitness.tracer.model import Grade

RID = "0123456789abcdef0123456789abcdef"
SENTENCE = "L2 read not confirmed: no acknowledged backup of tokens 0 to 1488 was seen before the match of this request"


def row(request: str = RID, sentence: str = SENTENCE, unknown: int | None = 0) -> Row:
    return Row(request, "C", 1516, 0, 1504, 0, 12, unknown, Grade.CONSISTENT, sentence)


def shown(capsys: pytest.CaptureFixture[str], *rows: Row, doubt: str = "") -> list[str]:
    print_requests(rows, doubt=doubt)
    return capsys.readouterr().out.splitlines()


def test_80_columns_give_each_request_a_block(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert shown(capsys, row(), row("kvw-1-002-B", "L1 read confirmed", unknown=3)) == [
        f"{RID} (C): consistent_with_reuse",
        "  L2 read not confirmed: no acknowledged backup of tokens 0 to 1488 was seen",
        "  before the match of this request",
        "  prompt 1516, L1 0, L2 1504, L3 0, recomputed 12, unknown 0",
        "kvw-1-002-B (C): consistent_with_reuse",
        "  L1 read confirmed",
        "  prompt 1516, L1 0, L2 1504, L3 0, recomputed 12, unknown 3",
    ]


def test_a_wide_terminal_keeps_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    lines = [line.split() for line in shown(capsys, row()) if line and "─" not in line]
    assert lines[0][-2:] == ["grade", "sentence"]
    assert lines[1][:3] == [RID, "C", "1516"]
    assert len(lines) == 3  # the sentence has room to be read, and takes two lines


def test_in_a_file_each_request_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = shown(capsys, row(), doubt="NOT VERIFIED: ")
    assert [line for line in lines if RID in line and line.endswith(f"NOT VERIFIED: {SENTENCE}")]
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(("columns", "table"), [(80, False), (140, True)])
def test_the_width_is_the_terminals(program: list[str], tmp_path: Path, columns: int, table: bool) -> None:
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    recorded = Path(__file__).parents[1] / "fixtures" / "abc-0.5.23-rust.kvwj"
    folder = tmp_path / "recorded"
    folder.mkdir()
    (folder / recorded.name).write_bytes(recorded.read_bytes())
    with subprocess.Popen([*program, "show", str(folder)], stdout=follower, stdin=follower, env=environment) as process:
        os.close(follower)
        text = ""
        while True:
            try:
                text += os.read(leader, 1 << 16).decode()
            except OSError:  # the other side is closed
                break
    os.close(leader)
    assert process.returncode == 0
    assert ("sentence" in text) is table
    assert "L2 read confirmed" in text
    assert "a30c069e435f44fc8fe19956ac531e90" in text
