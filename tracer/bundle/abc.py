"""From a run of the protocol to what goes into its bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvwitness.collectors.environment import HostFacts, ServerProcesses
from kvwitness.collectors.metrics import stamped
from kvwitness.collectors.model_files import ModelFiles
from kvwitness.tracer.bundle.ending import REACHED_ITS_END, STOPPED
from kvwitness.tracer.bundle.summary import PROCESSES, RAW
from kvwitness.tracer.bundle.write import BundleInputs
from kvwitness.tracer.protocol.abc import AbcRun
from kvwitness.tracer.protocol.options import ABC, SWEEP

NO_CONTROL: Final = "not asked for"
_FIRST_MOMENT: Final = "start"


class Surroundings(msgspec.Struct, frozen=True):
    """What is recorded with a run and was not seen by it."""

    control: str = NO_CONTROL
    """What became of the control run."""
    model: ModelFiles | None = None
    memory: Mapping[str, Any] = {}
    """RAM by moment, in bytes: of the system, and of the server's processes."""
    earlier: tuple[str, ...] = ()
    """Why the earlier parts of a run that was cut short ended, in order."""


def inputs_of_run(
    run: AbcRun,
    host: HostFacts,
    processes: ServerProcesses,
    journals: Sequence[Path],
    journals_from: str,
    around: Surroundings | None = None,
    control: BundleInputs | None = None,
) -> BundleInputs:
    """The bundle of one run. ``journals_from`` says where the journals were found, or why there are none."""
    return BundleInputs(
        journals=tuple(journals),
        requests=run.records,
        environment=environment_of_run(run, host, processes, journals_from, around or Surroundings()),
        metrics=metrics_of_run(run),
        control=control,
    )


def environment_of_run(
    run: AbcRun, host: HostFacts, processes: ServerProcesses, journals_from: str, around: Surroundings
) -> dict[str, Any]:
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
    model: dict[str, Any] = {}
    if around.model is not None:
        model = msgspec.to_builtins(around.model)
        unknown += [f"model: {one}" for one in model.pop("unknown")]
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
            "evictions": msgspec.to_builtins(run.evictions),
            "findings": [f"{finding.code}: {finding.message}" for finding in run.findings],
            "protocol": SWEEP if run.options.lengths else ABC,
            "control": around.control,
            "settings_read": msgspec.to_builtins(run.settings),
            "missing_rounds": list(run.missing),
            "earlier_parts": list(around.earlier),
        },
        "model": model,
        "memory": msgspec.to_builtins(around.memory),
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
