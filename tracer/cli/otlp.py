"""What ``export`` and ``collect`` share: their options, and the way to the functions that send spans."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from kvwitness.tracer.cli.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])

_MODULE: Final = "kvwitness.tracer.spans.export"


def otlp_options(command: F) -> F:
    """``--otlp URL`` and ``--protocol``."""
    url = click.option("--otlp", "url", required=True, metavar="URL", help="OTLP endpoint.")
    protocol = click.option(
        "--protocol",
        type=click.Choice(["http", "grpc"]),
        default="http",
        show_default=True,
        help="How it is spoken to.",
    )
    return url(protocol(command))


def span_function(name: str) -> Callable[..., Any]:
    """A function of the span exporter. Raises :class:`UserError` when this installation has none."""
    try:
        return getattr(importlib.import_module(_MODULE), name)  # type: ignore[no-any-return]
    except (ModuleNotFoundError, AttributeError) as error:
        raise UserError(
            f"sending spans is not available ({error})", "kvwitness", "install all of it: pip install 'kvwitness[tool]'"
        ) from error
