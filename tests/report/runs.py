"""Bundles of recorded runs, as a run of the protocol would have written them."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from journal_tools import ABC, FIXTURES
from spans.recorded import RIDS

from kvwitness.tracer.bundle import BundleInputs, write_bundle
from kvwitness.tracer.protocol.record import RequestRecord

CREATED = "2026-01-02T03:04:05+00:00"
GPU = FIXTURES / "gpu" / "7b-hiradix"
SERIES = {"warm-up": "warmup", "A": "A", "B": "B", "C": "C", "C2": "again"} | {
    f"fill {n}": "evict" for n in range(1, 5)
}
ENVIRONMENT: dict[str, Any] = {
    "unknown": ["host: gpus: nvidia-smi is not here", "server: weights"],
    "run": {"id": "x", "stopped": "no, it reached its end", "journals": "/data (named)", "options": {"fills": 4}},
    "host": {"cpu_model": "Some CPU", "gpus": None},
    "server": {"version": "0.5.23", "page_size": 16},
}


def record(rid: str, series: str, order: int, **changes: Any) -> RequestRecord:
    """What the client saw of one request."""
    host, device = (1488, 0) if series == "C" else (0, 1488) if series in ("B", "again") else (0, 0)
    plain = RequestRecord(
        rid=rid,
        series=series,
        order=order,
        prompt_tokens=1503,
        prompt_sha256=("0" if series in ("A", "C") else "1") * 64,
        sent_ns=1_000 + order,
        ttft_s={"A": 0.4, "B": 0.06, "C": 0.05}.get(series, 0.3),
        total_s=0.5,
        status=200,
        error=None,
        traceparent=None,
        output_ids=(1, 2, 3),
        text="ok",
        finish_reason="length",
        cached_tokens=host + device,
        cached_tokens_details={"device": device, "host": host} if host + device else None,
    )
    return msgspec.structs.replace(plain, **changes)


def abc_records(**of_c: Any) -> tuple[RequestRecord, ...]:
    """The requests of the recorded run; ``of_c`` changes what the client saw of C."""
    return tuple(
        record(RIDS[name], series, order, **(of_c if series == "C" else {}))
        for order, (name, series) in enumerate(SERIES.items())
    )


def bundle_of(
    path: Path,
    records: Sequence[RequestRecord] | None = None,
    journals: Sequence[Path] = (ABC,),
    environment: Mapping[str, Any] = ENVIRONMENT,
    control: BundleInputs | None = None,
) -> Path:
    """A bundle at ``path``, by default of the run on the CPU stand that is kept with the tests."""
    inputs = BundleInputs(
        journals=tuple(journals),
        requests=abc_records() if records is None else tuple(records),
        environment=dict(environment),
        created=CREATED,
        control=control,
    )
    return write_bundle(path, inputs).path


def server_info(**changes: Any) -> dict[str, Any]:
    """What a server said of itself."""
    return {"raw": {"server_info": {"enable_hierarchical_cache": True, "page_size": 16, **changes}}}


def control_of_abc(records: Sequence[RequestRecord] | None = None, **changes: Any) -> BundleInputs:
    """The control run of the recorded one: the same prompts, and nothing reused but by B."""
    plain = [
        msgspec.structs.replace(
            one,
            rid=f"control-{one.rid}",
            ttft_s=0.4 if one.series == "C" else one.ttft_s,
            cached_tokens=one.cached_tokens if one.series == "B" else 0,
            cached_tokens_details=one.cached_tokens_details if one.series == "B" else None,
        )
        for one in (abc_records() if records is None else records)
    ]
    return BundleInputs(
        journals=(),
        requests=tuple(changes.pop("requests", plain)),
        environment={
            "run": {"options": {"control": True}},
            **server_info(**{"enable_hierarchical_cache": False, **changes}),
        },
        created=CREATED,
    )


def gpu_bundle(path: Path, folder: Path) -> Path:
    """A bundle of the run on an H200; its journals are unpacked into ``folder``."""
    folder.mkdir()
    for packed in GPU.glob("*.kvwj.xz"):
        (folder / packed.name.removesuffix(".xz")).write_bytes(lzma.decompress(packed.read_bytes()))
    rows = [json.loads(line) for line in (GPU / "responses.jsonl").read_text().splitlines()]
    records = [
        record(
            f"gpu-{row['name']}",
            "warmup" if row["name"] == "warm" else "evict" if row["name"].startswith("fill") else row["name"],
            order,
            prompt_tokens=row["prompt"],
            ttft_s=row["ttft_ms"] / 1e3,
            output_ids=tuple(row["out"]),
            cached_tokens=row["cached"],
            cached_tokens_details=row["details"],
        )
        for order, row in enumerate(rows)
    ]
    return bundle_of(path, records, sorted(folder.iterdir()))
