"""The option that asks for the content of KV pages to be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from kvwitness.patches.config import DIGEST_VARIABLE, ConfigError, parse_digest

__all__ = ["DIGEST_VARIABLE", "digest_option"]

_HELP: Final = (
    "Compare the bytes of KV pages at their backup and after their load: sample (one page in 16), all, or 1/N. "
    "Raises confirmed to verified."
)


class _Share(click.ParamType[str]):
    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_digest(str(value))
        except ConfigError:
            self.fail(f"{value!r}: known are sample, all and 1/N", param, ctx)
        return str(value)


def digest_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--digest``; without it, the argument is ``""``."""
    return click.option("--digest", type=_Share(), default="", metavar="SHARE", help=_HELP)(command)
