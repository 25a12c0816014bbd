"""The full protocol, twenty rounds and their control, as it ran on the CPU stand (0.5.23) and on an H200.

The latter: SGLang 0.5.17 (HiRadixCache), random weights of the shape of Qwen2.5 7B, prefixes of 12,000 tokens.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

from journal_tools import FIXTURES

from kvwitness.tracer.bundle import BundleInputs, write_bundle
from kvwitness.tracer.bundle.read import parse_requests

from .runs import CREATED

RUN = FIXTURES / "protocol"
GPU_RUN = FIXTURES / "protocol-gpu"


def protocol_bundle(path: Path, folder: Path, run: Path = RUN) -> Path:
    """A bundle of that run at ``path``; its journals are unpacked into ``folder``."""
    control = _inputs(run / "control", folder / "control", None)
    return write_bundle(path, _inputs(run, folder / "run", control)).path


def _inputs(packed: Path, folder: Path, control: BundleInputs | None) -> BundleInputs:
    folder.mkdir(parents=True)
    for journal in packed.glob("*.kvwj.xz"):
        (folder / journal.name.removesuffix(".xz")).write_bytes(lzma.decompress(journal.read_bytes()))
    return BundleInputs(
        journals=tuple(sorted(folder.iterdir())),
        requests=parse_requests(_unpacked(packed / "requests.jsonl.xz")),
        environment=json.loads(_unpacked(packed / "environment.json.xz")),
        metrics={path.name.partition(".")[0]: _unpacked(path).decode() for path in packed.glob("*.prom.xz")},
        created=CREATED,
        control=control,
    )


def _unpacked(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes())
