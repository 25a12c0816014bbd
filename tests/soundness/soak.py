"""Random load on a real server for an hour, and whether the ledger still agrees with the pools at its end.

``python tests/soundness/soak.py --minutes 60``: the CPU stand's SGLang on standby, attached while it is empty;
then clients whose prompts share prefixes, diverge, are given up halfway. At the end kvwitness lets go and is
attached anew: what it finds then in the tree is compared with what the first record says is there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvwitness.collectors.journal import Journal, find_journals, read_journal
from kvwitness.collectors.standby import Answer, ask, sockets_in
from kvwitness.patches.schema.control import ATTACH, DETACH
from kvwitness.patches.schema.events import AtAttach, ResidentNode, Run
from kvwitness.tracer.judgement import SCHEDULER_ROLE, judge
from kvwitness.tracer.ledger.facts import InstanceFacts, Residency
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.progress import reporting
from kvwitness.tracer.stand.server import ServerOptions, StandServer

_STEMS = 24
_STEM_TOKENS = 500
_GIVEN_UP_EVERY = 25
_QUIET_S = 1.0


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
    head = first[: chance.randrange(16, _STEM_TOKENS)]
    return [*head, *second[: chance.randrange(0, 200)], *(chance.randrange(1, 1000) for _ in range(4))]


def _client(url: str, seed: int, stems: Sequence[Sequence[int]], load: Load, stop: threading.Event) -> None:
    chance = random.Random(seed)
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as http:
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
def _under_load(url: str, clients: int, seed: int) -> Iterator[Load]:
    chance = random.Random(seed)
    stems = [[chance.randrange(1, 1000) for _ in range(_STEM_TOKENS)] for _ in range(_STEMS)]
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
    return float(process.memory_info().rss) / 2**20


def _wait_until_quiet(data: Path) -> None:
    """The server has nothing to do any more: its journal stands still."""
    (journal,) = find_journals(data)
    size, since = -1, time.monotonic()
    while time.monotonic() - since < _QUIET_S:
        now = len(read_journal(journal).events)
        if now != size:
            size, since = now, time.monotonic()
        time.sleep(_QUIET_S / 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sglang", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvwitness-soak-") as name, reporting() as progress:
        folder = Path(name)
        data = folder / "data"
        environment = ensure_environment(progress, **({"release": options.sglang} if options.sglang else {}))
        extra = {"KVWITNESS_DIR": str(data), "KVWITNESS_STANDBY": "1", "KVWITNESS_QUOTA_MB": "4096"}
        chosen = ServerOptions(extra_env=extra)
        model = ensure_model(environment, progress, "qwen2")
        with StandServer(environment, model, chosen, workdir=folder / "server") as server:
            first = _ask(data, ATTACH)
            scheduler = psutil.Process(first.pid)
            memory: list[float] = []
            end = time.monotonic() + options.minutes * 60
            with _under_load(server.url, options.clients, options.seed) as load:
                while time.monotonic() < end:
                    time.sleep(min(60.0, max(end - time.monotonic(), 0.0)))
                    memory.append(_mib(scheduler))
                    print(
                        f"{load.answers} answers, {load.given_up} given up, scheduler {memory[-1]:.0f} MiB", flush=True
                    )
            _wait_until_quiet(data)
            _ask(data, DETACH)
            _ask(data, ATTACH)
            _ask(data, DETACH)
        before, after = sorted(_journals(data), key=lambda journal: journal.wall_ns)
        size, lost = (data / before.path).stat().st_size, before.lost_quota + before.lost_oversize
        started = time.monotonic()
        judgement = judge([before])
        took = time.monotonic() - started
        (facts,) = judgement.instances
        wrong = differences(facts, [event for event in after.events if isinstance(event, ResidentNode)])
        grades: dict[str, int] = {}
        for verdict in judgement.verdicts:
            key = f"{verdict.tier} {verdict.grade}"
            grades[key] = grades.get(key, 0) + 1
        found = {
            "minutes": options.minutes,
            "answers": load.answers,
            "given_up": load.given_up,
            "failures": load.failures[:5],
            "scheduler_mib": [round(value) for value in memory],
            "events": len(before.events),
            "journal_bytes": size,
            "lost": lost,
            "gaps": [list(gap) for gap in facts.gaps[:10]],
            "anomalies": list(facts.anomalies[:10]),
            "judged_in_s": round(took, 1),
            "verdicts": dict(sorted(grades.items())),
            "l1_tokens": sum(r.end - r.start for r in _open(facts, "L1")),
            "l2_slots": len(set().union(*(_slots(r.slots) for r in _open(facts, "L2")))),
            "differences": wrong[:20],
        }
        print(json.dumps(found, indent=1))
        return 1 if wrong or load.failures or lost or facts.gaps or facts.anomalies else 0


if __name__ == "__main__":
    sys.exit(main())
