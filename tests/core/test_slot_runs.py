"""Host slots are recorded as runs: whichever way they are found, every slot is in exactly one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvwitness.patches.config import Config, Faults
from kvwitness.patches.schema.events import Run, Tail
from kvwitness.patches.witness import Witness


class Slots(list[int]):
    """What is used of a CPU tensor."""

    device = SimpleNamespace(type="cpu")

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Slots(found) if isinstance(index, slice) else found

    def tolist(self) -> list[int]:
        return list(self)


def runs(tmp_path: Path, page: int, slots: Slots) -> tuple[Run, ...]:
    w = Witness(Config(tmp_path, 2 << 20, Faults()))
    w.page_size = page
    return Tail.read_runs(w.slot_runs(slots))


@pytest.mark.parametrize(
    ("page", "pages", "expected"),
    [
        (16, [0], [(0, 16)]),
        (16, range(4, 98), [(64, 94 * 16)]),
        (16, [2, 3, 7, 1, 0], [(32, 32), (112, 16), (16, 16), (0, 16)]),
        (1, [5, 6, 7, 9, 8], [(5, 3), (9, 1), (8, 1)]),
    ],
)
def test_consecutive_pages_are_one_run(tmp_path: Path, page: int, pages: Any, expected: list[tuple[int, int]]) -> None:
    slots = Slots(slot for number in pages for slot in range(number * page, (number + 1) * page))
    assert runs(tmp_path, page, slots) == tuple(Run(*run) for run in expected)


def test_part_of_a_page_is_told_slot_by_slot(tmp_path: Path) -> None:
    assert runs(tmp_path, 16, Slots([16, 17, 18, 40])) == (Run(16, 3), Run(40, 1))


def test_no_slots_and_slots_on_the_device_are_not_read(tmp_path: Path) -> None:
    on_device = Slots([1, 2])
    on_device.device = SimpleNamespace(type="cuda")
    assert runs(tmp_path, 16, Slots()) == runs(tmp_path, 16, on_device) == ()
