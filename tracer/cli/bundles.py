"""Bundles as commands use them: what goes wrong with one is the command's one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.cli.errors import UserError


@contextmanager
def bundle_errors() -> Iterator[None]:
    """Turn what bundles raise into the command's one error."""
    try:
        yield
    except BundleError as error:
        raise UserError(error.what, error.where, error.what_to_do) from error
