"""SGLang's own fault injectors on a real server: what is said of requests while they strike.

On a CPU these work: SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE and _DELAY (storage), and SGLANG_TEST_RETRACT, which
tests/model uses. SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES needs CUDA: on a CPU it ends the scheduler at the first
load-back. --kv-canary needs a device with streams: with it 0.5.23 does not start on a CPU.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import Grade, RequestVerdict
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.paths import stand_path
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.server import ServerOptions, StandServer

pytestmark = [pytest.mark.stand, pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 120.0
STORAGE = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")


@dataclass
class Run:
    """A server, the answers to what it was asked, and the verdicts once it has ended."""

    server: StandServer
    folder: Path
    client: httpx.Client
    answers: dict[str, list[int]] = field(default_factory=dict)
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    def prompt(self, tokens: int = 803) -> list[int]:
        return [self.chance.randrange(1, 1000) for _ in range(tokens)]

    def ask(self, rid: str, prompt: list[int]) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling}
        self.answers[rid] = self.client.post("/generate", json=body).raise_for_status().json()["output_ids"]

    def evict(self) -> None:
        """Push everything out of L1: 4,096 tokens."""
        for number in range(4):
            self.ask(f"fill{number}", self.prompt(1500))

    def flush(self) -> None:
        self.until(lambda: self.client.post("/flush_cache").status_code == 200, "the flush")

    def until(self, seen: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.2)

    def verdicts(self) -> dict[str, RequestVerdict]:
        """Of the server, which is stopped."""
        self.server.stop()
        journals = [read_journal(path) for path in find_journals(self.folder / "data")]
        return {verdict.rid: verdict for verdict in judge(journals).verdicts}


@contextmanager
def serving(folder: Path, *arguments: str, faults: str = "", **env: str) -> Iterator[Run]:
    environment = ensure_environment(SilentProgress())
    pages = folder / "pages"
    pages.mkdir()
    options = ServerOptions(
        faults=faults,
        extra_args=arguments,
        extra_env={
            "KVWITNESS_DIR": str(folder / "data"),
            "PYTHONPATH": stand_path(stand=True),
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(pages),
            **env,
        },
    )
    model = ensure_model(environment, SilentProgress())
    with (
        StandServer(environment, model, options, workdir=folder / "server") as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE_S) as client,
    ):
        yield Run(server, folder, client)


def test_a_storage_that_fails_every_call_is_no_read(tmp_path: Path) -> None:
    with serving(tmp_path, *STORAGE, SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE="1.0") as run:
        a = run.prompt()
        run.ask("a", a)
        run.flush()
        run.ask("again", a)
        found = run.verdicts()
    assert found["again"].grade is Grade.RECOMPUTED and found["again"].tokens.l3 == 0
    assert found["again"].sentence.endswith("storage (L3): the look-up found nothing from token 0 on")


def test_a_storage_that_is_slow_is_read_all_the_same(tmp_path: Path) -> None:
    with serving(tmp_path, *STORAGE, SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY="0.3") as run:
        a = run.prompt()
        run.ask("a", a)
        run.until(lambda: sum(1 for _ in (tmp_path / "pages").iterdir()) >= 50, "the pages in storage")
        run.flush()
        run.ask("again", a)
        found = run.verdicts()
    assert found["again"].sentence == "L3 read confirmed" and found["again"].tokens.l3 == 800
    assert run.answers["again"] == run.answers["a"]


def test_the_delay_that_needs_cuda_ends_the_scheduler_and_nothing_is_claimed(tmp_path: Path) -> None:
    with serving(tmp_path, SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES="1000") as run:
        a = run.prompt()
        run.ask("a", a)
        run.evict()
        with pytest.raises(httpx.HTTPError):
            run.ask("c", a)
        found = run.verdicts()
    assert found["c"].grade is Grade.UNKNOWN
    assert any("its completion was not recorded" in note for note in found["c"].notes)
