"""Run the demo: start the stand, drive it through A, B, eviction and C, stop it, write the bundle."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from kvwitness.collectors.environment import find_server_processes, host_facts
from kvwitness.collectors.memory import memory_of
from kvwitness.collectors.model_files import model_files
from kvwitness.tracer.bundle.abc import Surroundings, inputs_of_run
from kvwitness.tracer.bundle.places import recorded_journals
from kvwitness.tracer.bundle.write import BundleInfo, write_bundle
from kvwitness.tracer.demo.faults import KillDuringLoad, cut_journals
from kvwitness.tracer.demo.variants import PLAIN, Variant
from kvwitness.tracer.interrupt import finishing
from kvwitness.tracer.protocol.abc import AbcRun, run_abc
from kvwitness.tracer.protocol.client import ServerClient
from kvwitness.tracer.protocol.observer import JournalObserver
from kvwitness.tracer.protocol.options import AbcOptions
from kvwitness.tracer.spans.otlp_json import span_lines
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ModelKind, ensure_model
from kvwitness.tracer.stand.paths import stand_path
from kvwitness.tracer.stand.progress import Progress
from kvwitness.tracer.stand.releases import NEWEST
from kvwitness.tracer.stand.server import ServerOptions, StandServer

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
TreeCore = Literal["rust", "python"]
IoBackend = Literal["direct", "kernel"]
MemLayout = Literal["layer_first", "page_first", "page_first_direct", "page_head"]


class DemoOptions(msgspec.Struct, frozen=True):
    """What the demo is asked to do. Lengths in tokens."""

    release: str = NEWEST
    """SGLang release to run (kvwitness.tracer.stand.releases)."""
    variant: Variant = PLAIN
    write_policy: WritePolicy = "write_through"
    tree_core: TreeCore | None = None
    page_size: int = 16
    overlap: bool = False
    io_backend: IoBackend = "direct"
    mem_layout: MemLayout = "layer_first"
    tp_size: int = 1
    dp_size: int = 1
    model: ModelKind = "qwen2"
    server_args: tuple[str, ...] = ()
    """More of SGLang's own arguments."""
    server_env: dict[str, str] = {}
    max_total_tokens: int = 4096
    """Device pool."""
    turns: bool = False
    """A, B and C are turns of one conversation: B goes on where A's answer ended, C is B again. For models whose
    state is kept at the end of a request only."""
    prefix_tokens: int = 1500
    second_hit: bool = False
    digest: str = ""
    """Pages whose content is compared: "sample", "all" or "1/N"; "": none."""
    overlay: Path | None = None
    """Folder that comes first on the server's PYTHONPATH: a changed SGLang, for a test."""
    seed: int = 20_523
    """Fixed, so that two runs send the same prompts."""


class DemoResult(msgspec.Struct, frozen=True):
    """What the demo did: the protocol's run and the bundle that was written of it."""

    run: AbcRun
    bundle: BundleInfo


def run_demo(options: DemoOptions, out: Path, progress: Progress, *, replace: bool = True) -> DemoResult:
    """Build what is missing, run the demo and write the bundle to ``out``.

    Raises what its parts raise: StandBuildError, StandServerError, ServerUnavailable, BundleError. Then the
    journals and the server's log stay in a temporary folder; else the journals are in the bundle.
    """
    environment = ensure_environment(progress, release=options.release)
    model = ensure_model(environment, progress, options.model)
    variant = options.variant
    workdir = Path(tempfile.mkdtemp(prefix="kvwitness-demo-"))
    journals = workdir / "journals"
    server_options = ServerOptions(
        write_policy=options.write_policy,
        tree_core=options.tree_core,
        page_size=options.page_size,
        overlap=options.overlap,
        io_backend=options.io_backend,
        mem_layout=options.mem_layout,
        max_total_tokens=options.max_total_tokens,
        tp_size=options.tp_size,
        dp_size=options.dp_size,
        extra_args=options.server_args,
        hicache_ratio=variant.hicache_ratio,
        faults=variant.stand_fault,
        extra_env={
            "KVWITNESS_DIR": str(journals),
            "KVWITNESS_FAULT": variant.recorder_fault,
            "KVWITNESS_DIGEST": options.digest or variant.digest,
            **options.server_env,
            **_python_path(options.overlay),
        },
    )
    progress.phase(f"Starting SGLang {environment.release} with HiCache on the CPU")
    with StandServer(environment, model, server_options, workdir=workdir) as server:
        with ServerClient(server.url) as client, _killer(variant, journals, server):
            memory = {"before": memory_of(server.url)}
            run = run_abc(_protocol(options), client, JournalObserver(journals), progress)
            memory["after"] = memory_of(server.url)
        processes = find_server_processes(server.url)
        progress.phase("Stopping the server")
    if variant.cut_journal:
        cut_journals(journals)
    with finishing(progress.phase):
        progress.phase("Writing the evidence bundle")
        files = model_files(run.server.raw_server, run.server.raw_model, local=True)
        around = Surroundings(model=files, memory=memory)
        paths = recorded_journals(journals)
        inputs = inputs_of_run(run, host_facts(), processes, paths, "the demo's own server", around)
        bundle = write_bundle(out, inputs, spans=span_lines, replace=replace)
    # A journal whose process was killed is as large as its quota: a quarter of a GiB for each demo.
    shutil.rmtree(workdir, ignore_errors=True)
    return DemoResult(run, bundle)


def _python_path(overlay: Path | None) -> dict[str, str]:
    return {} if overlay is None else {"PYTHONPATH": f"{overlay}:{stand_path(stand=True)}"}


def _protocol(options: DemoOptions) -> AbcOptions:
    return AbcOptions(
        prefix_tokens=options.prefix_tokens,
        evict_host=options.variant.evict_host,
        flush_between_bc=options.variant.flush,
        second_hit=options.second_hit,
        turns=options.turns,
        dp_rank=0 if options.dp_size > 1 else None,
        seed=options.seed,
    )


@contextlib.contextmanager
def _killer(variant: Variant, journals: Path, server: StandServer) -> Iterator[None]:
    if not variant.kill_during_c:
        yield
        return
    killer = KillDuringLoad(journals, server.scheduler_pids())
    killer.start()
    try:
        yield
    finally:
        killer.stop()
