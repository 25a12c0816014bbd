"""A real server to attach to: under load, with a probe in its processes, and the command as a person runs it."""

from __future__ import annotations

import json
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

from stand_fixtures import generate

from kvwitness.collectors.journal import Journal, find_journals, read_journal
from kvwitness.tracer.judgement import SCHEDULER_ROLE, judge
from kvwitness.tracer.model import RequestVerdict
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.paths import stand_path
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.server import ServerOptions, StandServer

CLIENTS = 4
PREFIX = 1500

PROBE = """
import atexit, json, os, sys, threading, time, traceback, types

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

def hide():
    # From here on kvwitness cannot be imported in this process; what the stand has loaded goes on.
    for name in [n for n in sys.modules if n.split(".")[0] == "kvwitness"]:
        del sys.modules[name]
    sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p, "kvwitness"))]

def contend():
    # Once the server is up, and in the scheduler alone: its start is long enough.
    while not os.path.exists(os.path.join(os.environ["PROBE_DIR"], "hide")):
        time.sleep(0.1)
    if not any("scheduler" in name for name in open("/proc/self/cmdline").read().split("\\0")[:1]):
        return
    if threading.current_thread().name == "contend-0":
        hide()
        open(os.path.join(os.environ["PROBE_DIR"], f"hidden-{os.getpid()}"), "w").close()
    while True:
        sum(range(20_000))
        time.sleep(0.002)

def plugin():
    for number in range(int(os.environ.get("PROBE_BUSY", "0"))):
        threading.Thread(target=contend, name=f"contend-{number}", daemon=True).start()
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
    times: list[float] = field(default_factory=list)


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
                begun = time.monotonic()
                try:
                    tokens = generate(url, prompt).tokens
                except Exception as error:
                    seen.wrong.append(f"{type(error).__name__}: {error}")
                    return
                seen.answers += 1
                seen.times.append(time.monotonic() - begun)
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
    environment = {"KVWITNESS_DIR": str(tmp_path / "data"), "KVWITNESS_STANDBY": "1", **options.pop("more_env", {})}
    with probed(release, tmp_path, environment, **options) as server:
        yield server


@contextmanager
def probed(release: str, tmp_path: Path, extra_env: dict[str, str], **options: Any) -> Iterator[StandServer]:
    """A server with that probe."""
    probe = tmp_path / "probe"
    info = probe / "kvw_probe-1.dist-info"
    info.mkdir(parents=True)
    (probe / "kvw_probe.py").write_text(PROBE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvw-probe\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkvw_probe = kvw_probe:plugin\n")
    progress = SilentProgress()
    environment = ensure_environment(progress, release=release)
    extra = {
        **extra_env,
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


def untouched(folder: Path, threads: list[str]) -> None:
    """What the server's processes said at their end: SGLang's own functions, and these threads of kvwitness's."""
    reports = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    assert not [found["error"] for found in reports if "error" in found]
    assert any(found["threads"] for found in reports) == bool(threads)
    for found in reports:
        assert found["hooked"] == [] and found["finders"] == []
        # On standby the processes without a scheduler go on to wait for one.
        if found["threads"] or not threads:
            assert not [path for path in found["code"] if "kvwitness/patches" in path]
        assert found["threads"] in ([], threads)


def slowest(seen: Load) -> float:
    """Seconds that the slowest request of the load took."""
    return max(seen.times)
