"""Random load on a real server for an hour, and whether the ledger still agrees with the pools at its end.

``python tests/soundness/soak.py --minutes 60``: the CPU stand's SGLang on standby, attached while it is empty, or
with ``--url`` and ``--dir`` a server of one rank that runs on standby already (``kvwitness serve --standby``);
then clients whose prompts share prefixes, diverge, are given up halfway. At the end kvwitness lets go and is
attached anew: what it finds then in the tree is compared with what the first record says is there.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvwitness.collectors.journal import Journal, find_journals, read_journal
from kvwitness.collectors.standby import Answer, ask, sockets_in
from kvwitness.collectors.tail import Tail
from kvwitness.patches.schema.control import ATTACH, DETACH
from kvwitness.patches.schema.events import AtAttach, ResidentNode, Run
from kvwitness.tracer.judgement import SCHEDULER_ROLE, judge
from kvwitness.tracer.ledger.facts import InstanceFacts, Residency
from kvwitness.tracer.model import Grade
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.progress import Progress, reporting
from kvwitness.tracer.stand.server import ServerOptions, StandServer

_STEMS = 24
_STEM_TOKENS = 500
_GIVEN_UP_EVERY = 25
_QUIET_S = 1.0
_PORTION = 50_000
_END_S = 600.0


@dataclass
class Load:
    """What the clients did and saw."""

    answers: int = 0
    given_up: int = 0
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def _prompt(chance: random.Random, stems: Sequence[Sequence[int]]) -> list[int]:
    """A stem, cut anywhere, another stem's part, and a few tokens of its own."""
    first, second = chance.choice(stems), chance.choice(stems)
    head = first[: chance.randrange(16, len(first))]
    return [*head, *second[: chance.randrange(0, 2 * len(second) // 5)], *(chance.randrange(1, 1000) for _ in range(4))]


def _client(url: str, seed: int, stems: Sequence[Sequence[int]], load: Load, stop: threading.Event) -> None:
    chance = random.Random(seed)
    # A kept connection may be closed by the server just when it is used again: no failure of the server's.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0, limits=limits) as http:
        while not stop.is_set():
            sampling = {"temperature": 0, "max_new_tokens": chance.choice((1, 4, 16)), "ignore_eos": True}
            body = {"input_ids": _prompt(chance, stems), "sampling_params": sampling, "stream": True}
            leave = chance.randrange(_GIVEN_UP_EVERY) == 0
            try:
                with http.stream("POST", "/generate", json=body) as reply:
                    reply.raise_for_status()
                    for _ in reply.iter_lines():
                        if leave:
                            break
            except httpx.HTTPError as error:
                with load.lock:
                    load.failures.append(f"{type(error).__name__}: {error}")
                stop.wait(1.0)
                continue
            with load.lock:
                load.answers += not leave
                load.given_up += leave


@contextmanager
def _under_load(url: str, clients: int, seed: int, count: int, tokens: int) -> Iterator[Load]:
    chance = random.Random(seed)
    stems = [[chance.randrange(1, 1000) for _ in range(tokens)] for _ in range(count)]
    load, stop = Load(), threading.Event()
    threads = [threading.Thread(target=_client, args=(url, seed + n + 1, stems, load, stop)) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# --- the pools at the end ----------------------------------------------------------------------------


def _slots(runs: Sequence[Run]) -> set[int]:
    return {slot for run in runs for slot in range(run.start, run.start + run.length)}


def _open(facts: InstanceFacts, tier: str) -> list[Residency]:
    epoch = facts.epochs[-1].index if facts.epochs else 0
    return [r for r in facts.residencies if r.tier == tier and r.until is None and r.epoch == epoch]


def differences(first: InstanceFacts, found: Sequence[ResidentNode]) -> list[str]:
    """Where a record's end and the tree, looked at right after it, say different things."""
    wrong: list[str] = []
    ours = set().union(*(_slots(r.slots) for r in _open(first, "L2")))
    theirs = set().union(*(_slots(node.slots) for node in found if node.l2 == AtAttach.RESIDENT))
    if ours != theirs:
        wrong.append(f"L2: {len(ours - theirs)} slots only by the ledger, {len(theirs - ours)} only in the tree")
    nodes = {node.node: node for node in found}
    for residency in _open(first, "L1"):
        # A split that nothing has followed since left the ledger's node with an ancestor in the tree.
        at, end = nodes.get(residency.node), residency.end
        while at is not None and at.end == end and at.l1 == AtAttach.RESIDENT and at.start > residency.start:
            at, end = nodes.get(at.parent), at.start
        if at is None or at.end != end or at.l1 != AtAttach.RESIDENT or at.start != residency.start:
            wrong.append(f"L1: node {residency.node} [{residency.start}, {residency.end}) only by the ledger")
    held = sum(r.end - r.start for r in _open(first, "L1"))
    tree = sum(node.end - node.start for node in found if node.l1 == AtAttach.RESIDENT)
    if held != tree:
        wrong.append(f"L1: {held} tokens by the ledger, {tree} in the tree")
    return wrong


def _ask(data: Path, command: str) -> Answer:
    (socket,) = sockets_in(data).values()
    answer = ask(socket, command)
    if not answer.ok:
        raise SystemExit(f"{command}: {answer.error}")
    return answer


def _journals(data: Path) -> list[Journal]:
    journals = [read_journal(path) for path in find_journals(data)]
    return [journal for journal in journals if journal.role == SCHEDULER_ROLE]


def _mib(process: psutil.Process) -> float:
    """A process's own memory: without files that are mapped into it, of which the journal is one."""
    held = process.memory_info()
    return float(held.rss - held.shared) / 2**20


@dataclass
class Memory:
    """How much each process held, once a minute."""

    processes: dict[str, psutil.Process]
    minutes: list[float] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=dict)

    def look(self, minute: float) -> str:
        self.minutes.append(minute)
        for name, process in self.processes.items():
            self.mib.setdefault(name, []).append(_mib(process))
        return ", ".join(f"{name} {held[-1]:.0f} MiB" for name, held in self.mib.items())

    def growth(self) -> dict[str, float]:
        """MiB in an hour by the second half of the run, in which every pool and cache is full."""
        half = len(self.minutes) // 2
        if len(self.minutes) - half < 3:
            return {}
        return {
            name: round(linear_regression(self.minutes[half:], held[half:]).slope * 60, 1)
            for name, held in self.mib.items()
        }


@contextmanager
def _watched(data: Path, log: Path) -> Iterator[psutil.Process]:
    """``kvwitness watch`` on it all the while: its memory must not grow with what it has seen."""
    product = [sys.executable, "-c", "from kvwitness.tracer.cli import main; main()"]
    command = [*product, "watch", "--dir", str(data), "--listen", "off", "--json"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(_END_S)


@contextmanager
def _stand(sglang: str | None, folder: Path, progress: Progress) -> Iterator[tuple[str, Path]]:
    """The CPU stand's server on standby, empty: its address, and where it records."""
    data = folder / "data"
    environment = ensure_environment(progress, **({"release": sglang} if sglang else {}))
    extra = {"KVWITNESS_DIR": str(data), "KVWITNESS_STANDBY": "1", "KVWITNESS_QUOTA_MB": "4096"}
    model = ensure_model(environment, progress, "qwen2")
    with StandServer(environment, model, ServerOptions(extra_env=extra), workdir=folder / "server") as server:
        yield server.url, data


def _wait_until_quiet(data: Path) -> None:
    """The server has nothing to do any more: its journal stands still."""
    tail = max((Tail(path) for path in find_journals(data)), key=lambda tail: tail.state.wall_ns)
    since = time.monotonic()
    while time.monotonic() - since < _QUIET_S:
        if tail.read(_PORTION, time.monotonic()):
            since = time.monotonic()
        else:
            time.sleep(_QUIET_S / 4)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sglang", help="the stand's release")
    parser.add_argument("--url", help="a server on standby, instead of the stand's")
    parser.add_argument("--dir", type=Path, help="with --url: where it records")
    parser.add_argument("--stems", type=int, default=_STEMS, help="how many prefixes the prompts are made of")
    parser.add_argument("--stem-tokens", type=int, default=_STEM_TOKENS, help="how long each of them is")
    parser.add_argument("--keep", type=Path, help="record into this folder, and keep it")
    options = parser.parse_args()
    if (options.url is None) != (options.dir is None):
        parser.error("give both --url and --dir, or none")
    return options


def main() -> int:
    options = _parsed()
    with tempfile.TemporaryDirectory(prefix="kvwitness-soak-") as name, reporting() as progress:
        folder = options.keep.absolute() if options.keep is not None else Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        given = nullcontext((options.url, options.dir)) if options.url else None
        with given or _stand(options.sglang, folder, progress) as (url, data):
            first = _ask(data, ATTACH)
            with _watched(data, folder / "watch.txt") as watching:
                memory = Memory({"scheduler": psutil.Process(first.pid), "watch": watching})
                start = time.monotonic()
                with _under_load(url, options.clients, options.seed, options.stems, options.stem_tokens) as load:
                    while (left := start + options.minutes * 60 - time.monotonic()) > 0:
                        time.sleep(min(60.0, left))
                        held = memory.look((time.monotonic() - start) / 60)
                        print(f"{load.answers} answers, {load.given_up} given up, {held}", flush=True)
                _wait_until_quiet(data)
                watch_cpu = sum(watching.cpu_times()[:2])
            _ask(data, DETACH)
            _ask(data, ATTACH)
            _ask(data, DETACH)
        before, after = sorted(_journals(data), key=lambda journal: journal.wall_ns)[-2:]
        size, lost = (data / before.path).stat().st_size, before.lost_quota + before.lost_oversize
        started = time.monotonic()
        judgement = judge([before])
        took = time.monotonic() - started
        (facts,) = judgement.instances
        wrong = differences(facts, [event for event in after.events if isinstance(event, ResidentNode)])
        grades = Counter(f"{verdict.tier} {verdict.grade}" for verdict in judgement.verdicts)
        doubtful = Counter(
            verdict.sentence for verdict in judgement.verdicts if verdict.grade in (Grade.UNKNOWN, Grade.REPORTED)
        )
        found = {
            "minutes": options.minutes,
            "answers": load.answers,
            "given_up": load.given_up,
            "failures": load.failures[:5],
            "memory_mib": {name: [round(value) for value in held] for name, held in memory.mib.items()},
            "growth_mib_per_hour": memory.growth(),
            "watch_cpu_s": round(watch_cpu, 1),
            "events": len(before.events),
            "journal_bytes": size,
            "lost": lost,
            "gaps": [list(gap) for gap in facts.gaps[:10]],
            "anomalies": list(facts.anomalies[:10]),
            "judged_in_s": round(took, 1),
            "verdicts": dict(sorted(grades.items())),
            "doubtful": dict(doubtful.most_common(10)),
            "l1_tokens": sum(r.end - r.start for r in _open(facts, "L1")),
            "l2_slots": len(set().union(*(_slots(r.slots) for r in _open(facts, "L2")))),
            "differences": wrong[:20],
        }
        print(json.dumps(found, indent=1))
        return 1 if wrong or load.failures or lost or facts.gaps or facts.anomalies else 0


if __name__ == "__main__":
    sys.exit(main())
