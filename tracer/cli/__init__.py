"""The ``kvwitness`` command."""

from __future__ import annotations

import sys

_EXTRA = ("click", "httpx", "jinja2", "matplotlib", "msgspec", "numpy", "psutil", "rich", "scipy")


def main() -> None:
    """Entry point of the ``kvwitness`` command."""
    try:
        from kvwitness.tracer.cli.application import application
    except ModuleNotFoundError as error:
        # Next to SGLang kvwitness is installed without what the tool side needs; a traceback would not say so.
        if error.name not in _EXTRA:
            raise
        sys.exit(
            f"kvwitness: {error.name} is not installed; install the command's needs: pip install 'kvwitness[tool]'"
        )
    application(prog_name="kvwitness")
