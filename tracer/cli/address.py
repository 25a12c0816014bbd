"""Options that take a server's address."""

from __future__ import annotations

from collections.abc import Callable

import click

from kvwitness.tracer.addresses import is_web_address
from kvwitness.tracer.cli.errors import UserError


def web_address(example: str) -> Callable[[click.Context, click.Parameter, str], str]:
    """The callback of such an option: what is no http:// or https:// address is refused before a library sees it."""

    def check(_ctx: click.Context, option: click.Parameter, value: str) -> str:
        if is_web_address(value):
            return value
        meant = f"http://{value}"
        proposal = meant if "//" not in value and is_web_address(meant) else f"an address like {example}"
        raise UserError("it is not the address of a server", f"{option.opts[0]} {value!r}", f"write {proposal}")

    return check
