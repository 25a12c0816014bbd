"""The options that ``export`` and ``collect`` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvwitness.tracer.cli.address import web_address

F = TypeVar("F", bound=Callable[..., Any])


def otlp_options(command: F) -> F:
    """``--otlp URL`` and ``--protocol``."""
    url = click.option(
        "--otlp",
        "url",
        required=True,
        metavar="URL",
        callback=web_address("http://127.0.0.1:4318"),
        help="OTLP endpoint, http://127.0.0.1:4318 for example.",
    )
    protocol = click.option(
        "--protocol",
        type=click.Choice(["http", "grpc"]),
        default="http",
        show_default=True,
        help="How it is spoken to.",
    )
    return url(protocol(command))
