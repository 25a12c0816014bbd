"""Which processes belong together: both ranks of a real server, its restart, and an attachment to both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attach_fixtures import kvwitness, standing_by
from stand_fixtures import StartServer, generate

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.schema.events import FactKind, Facts
from kvwitness.patches.start import is_id
from kvwitness.tracer.judgement import SCHEDULER_ROLE
from kvwitness.tracer.ledger.described import Process, read_as
from kvwitness.tracer.stand.releases import NEWEST

pytestmark = [pytest.mark.stand, pytest.mark.timeout(900)]

TWO = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def processes(data: Path) -> list[Process]:
    """What the recorded processes say of themselves, in the order in which they began."""
    journals = [read_journal(path) for path in find_journals(data)]
    return [
        read_as(Process, json.loads(event.json))
        for journal in sorted(journals, key=lambda journal: journal.events[0].t_ns)
        for event in journal.events
        if isinstance(event, Facts) and event.kind == FactKind.PROCESS
    ]


def of_one_host_and_key(found: list[Process]) -> None:
    assert len({(process.host, process.key) for process in found}) == 1
    assert all(is_id(text) for process in found for text in (process.start, process.host, process.key))


@pytest.mark.parametrize("parallel", ["tp", pytest.param("dp", marks=pytest.mark.slow)])
def test_both_ranks_share_a_start_and_a_restart_is_another(
    start_server: StartServer, tmp_path: Path, parallel: str
) -> None:
    data = tmp_path / "data"
    options: dict[str, Any] = {f"{parallel}_size": 2, "extra_env": {"KVWITNESS_DIR": str(data), **TWO}}
    for _ in range(2):
        server = start_server(**options)
        generate(server.url, [1, 2, 3])
        server.stop()
    found = processes(data)
    of_one_host_and_key(found)
    assert len([process for process in found if process.role == SCHEDULER_ROLE]) == 4
    first, second = found[: len(found) // 2], found[len(found) // 2 :]
    starts = [{process.start for process in each} for each in (first, second)]
    assert [len(each) for each in starts] == [1, 1] and starts[0] != starts[1]


@pytest.mark.slow
def test_an_attachment_is_one_start_for_all_its_ranks(tmp_path: Path) -> None:
    with standing_by(NEWEST, tmp_path, more_env=TWO, tp_size=2) as server:
        for _ in range(2):
            kvwitness("attach", "--url", server.url, "--yes")
            kvwitness("detach", "--url", server.url)
    found = processes(tmp_path / "data")
    of_one_host_and_key(found)
    assert [process.role for process in found] == [SCHEDULER_ROLE] * 4
    first, second = {process.start for process in found[:2]}, {process.start for process in found[2:]}
    assert len(first) == len(second) == 1 and first != second
