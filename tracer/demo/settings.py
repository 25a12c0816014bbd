"""The demo under every setting of the stand that a CPU can run, one at a time: A, B, eviction, C, and the sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.demo.matrix import row_of
from kvwitness.tracer.demo.run import DemoOptions, run_demo
from kvwitness.tracer.protocol.client import ServerUnavailable
from kvwitness.tracer.stand.building import StandBuildError
from kvwitness.tracer.stand.progress import Progress
from kvwitness.tracer.stand.releases import NEWEST
from kvwitness.tracer.stand.server import StandServerError

_DUMMY = ("--load-format", "dummy")
# SGLang's torch_native attention writes sliding-window KV by translated and reads it by untranslated indices: with a
# window pool smaller than the full one it runs out of range (0.5.23).
_WINDOW = (*_DUMMY, "--swa-full-tokens-ratio", "1.0")


class Setting(msgspec.Struct, frozen=True):
    """One way of running the server; the rest is the demo's own (write_through, direct, layer_first, page 16)."""

    options: DemoOptions
    effective: str = ""
    """What SGLang 0.5.23 itself makes of it, where that is something else."""


SETTINGS: Final[Mapping[str, Setting]] = {
    "write_through": Setting(DemoOptions()),
    "write_through_selective": Setting(DemoOptions(write_policy="write_through_selective", second_hit=True)),
    "write_back": Setting(DemoOptions(write_policy="write_back")),
    "kernel-layer_first": Setting(DemoOptions(io_backend="kernel")),
    "kernel-page_first": Setting(DemoOptions(io_backend="kernel", mem_layout="page_first")),
    "kernel-page_first_direct": Setting(
        DemoOptions(io_backend="kernel", mem_layout="page_first_direct"), "direct, page_first_direct"
    ),
    "kernel-page_head": Setting(DemoOptions(io_backend="kernel", mem_layout="page_head")),
    "direct-page_first": Setting(DemoOptions(mem_layout="page_first"), "direct, page_first_direct"),
    "direct-page_first_direct": Setting(DemoOptions(mem_layout="page_first_direct")),
    "direct-page_head": Setting(DemoOptions(mem_layout="page_head")),
    "page-1": Setting(DemoOptions(page_size=1)),
    "page-64": Setting(DemoOptions(page_size=64)),
    "overlap": Setting(DemoOptions(overlap=True)),
    "chunked-prefill": Setting(DemoOptions(server_args=("--chunked-prefill-size", "512"))),
    "python-core": Setting(DemoOptions(tree_core="python")),
    "python-write_back-overlap": Setting(
        DemoOptions(
            tree_core="python", write_policy="write_back", io_backend="kernel", mem_layout="page_first", overlap=True
        )
    ),
    "tp-2": Setting(DemoOptions(tp_size=2)),
    "dp-2": Setting(DemoOptions(dp_size=2)),
    "mla": Setting(DemoOptions(model="dsv2")),
    "mla-kernel-page_first": Setting(DemoOptions(model="dsv2", io_backend="kernel", mem_layout="page_first")),
    # A match ends where the whole window before it is there: at the end of what was sent, not where prompts part.
    "sliding-window": Setting(DemoOptions(model="mellum", server_args=_WINDOW, turns=True)),
    "sliding-window-kernel-page_first": Setting(
        DemoOptions(model="mellum", server_args=_WINDOW, io_backend="kernel", mem_layout="page_first", turns=True)
    ),
    "conv-state": Setting(
        DemoOptions(
            model="lfm2",
            page_size=1,
            mem_layout="page_first_direct",
            # Its convolution has triton kernels only: triton's interpreter runs them, slowly.
            server_args=(*_DUMMY, "--max-mamba-cache-size", "24", "--max-running-requests", "4"),
            server_env={"TRITON_INTERPRET": "1"},
            turns=True,
            prefix_tokens=500,
            max_total_tokens=1536,
        )
    ),
}


class SettingRow(msgspec.Struct, frozen=True):
    """One setting, and what was said about A, B and C."""

    setting: str
    effective: str
    """What SGLang made of it, where that is something else."""
    sentences: dict[str, str] = {}
    same_tokens: bool | None = None
    """Whether C's answer equals that of the request that it repeats (None: not compared)."""
    right: bool = False
    refused: str = ""
    """SGLang's own line, where it does not start with this setting."""
    error: str = ""
    bundle: str = ""


def run_settings(names: Iterable[str], out: Path, progress: Progress, release: str = NEWEST) -> Iterator[SettingRow]:
    """Run the demo under each setting, one after the other; bundles go to ``out/<name>``."""
    for name in names:
        setting = SETTINGS[name]
        progress.phase(f"--- {name}")
        try:
            yield _ran(name, setting, out / name, progress, release)
        except StandServerError as error:
            refused = refusal(str(error))
            text = "" if refused else " ".join(str(error).split())[:300]
            yield SettingRow(name, setting.effective, refused=refused, error=text)
        except (StandBuildError, ServerUnavailable, BundleError) as error:
            yield SettingRow(name, setting.effective, error=" ".join(str(error).split())[:300])


def _ran(name: str, setting: Setting, out: Path, progress: Progress, release: str) -> SettingRow:
    options = msgspec.structs.replace(setting.options, release=release)
    result = run_demo(options, out, progress)
    if result.run.interrupted:
        raise KeyboardInterrupt
    # Dummy weights give an answer that says nothing about what was read.
    dummy = options.server_args[: len(_DUMMY)] == _DUMMY
    row = row_of(release, result, repeated=None if dummy else "B" if options.turns else "A")
    return SettingRow(
        setting=name,
        effective=setting.effective,
        sentences=row.sentences,
        same_tokens=row.same_tokens,
        right=row.right,
        error=result.run.stopped or "",
        bundle=str(result.bundle.path),
    )


def refusal(text: str) -> str:
    """The line of a log's end in which SGLang says why it does not start; empty when there is none."""
    told = [line.strip() for line in text.splitlines() if "Error: " in line or "error: " in line]
    return told[-1][:300] if told else ""
