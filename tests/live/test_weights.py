"""Weights that change on a real server with storage: recorded in their place among the requests, answers unchanged.

A repeat may read what other weights have computed: from L3 although the cache was emptied with the change, from L1
where it was not. ``tests/soundness/data/weights`` has the journal of such a run.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from pathlib import Path

import httpx
import pytest
from attach_fixtures import kvwitness, scheduler_journals, standing_by, untouched

from kvwitness.collectors.journal import Journal, find_journals, read_journal
from kvwitness.patches.schema.events import HookFailed, Prefill, Reset, Text, WeightsKind, WeightsUpdated
from kvwitness.tracer.judgement import SCHEDULER_ROLE, judge
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.releases import NEWEST
from kvwitness.tracer.stand.server import ServerOptions, StandServer

pytestmark = [pytest.mark.stand, pytest.mark.timeout(1800)]

RELEASES = [pytest.param(NEWEST, id=NEWEST), pytest.param("0.5.17", id="0.5.17", marks=pytest.mark.slow)]
KEY = {"Authorization": "Bearer adm"}
STORAGE = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
PATIENCE_S = 120.0
PAGES = 800 // 16


def with_other_weights(model: Path, folder: Path) -> Path:
    """A copy of the model in which every token has the embedding of the one before it."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    (length,) = struct.unpack_from("<Q", raw)
    told = json.loads(raw[8 : 8 + length])["model.embed_tokens.weight"]
    begin, end = (8 + length + offset for offset in told["data_offsets"])
    row = (end - begin) // told["shape"][0]
    raw[begin:end] = raw[end - row : end] + raw[begin : end - row]
    file.write_bytes(raw)
    return folder


class Course:
    """What is asked of a server, and what it answered."""

    def __init__(self, server: StandServer, pages: Path) -> None:
        self._client = httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE_S, headers=KEY)
        self._pages = pages
        self.answers: dict[str, list[int]] = {}

    def generate(self, rid: str, prompt: list[int]) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling}
        self.answers[rid] = self._client.post("/generate", json=body).raise_for_status().json()["output_ids"]

    def update(self, model: Path, version: str | None = None, *, flush: bool = True) -> bool:
        body = {"model_path": str(model), "weight_version": version, "flush_cache": flush}
        return bool(self._client.post("/update_weights_from_disk", json=body).json()["success"])

    def stored(self, pages: int) -> None:
        """Wait until so many pages are in storage."""
        deadline = time.monotonic() + PATIENCE_S
        while sum(1 for _ in self._pages.iterdir()) < pages:
            assert time.monotonic() < deadline, "waited in vain for the pages in storage"
            time.sleep(0.2)

    def run(self, model: Path, other: Path) -> None:
        chance = random.Random(5)
        p, q = ([chance.randrange(1, 1000) for _ in range(803)] for _ in range(2))
        self.generate("p", p)
        self.stored(PAGES)
        assert self.update(other, "second")
        self.generate("p-from-l3", p)
        self.generate("q", q)
        assert self.update(model, "x" * 100, flush=False)
        self.generate("q-from-l1", q)
        assert not self.update(other / "nowhere")
        self.generate("q-again", q)
        self._client.close()


def course(release: str, folder: Path, data: Path | None) -> Course:
    """The whole of it on a server of its own, recorded into ``data`` or without kvwitness."""
    progress = SilentProgress()
    environment = ensure_environment(progress, release=release)
    model = ensure_model(environment, progress)
    pages = folder / "pages"
    pages.mkdir(parents=True)
    other = with_other_weights(model, folder / "other")
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(pages)}
    if data is not None:
        env["KVWITNESS_DIR"] = str(data)
    options = ServerOptions(extra_args=("--admin-api-key", "adm", *STORAGE), extra_env=env)
    with StandServer(environment, model, options, workdir=folder / "server") as server:
        asked = Course(server, pages)
        asked.run(model, other)
    return asked


def scheduler_of(data: Path) -> Journal:
    journals = [read_journal(path) for path in find_journals(data)]
    (journal,) = [journal for journal in journals if journal.role == SCHEDULER_ROLE]
    return journal


@pytest.mark.parametrize("release", RELEASES)
def test_changes_stand_among_the_requests_and_answers_are_as_without(release: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    seen = course(release, tmp_path / "recorded", data)
    assert seen.answers == course(release, tmp_path / "without", None).answers
    journal = scheduler_of(data)
    assert journal.closed and not journal.gaps and not journal.anomalies
    assert not [event for event in journal.events if isinstance(event, HookFailed)]
    texts = {event.id: event.text for event in journal.events if isinstance(event, Text)}
    order: list[str] = []
    for event in journal.events:
        if isinstance(event, Prefill) and texts[event.req] in seen.answers:
            order.append(texts[event.req])
        elif isinstance(event, WeightsUpdated):
            order.append(f"update {event.update}")
        elif isinstance(event, Reset) and order:
            order.append("reset")
    # SGLang empties the cache within the change, which is over afterwards.
    changes = ["p", "reset", "update 1", "p-from-l3", "q", "update 2", "q-from-l1", "update 3", "q-again"]
    assert order == changes
    updates = [event for event in journal.events if isinstance(event, WeightsUpdated)]
    assert [(e.kind, e.ok, e.flushed, e.label) for e in updates] == [
        (WeightsKind.DISK, 1, 1, "second"),
        (WeightsKind.DISK, 1, 0, "x" * 64),
        (WeightsKind.DISK, 0, 1, ""),
    ]
    tokens = {verdict.rid: verdict.tokens for verdict in judge([journal]).verdicts}
    assert (tokens["p-from-l3"].l3, tokens["q-from-l1"].l1, tokens["q"].l1 + tokens["q"].l3) == (800, 800, 0)


@pytest.mark.slow
@pytest.mark.parametrize("release", [NEWEST, "0.5.17"])
def test_a_change_is_seen_while_attached(release: str, tmp_path: Path) -> None:
    """The scheduler calls what it has bound long before."""
    progress = SilentProgress()
    model = ensure_model(ensure_environment(progress, release=release), progress)
    other = with_other_weights(model, tmp_path / "other")
    with standing_by(release, tmp_path) as server:
        asked = Course(server, tmp_path)
        assert asked.update(other, "unseen")
        kvwitness("attach", "--url", server.url, "--yes")
        assert asked.update(model, "seen")
        assert kvwitness("detach", "--url", server.url)["not_restored"] == []
        assert asked.update(other, "unseen")
    (journal,) = scheduler_journals(tmp_path / "data")
    updates = [event for event in journal.events if isinstance(event, WeightsUpdated)]
    assert [(e.update, e.kind, e.ok, e.label) for e in updates] == [(1, WeightsKind.DISK, 1, "seen")]
    untouched(tmp_path, ["kvwitness-standby"])
