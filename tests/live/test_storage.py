"""L3 on a real SGLang server: attached and detached over the admin API, read, cut short, and failing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvwitness.collectors.journal import Journal, find_journals, read_journal
from kvwitness.patches.schema.events import StorageChanged
from kvwitness.tracer.judgement import SCHEDULER_ROLE, judge
from kvwitness.tracer.model import Grade, Link, Reason, RequestVerdict, Tier
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.paths import stand_path
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.server import ServerOptions, StandServer

pytestmark = [pytest.mark.stand, pytest.mark.slow, pytest.mark.timeout(1800)]

BACKEND = "/hicache/storage-backend"
KEY = {"Authorization": "Bearer adm"}
PATIENCE_S = 120.0
DYNAMIC = '{"backend_name": "kvw", "module_path": "kvw_l3_backend", "class_name": "Backend"}'


class Stand:
    """A server with the admin API, and what it recorded."""

    def __init__(self, release: str, folder: Path, *extra: str, **env: str) -> None:
        progress = SilentProgress()
        environment = ensure_environment(progress, release=release)
        self.data, self.pages, self.fail = folder / "data", folder / "pages", folder / "fail"
        self.pages.mkdir()
        path = f"{stand_path(stand=True)}:{Path(__file__).parent / 'backend'}"
        options = ServerOptions(
            extra_args=("--admin-api-key", "adm", *extra),
            extra_env={
                "KVWITNESS_DIR": str(self.data),
                "PYTHONPATH": path,
                "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.pages),
                "KVW_L3_FOLDER": str(self.pages),
                "KVW_L3_FAIL": str(self.fail),
                **env,
            },
        )
        self.server = StandServer(environment, ensure_model(environment, progress), options, workdir=folder / "server")
        self.server.start()
        self.client = httpx.Client(base_url=self.server.url, trust_env=False, timeout=PATIENCE_S)
        self.answers: dict[str, list[int]] = {}

    def generate(self, rid: str, prompt: list[int], new_tokens: int = 8) -> None:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling}
        reply = self.client.post("/generate", json=body).raise_for_status().json()
        self.answers[rid] = reply["output_ids"]

    def until(self, seen: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.2)

    def flush(self) -> None:
        self.until(lambda: self.client.post("/flush_cache", headers=KEY).status_code == 200, "the flush")

    def stored(self, before: int, tokens: int) -> None:
        """Wait until the pages of so many tokens have come to the files that were there."""
        self.until(lambda: self.count() >= before + tokens // 16, "the pages in storage")

    def count(self) -> int:
        return sum(1 for _ in self.pages.iterdir())

    def attach(self, backend: str, policy: str, extra: str = "{}") -> None:
        body = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": extra,
            "hicache_storage_prefetch_policy": policy,
            "hicache_write_policy": "write_through",
        }
        self.until(lambda: self.client.put(BACKEND, headers=KEY, json=body).status_code == 200, "the attaching")

    def detach(self) -> None:
        self.until(lambda: self.client.delete(BACKEND, headers=KEY).status_code == 200, "the detaching")

    def stop(self) -> tuple[Journal, dict[str, RequestVerdict]]:
        self.client.close()
        self.server.stop()
        journals = [read_journal(path) for path in find_journals(self.data)]
        (scheduler,) = [journal for journal in journals if journal.role == SCHEDULER_ROLE]
        return scheduler, {verdict.rid: verdict for verdict in judge(journals).verdicts}


def prompts() -> Callable[[], list[int]]:
    chance = random.Random(3)
    return lambda: [chance.randrange(1, 1000) for _ in range(803)]


def changes(journal: Journal) -> list[tuple[int, int, str]]:
    return [(e.attach, e.ok, e.message) for e in journal.events if isinstance(e, StorageChanged)]


def computed(verdict: RequestVerdict) -> Any:
    return next(r for r in verdict.ranges if r.tier is Tier.RECOMPUTED)


@pytest.mark.parametrize("release", ["0.5.23", "0.5.17"])
def test_storage_over_the_admin_api(tmp_path: Path, release: str) -> None:
    new = prompts()
    stand = Stand(release, tmp_path)
    try:
        older, q, r, broken = new(), new(), new(), new()
        stand.generate("older", older)
        busy = threading.Thread(target=stand.generate, args=("busy", new()[:40], 200))
        busy.start()
        refused = stand.client.put(BACKEND, headers=KEY, json={"hicache_storage_backend": "file"}).status_code
        busy.join()
        stand.attach("file", "wait_complete")
        stand.generate("q1", q)
        stand.stored(0, 800)
        stand.flush()
        stand.generate("q2", q)  # From L3.
        stand.generate("older2", older)  # S23
        stand.detach()
        stand.attach("file", "best_effort")
        stand.flush()
        stand.generate("q3", q)  # S24
        stand.detach()
        stand.attach("dynamic", "wait_complete", DYNAMIC)
        before = stand.count()
        stand.generate("r1", r)
        stand.stored(before, 800)
        stand.flush()
        stand.generate("r2", r)  # From L3, through a class that SGLang does not know.
        stand.flush()
        stand.fail.write_text("read")
        stand.generate("r3", r)  # S21
        if release == "0.5.23":  # Before, the thread that the exception ends is not there any more.
            stand.flush()
            stand.fail.write_text("look-up")
            stand.generate("r4", r)  # S22
            stand.fail.write_text("write")
            stand.generate("broken1", broken)
            stand.flush()
            stand.generate("broken2", broken)  # S06
    finally:
        journal, verdicts = stand.stop()

    for name in ("q2", "r2"):
        assert verdicts[name].sentence == "L3 read confirmed", verdicts[name].sentence
        assert verdicts[name].tokens.l3 == 800
        links = {link.link: link for part in verdicts[name].ranges for link in part.links}
        assert links[Link.PREFETCHED].holds and [e.kind for e in links[Link.PREFETCHED].events] == [
            "PrefetchAsked",
            "PrefetchDone",
        ]
    assert stand.answers["q2"] == stand.answers["q1"] and stand.answers["r2"] == stand.answers["r1"]
    assert computed(verdicts["older2"]).reason is Reason.NEVER_BACKED_UP
    assert "older is older than its attaching" in verdicts["older2"].sentence
    assert "cut short by the prefetch policy best_effort" in verdicts["q3"].sentence
    assert "the page transfer in storage (L3) failed: OSError: read refused on purpose" in verdicts["r3"].sentence
    if release == "0.5.23":
        assert "the look-up in storage (L3) failed: OSError: look-up refused on purpose" in verdicts["r4"].sentence
        assert "a backup failed (OSError: write refused on purpose)" in verdicts["broken2"].sentence
        assert any("no backup was acknowledged since event" in note for note in verdicts["broken2"].notes)
    assert all(verdicts[name].grade is Grade.RECOMPUTED for name in ("older2", "q3", "r3"))
    told = changes(journal)
    assert refused == 400 and (told[0][0], told[0][1]) == (1, 0) and "not idle" in told[0][2]
    done = [(attach, ok) for attach, ok, _ in told if ok]
    assert done == [(1, 1), (0, 1), (1, 1), (0, 1), (1, 1)]
    assert any("file (prefetch policy wait_complete)" in text for _, _, text in told)


def test_without_a_compiler_every_look_up_fails_and_says_so(tmp_path: Path) -> None:
    """S22: pages are written, no look-up is answered, and requests answer 200 with nothing cached."""
    prompt = prompts()()
    storage = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
    stand = Stand("0.5.23", tmp_path, *storage, CXX="/bin/false", TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    try:
        stand.generate("a", prompt)
        stand.stored(0, 800)
        stand.flush()
        stand.generate("again", prompt)
    finally:
        _, verdicts = stand.stop()
    again = verdicts["again"]
    assert again.grade is Grade.RECOMPUTED and again.tokens.l3 == 0
    assert "the look-up in storage (L3) failed: " in again.sentence and "such failures so far" in again.sentence
