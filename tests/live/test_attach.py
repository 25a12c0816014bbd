"""Attach to a real server that is on standby and serves, and let go of it again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from stand_fixtures import Answer, generate

from kvwitness.collectors.journal import Journal, find_journals, read_journal
from kvwitness.collectors.standby import ask, sockets_in
from kvwitness.patches.schema.events import HookFailed, SnapshotEnd
from kvwitness.tracer.judgement import SCHEDULER_ROLE, judge
from kvwitness.tracer.model import Grade, RequestVerdict, Tier
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.paths import stand_path
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.releases import NEWEST
from kvwitness.tracer.stand.server import ServerOptions, StandServer

pytestmark = [pytest.mark.stand, pytest.mark.timeout(900)]

CLIENTS = 4
PREFIX = 1500
SLOW = pytest.mark.slow
RELEASES = [pytest.param(NEWEST, id=NEWEST), pytest.param("0.5.17", id="0.5.17", marks=SLOW)]

PROBE = """
import atexit, json, os, sys, threading, traceback, types

def marked(owner, name):
    try:
        # Of functions alone: some other values have every attribute that is asked for.
        functions = {n: f for n, f in vars(owner).items() if isinstance(f, types.FunctionType)}
        return [f"{name}.{n}" for n, f in functions.items() if hasattr(f, "__kvwitness_hook__")]
    except Exception:
        return []  # Some values cannot be looked at.

def look():
    hooked = []
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang"):
            for owner in [module, *[o for o in list(vars(module).values()) if isinstance(o, type)]]:
                hooked += marked(owner, name)
    loop = sys.modules["sglang.srt.managers.scheduler"].Scheduler
    return {
        "hooked": sorted(set(hooked)),
        "code": [vars(loop)[n].__code__.co_filename for n in ("get_next_batch_to_run", "__init__")],
        "finders": [type(f).__module__ for f in sys.meta_path if "kvwitness.patches.install" in type(f).__module__],
        "threads": [t.name for t in threading.enumerate() if "kvwitness" in t.name],
    }

def plugin():
    def report():
        if "sglang.srt.managers.scheduler" not in sys.modules:
            return
        try:
            found = look()
        except Exception:
            found = {"error": traceback.format_exc()}
        with open(os.path.join(os.environ["PROBE_DIR"], f"{os.getpid()}.json"), "w") as out:
            json.dump(found, out)
    atexit.register(report)
"""


@dataclass
class Load:
    """What a few clients saw that ask the same short prompts again and again."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)


@contextmanager
def load(url: str) -> Iterator[Load]:
    """Steady requests from four clients, each of whose answers must be what it was before."""
    seen, stop = Load(), threading.Event()
    chance = random.Random(7)
    prompts = [[[chance.randrange(1, 1000) for _ in range(60)] for _ in range(2)] for _ in range(CLIENTS)]
    before = [[generate(url, prompt).tokens for prompt in mine] for mine in prompts]

    def client(number: int) -> None:
        while not stop.is_set():
            for prompt, expected in zip(prompts[number], before[number], strict=True):
                try:
                    tokens = generate(url, prompt).tokens
                except Exception as error:
                    seen.wrong.append(f"{type(error).__name__}: {error}")
                    return
                seen.answers += 1
                if tokens != expected:
                    seen.wrong.append(f"client {number}: {tokens}, before {expected}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def standing_by(release: str, tmp_path: Path, **options: Any) -> Iterator[StandServer]:
    """A server on standby, with a probe that says at its end what it looks like from inside."""
    probe = tmp_path / "probe"
    info = probe / "kvw_probe-1.dist-info"
    info.mkdir(parents=True)
    (probe / "kvw_probe.py").write_text(PROBE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvw-probe\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkvw_probe = kvw_probe:plugin\n")
    progress = SilentProgress()
    environment = ensure_environment(progress, release=release)
    extra = {
        "KVWITNESS_DIR": str(tmp_path / "data"),
        "KVWITNESS_STANDBY": "1",
        "PYTHONPATH": f"{stand_path(stand=True)}:{probe}",
        "PROBE_DIR": str(tmp_path),
    }
    chosen = ServerOptions(extra_env=extra, **options)
    with StandServer(
        environment, ensure_model(environment, progress, "qwen2"), chosen, workdir=tmp_path / "server"
    ) as server:
        yield server


def kvwitness(*arguments: str) -> dict[str, Any]:
    """The command, as a person would run it."""
    command = [sys.executable, "-c", "from kvwitness.tracer.cli import main; main()", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def prompt(chance: random.Random) -> list[int]:
    return [chance.randrange(1, 1000) for _ in range(PREFIX)]


def scheduler_journals(data: Path) -> list[Journal]:
    journals = [read_journal(path) for path in find_journals(data)]
    return [journal for journal in journals if journal.role == SCHEDULER_ROLE]


def last_of(journals: list[Journal], rid: str) -> RequestVerdict:
    verdict = judge(journals).verdict(rid)
    assert verdict is not None
    return verdict


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
            c = _ask_as(server.url, [*shared, 5, 6, 7], "c")
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
    _untouched(tmp_path)


def _ask_as(url: str, tokens: list[int], rid: str) -> Answer:
    return generate(url, tokens, rid=rid)


def _untouched(folder: Path) -> None:
    """What the server's processes said at their end."""
    reports = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    assert not [found["error"] for found in reports if "error" in found]
    (found,) = [found for found in reports if found["threads"]]
    assert found["hooked"] == [] and found["finders"] == []
    assert not [path for path in found["code"] if "kvwitness/patches" in path]
    assert found["threads"] == ["kvwitness-standby"]


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
    _untouched(tmp_path)


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
