"""``kvwitness doctor``: what could be proven with this SGLang, before a server is started."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from kvwitness.collectors.live.preflight import GdbFound, look_for_gdb, takes_gdb
from kvwitness.patches.hooks import all_hooks
from kvwitness.tracer.cli.doctor_text import print_environment, print_package
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.output import json_option, print_json
from kvwitness.tracer.contracts.check import HookCheck, check
from kvwitness.tracer.contracts.environment import (
    JournalRoom,
    NoSuchPython,
    PythonFacts,
    ask_python,
    journal_room,
)
from kvwitness.tracer.contracts.facts import extract
from kvwitness.tracer.contracts.prove import Claim, ReleaseSupport, prove
from kvwitness.tracer.contracts.source import NotSglang, Source, open_folder, open_wheel

_NAME_PYTHON = "name the Python that runs SGLang with --python"


class Package(msgspec.Struct, frozen=True):
    """One SGLang package and what can be proven with it."""

    source: str
    support: ReleaseSupport
    hooks: tuple[HookCheck, ...]


class Report(msgspec.Struct, frozen=True):
    """What ``--json`` prints."""

    ok: bool
    """Whether an L2 read can be confirmed on every package."""
    packages: tuple[Package, ...]
    python: PythonFacts | None = None
    journals: JournalRoom | None = None
    gdb: GdbFound | None = None
    """For ``attach --live``; None where the Python takes none."""


@click.command()
@click.option("--python", metavar="PATH", help="The Python that runs SGLang.  [default: python, else kvwitness's own]")
@click.option(
    "--wheel",
    "wheels",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A wheel of SGLang to examine instead; may be given several times.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, python: str | None, wheels: tuple[Path, ...], as_json: bool) -> None:
    """Say which links of the chain of evidence can be proven with an SGLang, and why the others cannot.

    Reads its source; nothing of SGLang is imported or started. The exit code is 0 when an L2 read can be
    confirmed on a plain model, else 1.

    \b
    Example:
      kvwitness doctor --python /opt/sglang/bin/python
    """
    if wheels and python is not None:
        raise UserError("--python and --wheel exclude each other", "kvwitness doctor", "give one of them")
    report = _examine_wheels(wheels) if wheels else _examine_python(python)
    if as_json:
        print_json(report)
    else:
        if report.python is not None and report.journals is not None:
            print_environment(report.python, report.journals, report.gdb)
        for package in report.packages:
            print_package(package.source, package.support, package.hooks)
    ctx.exit(0 if report.ok else 1)


def _examine_wheels(paths: Sequence[Path]) -> Report:
    packages = []
    for path in paths:
        try:
            with open_wheel(path) as source:
                packages.append(_examine(source))
        except NotSglang as error:
            raise UserError(str(error), str(path), "give a wheel of sglang, a .whl file") from error
    return _report(packages)


def _examine_python(python: str | None) -> Report:
    facts = _ask(python) if python is not None else _default_python()
    try:
        if facts.package is None:
            raise NotSglang("no sglang inside")
        source = open_folder(Path(facts.package), facts.version)
    except NotSglang as error:
        raise UserError(str(error), facts.executable, _NAME_PYTHON) from error
    gdb = look_for_gdb() if takes_gdb(facts.python) else None
    return _report([_examine(source)], facts, journal_room(os.environ), gdb)


def _ask(python: str) -> PythonFacts:
    try:
        return ask_python(python)
    except NoSuchPython as error:
        raise UserError(str(error), python, "give the path of a Python with --python") from error


def _default_python() -> PythonFacts:
    """``python`` of the shell; where that has no sglang, the one that runs kvwitness."""
    shell = shutil.which("python")
    asked = dict.fromkeys(path for path in (shell, sys.executable) if path)
    for path in asked:
        # A shim of a version manager may stand for no Python at all: that is no reason to give up.
        with contextlib.suppress(NoSuchPython):
            facts = ask_python(path)
            if facts.package is not None:
                return facts
    raise UserError("no sglang inside", " and ".join(asked), _NAME_PYTHON)


def _examine(source: Source) -> Package:
    hooks = all_hooks()
    facts = extract(source, hooks)
    checks = check(hooks, facts)
    return Package(source.label, prove(facts, checks), checks)


def _report(
    packages: Sequence[Package],
    python: PythonFacts | None = None,
    journals: JournalRoom | None = None,
    gdb: GdbFound | None = None,
) -> Report:
    ok = all(package.support.default.confirms(Claim.L2_READ) for package in packages)
    return Report(ok, tuple(packages), python, journals, gdb)
