"""Into real servers that were started without kvwitness, while they serve, and out again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from attach_fixtures import kvwitness, last_of, load, probed, prompt, scheduler_journals, slowest, untouched
from gdb_tools import needs_gdb, way_into
from stand_fixtures import generate

from kvwitness.collectors.journal import find_journals
from kvwitness.collectors.live.inject import inject
from kvwitness.collectors.standby import ask
from kvwitness.patches.schema.control import ATTACH, DETACH, FOLDER
from kvwitness.patches.schema.events import HookFailed, SnapshotEnd
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, Tier
from kvwitness.tracer.stand.releases import NEWEST
from kvwitness.tracer.stand.server import StandServer

pytestmark = [
    pytest.mark.stand,
    pytest.mark.timeout(900),
    needs_gdb,
]

SLOW = pytest.mark.slow
RELEASES = [pytest.param(NEWEST, id=NEWEST), pytest.param("0.5.17", id="0.5.17", marks=SLOW)]
TWO = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@contextmanager
def without_kvwitness(release: str, tmp_path: Path, **options: Any) -> Iterator[StandServer]:
    """A server whose schedulers cannot import kvwitness, and in which three threads more want the GIL."""
    with probed(release, tmp_path, {"PROBE_BUSY": "3", **options.pop("extra", {})}, **options) as server:
        (tmp_path / "hide").touch()
        schedulers = server.scheduler_pids()
        while not all((tmp_path / f"hidden-{pid}").exists() for pid in schedulers):
            server.check_alive()
        yield server


@pytest.mark.parametrize("release", RELEASES)
def test_what_was_resident_before_is_confirmed_under_load(release: str, tmp_path: Path) -> None:
    chance = random.Random(1)
    shared = prompt(chance)
    data = tmp_path / "data"
    with without_kvwitness(release, tmp_path) as server:
        a = generate(server.url, [*shared, 5, 6, 7])
        with load(server.url) as seen:
            attached = kvwitness("attach", "--url", server.url, "--live", "--dir", str(data), "--yes")
            (rank,) = attached["ranks"]
            assert rank["snapshot"]["complete"] and rank["snapshot"]["l2_tokens"] >= 1488
            assert rank["way"] == "live" and rank["tool"].startswith("gdb ") and rank["stopped_us"] > 0
            for _ in range(4):
                generate(server.url, prompt(chance))
            c = generate(server.url, [*shared, 5, 6, 7], rid="c")
            detached = kvwitness("detach", "--pid", str(server.pid))
            later = generate(server.url, [*shared, 5, 6, 7])
            answered = seen.answers
        assert seen.wrong == [] and answered > 8
        print(f"stood still for {rank['stopped_us'] / 1e6:.3f} s; slowest of {answered} requests {slowest(seen):.2f} s")
        assert detached["not_restored"] == []
        assert c.tokens == a.tokens == later.tokens and c.host_tokens == 1488
    (journal,) = scheduler_journals(data)
    assert journal.closed and not journal.gaps and not journal.anomalies
    assert not [event for event in journal.events if isinstance(event, HookFailed)]
    verdict = last_of([journal], "c")
    assert (verdict.tier, verdict.grade) == (Tier.L2, Grade.CONFIRMED), verdict.sentence
    assert verdict.sentence == "L2 read confirmed (resident at attach)"
    (instance,) = judge([journal]).instances
    assert instance.facts.shown["attach"]["stopped_us"] == rank["stopped_us"]
    untouched(tmp_path, [])


@SLOW
@pytest.mark.parametrize("release", [NEWEST, "0.5.17"])
def test_twenty_rounds_leave_nothing_resident(release: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with without_kvwitness(release, tmp_path) as server, load(server.url) as seen:
        (pid,) = server.scheduler_pids()
        process = psutil.Process(pid)
        way = way_into(pid)
        sizes: list[tuple[int, int, int]] = []
        stops: list[float] = []
        before = process.num_threads()
        for _ in range(20):
            injection = inject(pid, way, data, 64 << 20)
            assert injection.report.ok, injection
            stops.append(injection.stopped_us / 1e6)
            attached = ask(Path(injection.report.socket), ATTACH)
            assert attached.ok, attached
            detached = ask(Path(injection.report.socket), DETACH)
            assert detached.ok and detached.not_restored == () and detached.restored == attached.hooks
            deadline = time.monotonic() + 10
            while process.num_threads() > before and time.monotonic() < deadline:
                time.sleep(0.01)  # The listener has answered, and is about to end.
            sizes.append((process.num_threads(), process.num_fds(), process.memory_info().rss))
        assert not [m.path for m in process.memory_maps() if m.path.endswith(".kvwj")]
        assert list((data / FOLDER).iterdir()) == []
    print(f"stood still for {sorted(stops)} s; slowest of {seen.answers} requests {slowest(seen):.2f} s; {sizes}")
    assert seen.wrong == [] and seen.answers
    threads, files, memory = zip(*sizes, strict=True)
    assert max(threads) == before, sizes
    assert max(files[2:]) <= files[2] + 2, sizes  # connections come and go
    assert memory[-1] - memory[4] < 48 << 20, sizes
    journals = scheduler_journals(data)
    assert len(journals) == 20 and all(journal.closed and not journal.gaps for journal in journals)
    assert all(any(isinstance(e, SnapshotEnd) for e in journal.events) for journal in journals)
    untouched(tmp_path, [])


@SLOW
def test_both_ranks_of_a_tensor_parallel_server(tmp_path: Path) -> None:
    """Both, then one alone: what it had a part in is not confirmed, and the missing one is named."""
    chance = random.Random(1)
    shared = prompt(chance)
    with without_kvwitness(NEWEST, tmp_path, tp_size=2) as server:
        generate(server.url, [*shared, 5, 6, 7])
        attached = kvwitness("attach", "--url", server.url, "--live", "--dir", str(tmp_path / "both"), "--yes")
        assert sorted(rank["ranks"]["tp_rank"] for rank in attached["ranks"]) == [0, 1]
        for _ in range(4):
            generate(server.url, prompt(chance))
        generate(server.url, [*shared, 5, 6, 7], rid="c")
        kvwitness("detach", "--url", server.url)
        first = attached["ranks"][0]["pid"]
        left_out = attached["ranks"][1]["ranks"]["tp_rank"]
        one = ["--dir", str(tmp_path / "one"), "--only", str(first)]
        kvwitness("attach", "--url", server.url, "--live", *one, "--yes")
        for _ in range(4):
            generate(server.url, prompt(chance))
        generate(server.url, [*shared, 5, 6, 7], rid="d")
        kvwitness("detach", "--url", server.url)
    assert last_of(scheduler_journals(tmp_path / "both"), "c").sentence == "L2 read confirmed (resident at attach)"
    verdict = last_of(scheduler_journals(tmp_path / "one"), "d")
    assert verdict.grade not in (Grade.CONFIRMED, Grade.VERIFIED)
    assert f"tp {left_out}" in verdict.sentence
    untouched(tmp_path, [])


@SLOW
@pytest.mark.parametrize("release", [NEWEST, "0.5.17"])
def test_both_replicas_of_a_data_parallel_server(release: str, tmp_path: Path) -> None:
    chance = random.Random(1)
    shared = prompt(chance)
    # 0.5.17 binds each replica as if it were alone.
    bound = TWO if release == NEWEST else {}
    with without_kvwitness(release, tmp_path, extra=bound, extra_args=("--dp-size", "2")) as server:
        for rank in (0, 1):
            generate(server.url, [*shared, 5, 6, 7], routed_dp_rank=rank)
        attached = kvwitness("attach", "--url", server.url, "--live", "--dir", str(tmp_path / "data"), "--yes")
        assert sorted(rank["ranks"]["dp_rank"] for rank in attached["ranks"]) == [0, 1]
        for rank in (0, 1):
            for _ in range(4):
                generate(server.url, prompt(chance), routed_dp_rank=rank)
            generate(server.url, [*shared, 5, 6, 7], rid=f"c{rank}", routed_dp_rank=rank)
        assert len(kvwitness("detach", "--url", server.url)["ranks"]) == 2
    journals = scheduler_journals(tmp_path / "data")
    assert len(find_journals(tmp_path / "data")) == 2
    for rank in (0, 1):
        assert last_of(journals, f"c{rank}").sentence == "L2 read confirmed (resident at attach)"
    untouched(tmp_path, [])
