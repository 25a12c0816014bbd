"""What kvwitness costs, as ratios within one run: per event, per hook, and on a whole server.

    python tests/bench/bench.py [--rounds N] [--events-only] [--json]

Events and idle hooks are measured in many short rounds. Every round times each of them once, so that a slow
moment of the machine hits all, and ratios are taken within a round. The best round is what a quiet machine
would show.

The server part runs three real SGLang servers on the CPU stand (kvwitness off, on, and SGLang's own
--enable-trace) and sends the same bursts to each in turn, so that a slow moment of the machine hits all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import ExitStack, contextmanager
from pathlib import Path
from timeit import Timer
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.config import Config, Faults
from kvwitness.patches.contract import UNIFIED_OBJ, wrap
from kvwitness.patches.hooks import all_hooks
from kvwitness.patches.recorder import Recorder
from kvwitness.patches.schema.events import BackupAcked, FactKind, Facts, LoadQueued, Tail
from kvwitness.patches.witness import Witness
from kvwitness.tracer.stand.environment import StandEnvironment, ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.places import stand_home
from kvwitness.tracer.stand.progress import Progress, reporting
from kvwitness.tracer.stand.server import ServerOptions, StandServer

GOAL_US = 2.0
CLIENTS = 4
REQUESTS_PER_BURST = 24
CALLS = 200
SHORT_ROUNDS = 400


# --- per event and per idle hook ---------------------------------------------------------------------

Cost = dict[str, float]


def in_rounds(statements: Mapping[str, str], names: dict[str, Any], base: str) -> dict[str, Cost]:
    """Microseconds of the thread's own CPU time for one run of each statement, and its ratio to ``base``."""
    timers = {name: Timer(code, timer=time.thread_time_ns, globals=names) for name, code in statements.items()}
    rounds = [{name: timer.timeit(CALLS) / CALLS / 1000 for name, timer in timers.items()} for _ in range(SHORT_ROUNDS)]
    return {
        name: {
            "median_us": statistics.median(r[name] for r in rounds),
            "best_us": min(r[name] for r in rounds),
            "ratio": statistics.median(r[name] / r[base] for r in rounds),
        }
        for name in statements
    }


def bench_events() -> dict[str, Cost]:
    """One event without and with a tail, next to what plain Python does in the same moment."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), role="bench", quota_bytes=256 << 20)
        names = {
            "emit": recorder.emit,
            "BackupAcked": BackupAcked,
            "LoadQueued": LoadQueued,
            "runs": Tail.ints([16, 1488]),
            "pack": struct.Struct("<QQHHIQqq").pack,
        }
        statements = {
            "event": "emit(BackupAcked, 7, 5, -1)",
            "event with slots": "emit(LoadQueued, 1, 2, 0, 1488, 1488, tail=runs)",
            "struct.pack alone": "pack(1, 2, 3, 0, 0, 7, 5, -1)",
        }
        result = in_rounds(statements, names, base="struct.pack alone")
        recorder.close()
        return result


IDLE_HOOKS = {
    "tree.loading_check": "tree",
    "tree.writing_check": "tree",
    "controller.start_writing": "controller",
    "controller.start_loading": "controller",
}
"""Hooks that an idle scheduler runs into on every loop, and whose methods they are."""


def bench_idle_hooks() -> dict[str, Cost]:
    """What these add to a call when there is nothing to copy: the wrapped function less the bare one."""
    with tempfile.TemporaryDirectory() as folder:
        witness = Witness(Config(Path(folder), 2 << 20, Faults()))
        witness.open("bench")
        empty = {"write_queue": [], "load_queue": [], "ack_write_queue": [], "ack_load_queue": []}
        witness.controller = SimpleNamespace(**empty)
        witness.tree = SimpleNamespace(
            cache_controller=witness.controller, ongoing_write_through={}, ongoing_load_back={}
        )

        def bare(self: object) -> None:
            """Stands for SGLang's own function."""

        names = {"bare": bare, "tree": witness.tree, "controller": witness.controller}
        names["pack"] = struct.Struct("<QQHHIQqq").pack
        statements = {"bare": "bare(tree)", "struct.pack alone": "pack(1, 2, 3, 0, 0, 7, 5, -1)"}
        witness.family = UNIFIED_OBJ
        for number, (name, owner) in enumerate(IDLE_HOOKS.items()):
            hook = next(h for h in all_hooks() if h.name == name and h.family == witness.family)
            names[f"hooked_{number}"] = wrap(bare, hook, witness)
            statements[name] = f"hooked_{number}({owner})"
        result = in_rounds(statements, names, base="struct.pack alone")
        witness.close()
    unhooked, _ = result.pop("bare"), result.pop("struct.pack alone")
    return {name: {figure: cost[figure] - unhooked[figure] for figure in cost} for name, cost in result.items()}


# --- server ------------------------------------------------------------------------------------------


class _Sink(pb_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Takes spans and forgets them: SGLang's tracing must have someone to send to."""

    def Export(self, request: Any, context: Any) -> Any:
        return pb.ExportTraceServiceResponse()


@contextmanager
def trace_sink() -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(_Sink(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


def trace_packages(environment: StandEnvironment, progress: Progress) -> Path:
    """What SGLang's --enable-trace needs besides the stand, in a folder of its own."""
    pins = Path(__file__).with_name("requirements-trace.txt")
    folder = stand_home() / "trace-packages"
    stamp = folder / "pins.txt"
    if stamp.is_file() and stamp.read_text() == pins.read_text():
        return folder
    progress.phase("Installing what SGLang's own tracing needs")
    command = [str(environment.python), "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(folder), "-r", str(pins)], check=True)
    stamp.write_text(pins.read_text())
    return folder


def prompts(seed: int) -> list[list[int]]:
    """A burst: half of the prompts share a prefix that was sent before, half are new."""
    chance = random.Random(seed)
    shared = [chance.randrange(1, 1000) for _ in range(600)]
    burst = []
    for i in range(REQUESTS_PER_BURST):
        fresh = [chance.randrange(1, 1000) for _ in range(600)]
        burst.append([*shared, i + 1] if i % 2 else fresh)
    return burst


def send(url: str, ids: list[int]) -> float:
    """TTFT of one request in seconds."""
    body = {
        "input_ids": ids,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    }
    first = 0.0
    begin = time.perf_counter()
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream("POST", f"{url}/generate", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data:") and not first:
                first = time.perf_counter() - begin
    return first


def burst(url: str, seed: int) -> tuple[float, float]:
    """Requests per second and median TTFT (s) of one burst from several clients."""
    todo = prompts(seed)
    lock = threading.Lock()
    ttfts: list[float] = []

    def client() -> None:
        while True:
            with lock:
                if not todo:
                    return
                ids = todo.pop(0)
            ttft = send(url, ids)
            with lock:
                ttfts.append(ttft)

    begin = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return REQUESTS_PER_BURST / (time.perf_counter() - begin), statistics.median(ttfts)


def bench_server(rounds: int, progress: Progress) -> dict[str, Any]:
    environment = ensure_environment(progress)
    model = ensure_model(environment, progress)
    extra = trace_packages(environment, progress)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = stack.enter_context(trace_sink())
        data = work / "data"
        # An idle scheduler polls without a pause by default, which would take the others' cores.
        calm = ("--sleep-on-idle",)
        variants = {
            "off": ServerOptions(extra_args=calm),
            "on": ServerOptions(extra_args=calm, extra_env={"KVWITNESS_DIR": str(data)}),
            "trace": ServerOptions(
                extra_args=(*calm, "--enable-trace", "--otlp-traces-endpoint", f"127.0.0.1:{port}"),
                extra_env={"PYTHONPATH": f"{_stand_path()}:{extra}"},
            ),
        }
        servers = {}
        for name, options in variants.items():
            progress.phase(
                f"Starting the server with kvwitness {name}" if name != "trace" else "... with --enable-trace"
            )
            server = StandServer(environment, model, options, workdir=work / name)
            servers[name] = stack.enter_context(server)
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        for number in range(-1, rounds):
            progress.phase(f"Round {number + 1} of {rounds}")
            for name in sorted(servers, key=lambda n: (number + list(servers).index(n)) % len(servers)):
                one = burst(servers[name].url, seed=1000 + number)
                if number >= 0:  # the first is a warm-up
                    figures[name].append(one)
    return {
        name: {
            "requests/s": ratio([f[0] for f in figures[name]], [f[0] for f in figures["off"]]),
            "median TTFT": ratio([f[1] for f in figures[name]], [f[1] for f in figures["off"]]),
        }
        for name in ("on", "trace")
    } | {"off": {"requests/s": statistics.median(f[0] for f in figures["off"])}}


def ratio(values: list[float], base: list[float]) -> dict[str, float]:
    """Ratio round by round: median and quartiles."""
    ratios = sorted(v / b for v, b in zip(values, base, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {"median": middle, "low": low, "high": high}


def bench_hooks(progress: Progress) -> dict[str, Any]:
    """Every hook's observers, timed in the scheduler itself."""
    environment = ensure_environment(progress)
    model = ensure_model(environment, progress)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        options = ServerOptions(extra_env={"KVWITNESS_DIR": str(data), "KVWITNESS_PROFILE": "1"})
        progress.phase("Starting a server with timed hooks")
        with StandServer(environment, model, options, workdir=Path(folder) / "server") as server:
            begin = time.monotonic_ns()
            for seed in range(4):
                progress.phase(f"Burst {seed + 1} of 4")
                burst(server.url, seed)
            wall = time.monotonic_ns() - begin
        for path in find_journals(data):
            journal = read_journal(path)
            for event in journal.events:
                if isinstance(event, Facts) and event.kind == FactKind.PROFILE and journal.role == "scheduler":
                    hooks = json.loads(event.json)
                    share = sum(h["total_ns"] for h in hooks.values()) / wall
                    return {"hooks": hooks, "share of the scheduler's time": share, "events": len(journal.events)}
    raise SystemExit("the server left no profile")


def _stand_path() -> str:
    from kvwitness.tracer.stand.paths import stand_path

    return str(stand_path(stand=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--events-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with reporting() as progress:
        parts: dict[str, Callable[[], Any]] = {"events": bench_events, "idle hooks": bench_idle_hooks}
        if not options.events_only:
            parts["profile"] = lambda: bench_hooks(progress)
            parts["server"] = lambda: bench_server(options.rounds, progress)
        result = {}
        for name, measure in parts.items():
            result[name] = measure()
            if not options.json:  # a part takes minutes: it is shown when it is there
                show({name: result[name]})
    if options.json:
        json.dump(result, sys.stdout, indent=1)


def show_costs(costs: Mapping[str, Cost]) -> None:
    for name, cost in costs.items():
        print(
            f"  {name:<26} {cost['median_us']:6.2f} us {cost['best_us']:6.2f} us   {cost['ratio']:5.1f} x struct.pack"
        )


def show(result: dict[str, Any]) -> None:
    header = f"  {'':<28} median      best   median ratio"
    if "events" in result:
        print(f"\nPer event on the recording thread (goal: a median of at most {GOAL_US:g} microseconds)\n{header}")
        show_costs(result["events"])
    if "idle hooks" in result:
        print(f"\nPer hook with nothing to do, wrapper included (an idle scheduler, on every loop)\n{header}")
        show_costs(result["idle hooks"])
    if "profile" in result:
        profile = result["profile"]
        print("\nPer hook, observers only, in the scheduler (median)")
        for name, h in sorted(profile["hooks"].items(), key=lambda item: -item[1]["total_ns"]):
            print(f"  {name:<34} {h['calls']:6d} calls {h['median_ns'] / 1000:8.1f} us {h['total_ns'] / 1e6:8.1f} ms")
        share = profile["share of the scheduler's time"]
        print(f"  all hooks together: {share:.2%} of the wall time of the bursts, {profile['events']} events")
    if "server" in result:
        server = result["server"]
        print("\nWhole server, ratio to kvwitness off in the same round: median (quartiles)")
        for name, label in (("on", "kvwitness on"), ("trace", "SGLang --enable-trace")):
            for figure, r in server[name].items():
                print(f"  {label:<22} {figure:<12} {r['median']:.3f} ({r['low']:.3f} to {r['high']:.3f})")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
