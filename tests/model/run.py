"""Random workloads on SGLang's own scheduler, the ledger against the bytes in the pools.

``python -m model.run MODEL --workloads 100``, in the stand's Python, with kvwitness, tests and Hypothesis on the path
(model.test_model starts it so). One process for each setting; exit 1 where product and pools differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from model.cases import CASES
from model.engine import Engine, Settings, enter_stand
from model.machine import Workload
from model.truth import Tally

SETTINGS = (
    Settings(),
    Settings(tree_core="python", write_policy="write_back", host_ratio=1.2),
    Settings(tree_core="rust", write_policy="write_back", host_ratio=1.2),
    Settings(tree_core="python", write_policy="write_through_selective", io_backend="kernel"),
    Settings(tree_core="rust", page_size=4, device_tokens=96, host_ratio=1.5, chunk=32),
    Settings(tree_core="python", page_size=1, device_tokens=96, host_ratio=1.5, chunk=32),
    Settings(tree_core="rust", write_policy="write_back", page_size=1, device_tokens=96, host_ratio=1.5, chunk=32),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--workloads", type=int, default=100, help="for each setting")
    parser.add_argument("--steps", type=int, default=30, help="rules of a workload")
    parser.add_argument("--settings", type=int, nargs="*", default=range(len(SETTINGS)), help="by number")
    parser.add_argument("--cases", action="store_true", help="before that, the situations of model.cases")
    parser.add_argument("--random", action="store_true", help="other workloads on every run")
    arguments = parser.parse_args()
    enter_stand()
    # Imported once, before the processes part.
    importlib.import_module("sglang.srt.managers.scheduler")
    failed = 0
    for number in arguments.settings:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _run(SETTINGS[number], arguments)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        failed += os.waitpid(child, 0)[1] != 0
    return int(failed > 0)


def _run(chosen: Settings, arguments: argparse.Namespace) -> None:
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = chosen.tree_core
    Workload.engine, Workload.tally = Engine(chosen, arguments.model), Tally()
    if arguments.cases and chosen == SETTINGS[0]:
        for name, case in CASES.items():
            print(json.dumps({"case": name, "told": case(Workload.engine)}), flush=True)
    began = time.monotonic()
    try:
        run_state_machine_as_test(
            Workload,
            settings=hypothesis_settings(
                max_examples=arguments.workloads,
                stateful_step_count=arguments.steps,
                derandomize=not arguments.random,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        tally = Workload.tally
        found = {"setting": chosen.name, "workloads": tally.workloads, "checks": tally.checks}
        found |= {"seconds": round(time.monotonic() - began, 1), "missed": dict(tally.missed.most_common())}
        print(json.dumps(found | dict(sorted(tally.counts.items()))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
