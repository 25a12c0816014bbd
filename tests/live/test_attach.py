"""Attach to a real server that is on standby and serves, and let go of it again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from attach_fixtures import kvwitness, last_of, load, prompt, scheduler_journals, standing_by, untouched
from stand_fixtures import generate

from kvwitness.collectors.journal import find_journals
from kvwitness.collectors.standby import ask, sockets_in
from kvwitness.patches.schema.events import HookFailed, SnapshotEnd
from kvwitness.tracer.model import Grade, Tier
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.releases import NEWEST
from kvwitness.tracer.stand.server import ServerOptions, StandServer

pytestmark = [pytest.mark.stand, pytest.mark.timeout(900)]

SLOW = pytest.mark.slow
RELEASES = [pytest.param(NEWEST, id=NEWEST), pytest.param("0.5.17", id="0.5.17", marks=SLOW)]


@pytest.mark.parametrize("release", RELEASES)
def test_what_was_resident_before_is_confirmed_under_load(release: str, tmp_path: Path) -> None:
    chance = random.Random(1)
    shared = prompt(chance)
    with standing_by(release, tmp_path) as server:
        a = generate(server.url, [*shared, 5, 6, 7])
        assert not find_journals(tmp_path / "data"), "on standby nothing is recorded"
        with load(server.url) as seen:
            attached = kvwitness("attach", "--url", server.url, "--yes")
            (rank,) = attached["ranks"]
            assert rank["snapshot"]["complete"] and rank["snapshot"]["l2_tokens"] >= 1488
            for _ in range(4):
                generate(server.url, prompt(chance))
            c = generate(server.url, [*shared, 5, 6, 7], rid="c")
            detached = kvwitness("detach", "--pid", str(server.pid))
            later = generate(server.url, [*shared, 5, 6, 7])
            answered = seen.answers
        assert seen.wrong == [] and answered > 8
        assert detached["not_restored"] == []
        assert c.tokens == a.tokens == later.tokens and c.host_tokens == 1488
    (journal,) = scheduler_journals(tmp_path / "data")
    assert journal.closed and not journal.gaps and not journal.anomalies
    assert not [event for event in journal.events if isinstance(event, HookFailed)]
    verdict = last_of([journal], "c")
    assert (verdict.tier, verdict.grade) == (Tier.L2, Grade.CONFIRMED), verdict.sentence
    assert verdict.sentence == "L2 read confirmed (resident at attach)"
    untouched(tmp_path, ["kvwitness-standby"])


@SLOW
@pytest.mark.parametrize("release", [NEWEST, "0.5.17"])
def test_twenty_rounds_leave_nothing_behind(release: str, tmp_path: Path) -> None:
    with standing_by(release, tmp_path) as server, load(server.url) as seen:
        ((pid, socket),) = sockets_in(tmp_path / "data").items()
        process = psutil.Process(pid)
        sizes: list[tuple[int, int, int]] = []
        for _ in range(20):
            attached = ask(socket, "attach")
            assert attached.ok, attached
            time.sleep(0.2)
            detached = ask(socket, "detach")
            assert detached.ok and detached.not_restored == () and detached.restored == attached.hooks
            sizes.append((process.num_threads(), process.num_fds(), process.memory_info().rss))
        assert not [m.path for m in process.memory_maps() if m.path.endswith(".kvwj")]
    assert seen.wrong == [] and seen.answers
    threads, files, memory = zip(*sizes, strict=True)
    assert max(threads) == threads[2] and max(files[2:]) <= files[2] + 2, sizes  # connections come and go
    assert memory[-1] - memory[4] < 48 << 20, sizes
    journals = scheduler_journals(tmp_path / "data")
    assert len(journals) == 20 and all(journal.closed and not journal.gaps for journal in journals)
    assert all(any(isinstance(e, SnapshotEnd) for e in journal.events) for journal in journals)
    untouched(tmp_path, ["kvwitness-standby"])


@SLOW
def test_every_rank_or_none(tmp_path: Path) -> None:
    with standing_by(NEWEST, tmp_path, tp_size=2) as server:
        attached = kvwitness("attach", "--url", server.url, "--yes")
        assert [rank["ranks"]["tp_size"] for rank in attached["ranks"]] == [2, 2]
        assert len({rank["pid"] for rank in attached["ranks"]}) == 2
        kvwitness("detach", "--url", server.url)
        # One rank's socket is gone: the other is not touched either.
        first, second = sockets_in(tmp_path / "data").values()
        second.unlink()
        command = [sys.executable, "-c", "from kvwitness.tracer.cli import main; main()", "attach"]
        refused = subprocess.run(
            [*command, "--url", server.url, "--yes"], capture_output=True, text=True, check=False, env=dict(os.environ)
        )
        assert refused.returncode == 2 and "not on standby" in refused.stderr
        assert ask(first, "status").state == "idle"


@SLOW
def test_a_server_without_hicache_is_refused_and_left_alone(tmp_path: Path) -> None:
    class WithoutHicache(ServerOptions):
        def arguments(self, release: Any = None) -> list[str]:
            return [a for a in super().arguments(release) if a != "--enable-hierarchical-cache"]

    progress = SilentProgress()
    environment = ensure_environment(progress)
    extra = {"KVWITNESS_DIR": str(tmp_path / "data"), "KVWITNESS_STANDBY": "1"}
    model = ensure_model(environment, progress, "qwen2")
    with StandServer(environment, model, WithoutHicache(extra_env=extra), workdir=tmp_path / "server") as server:
        command = [sys.executable, "-c", "from kvwitness.tracer.cli import main; main()", "attach", "--url", server.url]
        refused = subprocess.run([*command, "--yes"], capture_output=True, text=True, check=False)
        assert refused.returncode == 2 and "without HiCache" in refused.stderr, refused.stderr
        assert len(refused.stderr.splitlines()) == 1
        assert not find_journals(tmp_path / "data")


@SLOW
def test_both_replicas_of_a_data_parallel_server(tmp_path: Path) -> None:
    """Both, then one alone: what the other serves is not in the journals, and it is named."""
    chance = random.Random(1)
    shared = prompt(chance)
    two = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with standing_by(NEWEST, tmp_path, more_env=two, extra_args=("--dp-size", "2")) as server:
        for rank in (0, 1):
            generate(server.url, [*shared, 5, 6, 7], routed_dp_rank=rank)
        attached = kvwitness("attach", "--url", server.url, "--yes")
        assert sorted(rank["ranks"]["dp_rank"] for rank in attached["ranks"]) == [0, 1]
        for rank in (0, 1):
            for _ in range(4):
                generate(server.url, prompt(chance), routed_dp_rank=rank)
            generate(server.url, [*shared, 5, 6, 7], rid=f"c{rank}", routed_dp_rank=rank)
        assert len(kvwitness("detach", "--url", server.url)["ranks"]) == 2
        before = {path.name for path in find_journals(tmp_path / "data")}
        first = next(rank["pid"] for rank in attached["ranks"] if rank["ranks"]["dp_rank"] == 0)
        kvwitness("attach", "--url", server.url, "--only", str(first), "--yes")
        generate(server.url, [*shared, 5, 6, 7], rid="d", routed_dp_rank=0)
        assert len(kvwitness("detach", "--url", server.url)["ranks"]) == 1
    journals = scheduler_journals(tmp_path / "data")
    for rank in (0, 1):
        assert last_of(journals, f"c{rank}").sentence == "L2 read confirmed (resident at attach)"
    alone = [journal for journal in journals if journal.path not in before]
    assert "not recorded: dp 1, nor what it served" in last_of(alone, "d").notes
    untouched(tmp_path, ["kvwitness-standby"])
