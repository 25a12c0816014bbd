"""What commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
import msgspec
from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

_FILE_WIDTH: Final = 160
"""Columns when the output is not a terminal: rich would squeeze every table into 80."""


def json_option(command: F) -> F:
    """The ``--json`` that every command has; the parameter is ``as_json``."""
    text = "Machine-readable result on standard output; progress goes to standard error."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def print_json(value: Any) -> None:
    """Print ``value`` (plain values, structs) as one JSON document."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def note(text: str) -> None:
    """One line for a person, on standard error."""
    click.echo(text, err=True)


def console() -> Console:
    """Standard output for people."""
    wide = None if sys.stdout.isatty() else _FILE_WIDTH
    return Console(width=wide, highlight=False)
