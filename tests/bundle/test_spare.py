"""Room kept free for a bundle's small files."""

from __future__ import annotations

from pathlib import Path

from kvwitness.tracer.bundle.spare import SPARE_BYTES, Spare


def test_it_takes_room_and_gives_it_back(tmp_path: Path) -> None:
    with Spare(tmp_path / "deep" / "out") as spare:
        (held,) = (tmp_path / "deep").iterdir()
        assert held.stat().st_blocks * 512 >= SPARE_BYTES
        spare.release()
        assert list((tmp_path / "deep").iterdir()) == []
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_place_that_cannot_be_written_is_no_reason_not_to_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Spare(tmp_path / "file" / "out"):
        pass
