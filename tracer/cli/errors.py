"""The one error that ends a command: a line on standard error and exit code 2."""

from __future__ import annotations

from typing import IO, Any, Final

import click

from kvwitness.tracer.cli.program import runnable

INTERRUPTED: Final = 130
"""Exit code of a command that Ctrl-C ended, as a shell gives it."""


class UserError(click.ClickException):
    """What is wrong, where, and what the user can do about it."""

    exit_code = 2

    def __init__(self, what: str, where: str, what_to_do: str) -> None:
        super().__init__(" ".join(f"{where}: {what}; {what_to_do}".split()))
        self.what = what
        self.where = where
        self.what_to_do = what_to_do

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {runnable(self.message)}", file=file, err=file is None)


def with_log(error: Exception, where: str) -> UserError:
    """The error of a step that has a log: the log's end is printed first, so that the error itself is one line."""
    first, _, log = str(error).partition("\n")
    if not log:
        return UserError(first, where, "mend that and repeat")
    click.echo(log, err=True)
    what, _, name = first.removesuffix(":").partition("; the end of ")
    return UserError(what, where, f"see the end of {name} above" if name else "see its output above")
