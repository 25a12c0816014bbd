"""`kvwitness watch` and `attach --outside` as a person gives them: what is refused, and what is printed."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Command

DATA = Path(__file__).parents[1] / "outside" / "data"
MAIN = [sys.executable, "-c", "from kvwitness.tracer.cli import main; main()"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAIN, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server's data folder with the journal of a finished run."""
    raw = lzma.decompress((DATA / "0.5.23.kvwj.xz").read_bytes())
    (tmp_path / "scheduler-999999-1.kvwj").write_bytes(raw)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("watch",), "give --dir or --url"),
        (("watch", "--dir", "/nowhere"), "there is no such folder"),
        (("watch", "--dir", "/", "--outside"), "exclude each other"),
        (("watch", "--url", "127.0.0.1:1"), "write http://127.0.0.1:1"),
        (("watch", "--url", "http://127.0.0.1:1", "--outside"), "no SGLang server answers"),
        (("watch", "--dir", "/tmp", "--listen", "nowhere"), "it is no address to listen on"),
        (
            ("watch", "--url", "http://127.0.0.1:1", "--kv-replay", "tcp://127.0.0.1:2"),
            "--kv-replay without --kv-events",
        ),
        (("attach", "--outside"), "--outside needs --url and --out"),
        (("attach", "--outside", "--url", "http://127.0.0.1:1", "--out", "{tmp}/b"), "no SGLang server answers"),
    ],
)
def test_what_cannot_be_watched_is_one_line(
    arguments: tuple[str, ...], said: str, tmp_path: Path, kvwitness: Command
) -> None:
    done = kvwitness(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert done.exit_code == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and said in errors[0], done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


def test_a_folder_in_which_nothing_has_recorded_is_said(tmp_path: Path) -> None:
    done = run("watch", "--dir", str(tmp_path), "--for", "0.5", "--listen", "off")
    assert done.returncode == 0 and f"no journals in {tmp_path} yet" in done.stderr
    assert f"watching {tmp_path} for 0.5 s, or until Ctrl-C" in done.stderr


def test_json_lines_for_pipes(folder: Path) -> None:
    done = run("watch", "--dir", str(folder), "--for", "1", "--json", "--listen", "off")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = {line["type"] for line in lines}
    assert kinds == {"request", "eviction", "load_back", "gap"}
    assert [line["sentence"] for line in lines if line["type"] == "request"].count("L2 read confirmed") == 3


def test_without_a_terminal_there_is_a_line_for_each_request(folder: Path) -> None:
    done = run("watch", "--dir", str(folder), "--for", "1", "--listen", "off")
    assert done.returncode == 0 and done.stdout.count("L2 read confirmed (L1 0, L2 1488") == 3
    assert "HEALTH_CHECK" not in done.stdout


def test_a_reader_that_goes_away_ends_it_without_a_complaint(folder: Path) -> None:
    command = " ".join(f"'{part}'" for part in [*MAIN, "watch", "--dir", str(folder), "--for", "1", "--json"])
    done = subprocess.run(["sh", "-c", f"{command} | true"], capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
