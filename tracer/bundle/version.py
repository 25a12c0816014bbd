"""The version of this kvwitness, as bundles name it."""

from __future__ import annotations

from importlib import metadata


def kvwitness_version() -> str:
    """The installed version, or ``0`` when kvwitness runs from a bare folder."""
    try:
        return metadata.version("kvwitness")
    except metadata.PackageNotFoundError:
        return "0"
