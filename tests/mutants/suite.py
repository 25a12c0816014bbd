"""The tests against one copy of the checkout, in a process forked from one that has their libraries loaded already."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mutants.settings import Settings

MEMORY = 6 << 30
"""Bytes. A loop that never ends may well append to something."""
SLOWER = 10
LEAST = 20.0
"""A test has timed out after this many times its usual seconds, and after this many seconds at least."""


@dataclass(frozen=True)
class Habits:
    """What is known of the tests: seconds by test, and how often each was the first to notice a change."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    kills: Mapping[str, int] = field(default_factory=dict)

    def rank(self, test: str) -> tuple[int, float, str]:
        """Sorts the likeliest to notice first, then the quickest file."""
        file = test.partition("::")[0]
        whole = sum(seconds for name, seconds in self.seconds.items() if name.partition("::")[0] == file)
        return -self.kills.get(test, 0), whole, file


@dataclass(frozen=True)
class Ran:
    """How a run of the tests ended. ``by``: the first that failed."""

    passed: bool
    by: str = ""
    timed_out: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class Watcher:
    """Plugin of pytest: orders the tests, limits their time, notes what happens."""

    def __init__(self, habits: Habits) -> None:
        self._habits = habits
        self.seconds: dict[str, float] = {}
        self.by = ""
        self.timed_out = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        ranks = {item.nodeid: self._habits.rank(item.nodeid) for item in items}
        items.sort(key=lambda item: ranks[item.nodeid])
        for item in items:
            usual = self._habits.seconds.get(item.nodeid)
            if usual is not None:
                item.add_marker(pytest.mark.timeout(max(LEAST, SLOWER * usual), method="signal"))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.by:
            self.by = report.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.by:
            self.by = report.nodeid
            self.timed_out = "Timeout (>" in str(report.longrepr)


class Running:
    """A run of the tests in a process of its own. ``tree``: the copy of the checkout."""

    def __init__(self, settings: Settings, tree: Path, habits: Habits, limit: float) -> None:
        self._answer = tree.with_suffix(".json")
        self._answer.unlink(missing_ok=True)
        self._log = tree.with_suffix(".log")
        self._deadline = time.monotonic() + limit
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.setsid()
                _child(settings, tree, habits, self._log, self._answer)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

    def poll(self) -> Ran | None:
        """How it ended, or None while it goes on."""
        if os.waitpid(self._pid, os.WNOHANG)[0]:
            self._kill()
            if not self._answer.exists():
                return Ran(passed=False, by="the process ended by itself")
            return Ran(**json.loads(self._answer.read_text("utf-8")))
        if time.monotonic() < self._deadline:
            return None
        self.stop()
        return Ran(passed=False, by="all tests together", timed_out=True)

    def stop(self) -> None:
        self._kill()
        os.waitpid(self._pid, 0)

    def said(self) -> str:
        """The last lines that the tests wrote."""
        return "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-15:])

    def _kill(self) -> None:
        """The whole group: tests start processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def load(modules: Iterable[str]) -> None:
    """Load what tests load anyway, so that forked processes have it."""
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)


def _child(settings: Settings, tree: Path, habits: Habits, log: Path, answer: Path) -> None:
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    paths = [str(tree / path) for path in settings.python_path]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # Known tests have had their compiled files written by the run of the unchanged code.
    sys.dont_write_bytecode = bool(habits.seconds)
    os.chdir(tree)
    watcher = Watcher(habits)
    code = int(pytest.main(_arguments(settings, tree), plugins=[watcher, _repeatable()]))
    loaded = {name: str(getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items())}
    ran = {
        "passed": code == pytest.ExitCode.OK,
        "by": watcher.by or ("" if code == pytest.ExitCode.OK else f"pytest itself, exit {code}"),
        "timed_out": watcher.timed_out,
        "seconds": watcher.seconds if not habits.seconds else {},
        "modules": [name for name, file in loaded.items() if file.startswith(sys.prefix)],
        "files": [file for file in loaded.values() if file],
    }
    answer.write_text(json.dumps(ran), "utf-8")
    os._exit(0)


def _arguments(settings: Settings, tree: Path) -> Sequence[str]:
    marks = " and ".join(f"not {mark}" for mark in settings.without)
    return ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={tree}", "-m", marks, *settings.tests]


def _repeatable() -> Any:
    """The same examples for every change, none that an earlier one left behind, and no test that fails by time."""

    class Repeatable:
        def pytest_configure(self) -> None:
            from hypothesis import settings

            settings.register_profile("mutants", database=None, derandomize=True, deadline=None)
            settings.load_profile("mutants")

    return Repeatable()
