"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
import msgspec
from rich.console import Console, RenderableType

from kvwitness.tracer.cli.program import runnable

F = TypeVar("F", bound=Callable[..., Any])

_FILE_WIDTH: Final = 10_000
"""Columns when the output is no terminal: a pipe or a log gets each row on one line, to search and to cut."""


def json_option(command: F) -> F:
    """The ``--json`` that every command has; the parameter is ``as_json``."""
    text = "Machine-readable result on standard output; progress goes to standard error."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def print_json(value: Any) -> None:
    """Print ``value`` (plain values, structs) as one JSON document."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def note(text: str) -> None:
    """One line for a person, on standard error."""
    click.echo(runnable(text), err=True)


def until_told(seconds: float | None) -> str:
    """How long something goes on, for a note: ``seconds`` is what --for says."""
    return "until Ctrl-C" if seconds is None else f"for {seconds:g} s, or until Ctrl-C"


def console() -> Console:
    """Standard output for people: as wide as the terminal, or as COLUMNS says."""
    narrow = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if narrow else _FILE_WIDTH, highlight=False)


def display(out: Console, *parts: RenderableType) -> None:
    """Print tables and texts without the blanks that fill up a table's last column."""
    with out.capture() as captured:
        for part in parts:
            out.print(part)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)
