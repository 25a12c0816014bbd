"""L3 on a real SGLang server: attached and detached over the admin API, read, cut short, and failing."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvwitness.collectors.journal import Journal, find_journals, read_journal
from kvwitness.patches.schema.events import Reset, StorageChanged
from kvwitness.tracer.judgement import SCHEDULER_ROLE, judge
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.model import Grade, Link, Reason, RequestVerdict, Tier
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.paths import stand_path
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.server import ServerOptions, StandServer
from kvwitness.tracer.verdicts.l3 import storage_changes

pytestmark = [pytest.mark.stand, pytest.mark.slow, pytest.mark.timeout(1800)]

BACKEND = "/hicache/storage-backend"
KEY = {"Authorization": "Bearer adm"}
PATIENCE_S = 120.0
DYNAMIC = {"backend_name": "kvw", "module_path": "kvw_l3_backend", "class_name": "Backend"}


class Stand:
    """A server with the admin API, and what it recorded."""

    def __init__(self, release: str, folder: Path, *extra: str, dp_size: int = 1, **env: str) -> None:
        progress = SilentProgress()
        environment = ensure_environment(progress, release=release)
        self.data, self.pages, self.fail = folder / "data", folder / "pages", folder / "fail"
        self.pages.mkdir()
        path = f"{stand_path(stand=True)}:{Path(__file__).parent / 'backend'}"
        options = ServerOptions(
            dp_size=dp_size,
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

    def _body(self, rid: str, prompt: list[int], new_tokens: int, rank: int | None) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        where = {} if rank is None else {"routed_dp_rank": rank}
        return {"rid": rid, "input_ids": prompt, "sampling_params": sampling, **where}

    def generate(self, rid: str, prompt: list[int], rank: int | None = None) -> None:
        body = self._body(rid, prompt, 8, rank)
        self.answers[rid] = self.client.post("/generate", json=body).raise_for_status().json()["output_ids"]

    def while_busy(self, rid: str, action: Callable[[], int], rank: int | None = None) -> int:
        """The status of what is asked for while a request decodes."""
        body = self._body(rid, list(range(1, 41)), 200, rank) | {"stream": True}
        with self.client.stream("POST", "/generate", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            status = action()
            for _ in lines:
                pass
        return status

    def until(self, seen: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.2)

    def flush(self) -> None:
        """Empty every rank's cache: of several ranks the answer is that of one."""
        before = self._resets()

        def flushed() -> bool:
            self.client.post("/flush_cache", headers=KEY)
            return all(now > then for now, then in zip(self._resets(), before, strict=True))

        self.until(flushed, "the flush")

    def _resets(self) -> list[int]:
        journals = [read_journal(path) for path in find_journals(self.data)]
        return [sum(isinstance(e, Reset) for e in j.events) for j in journals if j.role == SCHEDULER_ROLE]

    def stored(self, before: int, tokens: int) -> None:
        """Wait until the pages of so many tokens have come to the files that were there."""
        self.until(lambda: self.count() >= before + tokens // 16, "the pages in storage")

    def count(self) -> int:
        return sum(1 for _ in self.pages.iterdir())

    def try_attach(self, backend: str, policy: str, **extra: Any) -> int:
        more = DYNAMIC if backend == "dynamic" else {}
        body = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": json.dumps(more | extra),
            "hicache_storage_prefetch_policy": policy,
            "hicache_write_policy": "write_through",
        }
        return self.client.put(BACKEND, headers=KEY, json=body).status_code

    def attach(self, backend: str, policy: str, **extra: Any) -> None:
        self.until(lambda: self.try_attach(backend, policy, **extra) == 200, "the attaching")

    def try_detach(self) -> int:
        return self.client.delete(BACKEND, headers=KEY).status_code

    def detach(self) -> None:
        self.until(lambda: self.try_detach() == 200, "the detaching")

    def stop(self) -> tuple[list[Journal], dict[str, RequestVerdict]]:
        """The journals of the schedulers, and the verdicts."""
        self.client.close()
        self.server.stop()
        journals = [read_journal(path) for path in find_journals(self.data)]
        schedulers = [journal for journal in journals if journal.role == SCHEDULER_ROLE]
        return schedulers, {verdict.rid: verdict for verdict in judge(journals).verdicts}


def prompts(tokens: int = 803) -> Callable[[], list[int]]:
    chance = random.Random(3)
    return lambda: [chance.randrange(1, 1000) for _ in range(tokens)]


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
        refused = stand.while_busy("busy", lambda: stand.try_attach("file", "timeout"))
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
        # In 0.5.17 a transfer that raises ends its thread: with wait_complete the request would wait for ever.
        stand.attach("dynamic", "wait_complete" if release == "0.5.23" else "timeout")
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
        (journal,), verdicts = stand.stop()

    for name in ("q2", "r2"):
        assert verdicts[name].sentence == "L3 read confirmed", verdicts[name].sentence
        assert verdicts[name].tokens.l3 == 800
        links = {link.link: link for part in verdicts[name].ranges for link in part.links}
        assert links[Link.PREFETCHED].holds and [e.kind for e in links[Link.PREFETCHED].events] == [
            "PrefetchAsked",
            "StorageLookedUp",
            "PrefetchDone",
        ]
    assert stand.answers["q2"] == stand.answers["q1"] and stand.answers["r2"] == stand.answers["r1"]
    assert computed(verdicts["older2"]).reason is Reason.NEVER_BACKED_UP
    assert "older is older than its attaching" in verdicts["older2"].sentence
    assert "was cut short by the prefetch policy best_effort before anything was in L2" in verdicts["q3"].sentence
    assert any("wait_complete or timeout" in link.remedy for link in computed(verdicts["q3"]).missing)
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


@pytest.mark.parametrize("release", ["0.5.23", "0.5.17", "0.5.17-unified"])
def test_a_read_from_l3_is_told_from_one_from_l2_and_from_a_mix(tmp_path: Path, release: str) -> None:
    new = prompts(1603)
    whole = new()
    at_start: tuple[str, ...] = ()
    env: dict[str, str] = {}
    if "unified" in release:  # It is not attached at run time there.
        at_start = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
        env = {"SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1"}
    stand = Stand(release.removesuffix("-unified"), tmp_path, *at_start, **env)

    def push_out(name: str) -> None:
        for number in range(3):
            stand.generate(f"{name}{number}", new())

    try:
        if not at_start:
            stand.attach("file", "wait_complete")
        stand.generate("computed", whole)
        stand.stored(0, 1600)
        stand.flush()
        stand.generate("head", [*whole[:800], 7, 7, 7])
        push_out("fill")
        stand.generate("mix", whole)
        stand.generate("above", whole)
        push_out("more")
        stand.generate("below", whole)
    finally:
        (journal,), verdicts = stand.stop()
    assert not journal.gaps
    said = {name: verdicts[name].sentence for name in ("head", "mix", "above", "below")}
    assert said == {
        "head": "L3 read confirmed",
        "mix": "L3 read confirmed, with 800 tokens of L2",
        "above": "L1 read confirmed",
        "below": "L2 read confirmed",
    }
    read = [(r.start, r.end, r.tier) for r in verdicts["mix"].ranges if r.tier in (Tier.L2, Tier.L3)]
    assert read == [(0, 800, Tier.L2), (800, 1600, Tier.L3)]
    assert (verdicts["above"].tokens.l1, verdicts["below"].tokens.l2) == (1600, 1600)
    assert stand.answers["mix"] == stand.answers["below"] == stand.answers["computed"]


@pytest.mark.parametrize("release", ["0.5.23", "0.5.17"])
def test_the_policy_timeout_waits_or_cuts_short(tmp_path: Path, release: str) -> None:
    prompt = prompts(2403)()
    stand = Stand(release, tmp_path)
    try:
        stand.attach("dynamic", "timeout", prefetch_timeout_base=60, prefetch_timeout_per_ki_token=1)
        stand.generate("computed", prompt)
        stand.stored(0, 2400)
        stand.flush()
        stand.generate("in time", prompt)
        stand.detach()
        stand.attach("dynamic", "timeout", prefetch_timeout_base=0.5, prefetch_timeout_per_ki_token=0.01)
        for name, word in (("partly", "hold-tail"), ("too late", "hold")):
            stand.flush()
            stand.fail.write_text(word)
            stand.generate(name, prompt)
            stand.fail.unlink()
    finally:
        (journal,), verdicts = stand.stop()
    assert not journal.gaps
    assert verdicts["in time"].sentence == "L3 read confirmed" and verdicts["in time"].tokens.l3 == 2400
    partly, late = verdicts["partly"], verdicts["too late"]
    assert (partly.sentence, partly.tokens.l3, partly.grade) == ("L3 read confirmed", 2048, Grade.CONFIRMED)
    cut = "the prefetch from storage (L3) was cut short by the prefetch policy timeout"
    assert f"{cut} with 2048 tokens read; the look-up had found 2400 tokens" in computed(partly).detail
    assert (late.grade, late.tokens.l3, late.tokens.l2) == (Grade.RECOMPUTED, 0, 0)
    assert f"{cut} before anything was in L2; the look-up had found 2400 tokens" in late.sentence
    assert any("a longer timeout (prefetch_timeout_base" in link.remedy for link in computed(late).missing)
    assert len({tuple(stand.answers[name]) for name in stand.answers}) == 1


@pytest.mark.parametrize("release", ["0.5.23", "0.5.17"])
def test_each_dp_rank_has_its_own_backend(tmp_path: Path, release: str) -> None:
    """Attaching fails on one rank, detaching on the other: nothing is taken back, and each rank is told by itself."""
    new = prompts()
    mine = [new(), new()]
    stand = Stand(release, tmp_path, dp_size=2)

    def each(name: str) -> None:
        for rank in (0, 1):
            stand.generate(f"{name} {rank}", mine[rank], rank)

    try:
        stand.fail.write_text("refuse-DP1")
        first = stand.try_attach("dynamic", "wait_complete")
        each("computed")
        stand.stored(0, 800)
        stand.flush()
        each("one attached")
        stand.fail.unlink()
        stand.attach("dynamic", "wait_complete")
        stand.flush()
        each("both attached")
        stand.stored(800 // 16, 800)
        refused = stand.while_busy("busy", stand.try_detach, rank=0)
        stand.flush()
        each("one detached")
    finally:
        journals, verdicts = stand.stop()
    assert (first, refused) == (400, 400)
    assert len(journals) == 2 and not any(journal.gaps for journal in journals)
    attach, again, detach = storage_changes([derive(journal) for journal in journals])
    assert "storage attach took effect on rank dp 0 and was refused on rank dp 1 (dynamic " in attach
    assert "refuse-DP1 refused on purpose" in attach and "rolls nothing back, the ranks differ" in attach
    assert again.startswith("storage attached: on rank dp 0 ") and "already enabled" in again
    assert "storage detach took effect on rank dp 1 and was refused on rank dp 0 (" in detach
    assert "not idle" in detach and "rolls nothing back, the ranks differ" in detach
    sentences = {name: verdict.sentence for name, verdict in verdicts.items()}
    for name in ("one attached 0", "both attached 0", "one detached 0"):
        assert sentences[name] == "L3 read confirmed", sentences[name]
    refusal = sentences["one attached 1"]
    assert "no storage (L3) is attached on this rank: attaching was refused (dynamic " in refusal
    # Older than its attaching, and asked for once more meanwhile: by then without a backend, too.
    assert "is older than its attaching" in sentences["both attached 1"]
    assert sentences["one detached 1"].startswith("recomputed: ") and "L3" not in sentences["one detached 1"]


def test_host_memory_that_is_only_a_way_through(tmp_path: Path) -> None:
    """buffer_only: what comes from storage passes through host memory, and L2 is no tier."""
    new = prompts(1603)
    prompt = new()
    storage = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
    stand = Stand("0.5.23", tmp_path, *storage, "--hicache-host-memory-mode", "buffer_only")
    try:
        stand.generate("a", prompt)
        stand.generate("again", prompt)
        stand.stored(0, 1600)
        for number in range(6):
            stand.generate(f"fill {number}", new())
        stand.generate("c", prompt)
    finally:
        (journal,), verdicts = stand.stop()
    assert not journal.gaps and derive(journal).gaps == () and derive(journal).hook_failures == {}
    assert (verdicts["a"].sentence, verdicts["again"].sentence) == ("recomputed", "L1 read confirmed")
    c = verdicts["c"]
    assert (c.tier, c.grade, c.reason, c.tokens.l3) == (Tier.L3, Grade.REPORTED, Reason.INVALID_MODE, 1600)
    assert "buffer_only: host memory is transit here, not a tier" in c.sentence
    assert stand.answers["a"] == stand.answers["again"] == stand.answers["c"]


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
