"""From a run of the protocol to what goes into its bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvwitness.collectors.environment import HostFacts, ServerProcesses
from kvwitness.collectors.metrics import stamped
from kvwitness.tracer.bundle.ending import REACHED_ITS_END, STOPPED
from kvwitness.tracer.bundle.summary import PROCESSES, RAW
from kvwitness.tracer.bundle.write import BundleInputs
from kvwitness.tracer.protocol.abc import AbcRun

_FIRST_MOMENT: Final = "start"


def inputs_of_run(
    run: AbcRun, host: HostFacts, processes: ServerProcesses, journals: Sequence[Path], journals_from: str
) -> BundleInputs:
    """The bundle of one run. ``journals_from`` says where the journals were found, or why there are none."""
    return BundleInputs(
        journals=tuple(journals),
        requests=run.records,
        environment=environment_of_run(run, host, processes, journals_from),
        metrics=metrics_of_run(run),
    )


def environment_of_run(run: AbcRun, host: HostFacts, processes: ServerProcesses, journals_from: str) -> dict[str, Any]:
    """The contents of ``environment.json``. ``unknown`` gathers everything that could not be read."""
    server: dict[str, Any] = msgspec.to_builtins(run.server)
    raw = {"server_info": server.pop("raw_server"), "model_info": server.pop("raw_model")}
    server_unknown = server.pop("unknown")
    machine: dict[str, Any] = msgspec.to_builtins(host)
    if any(one.startswith("gpus") for one in machine["unknown"]):
        machine["gpus"] = None  # An empty list would say that there are none.
    unknown = [*(f"host: {one}" for one in machine.pop("unknown")), *(f"server: {one}" for one in server_unknown)]
    if processes.reason:
        unknown.append(f"processes: {processes.reason}")
    return {
        "unknown": unknown,
        "run": {
            "id": run.run_id,
            "seed": run.seed,
            "vocabulary": run.vocabulary,
            STOPPED: run.stopped or REACHED_ITS_END,
            "journals": journals_from,
            # Here None means "not asked for", and not "unknown" as everywhere else.
            "options": {key: value for key, value in msgspec.to_builtins(run.options).items() if value is not None},
            "eviction": msgspec.to_builtins(run.eviction),
            "flush": msgspec.to_builtins(run.flush) if run.flush is not None else "not asked for",
            "findings": [f"{finding.code}: {finding.message}" for finding in run.findings],
        },
        "host": machine,
        "server": server,
        PROCESSES: msgspec.to_builtins(processes.processes),
        RAW: raw,
    }


def metrics_of_run(run: AbcRun) -> dict[str, str]:
    """``before`` the run, ``after`` it, and after each series in between."""
    moments = list(run.snapshots)
    names = {moment: f"after-{moment}" for moment in moments} | dict.fromkeys(moments[-1:], "after")
    if _FIRST_MOMENT in names:
        names[_FIRST_MOMENT] = "before"
    return {names[moment]: stamped(snapshot) for moment, snapshot in run.snapshots.items()}
