"""Whether the run that a bundle is about reached its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvwitness.tracer.bundle.layout import one_line

STOPPED: Final = "stopped"
REACHED_ITS_END: Final = "no, it reached its end"


def why_stopped(environment: Mapping[str, Any]) -> str | None:
    """Why the run of a bundle did not reach its end; None when it did, and for what was no run of the protocol."""
    run = environment.get("run")
    stopped = run.get(STOPPED) if isinstance(run, Mapping) else None
    return one_line(stopped) if isinstance(stopped, str) and stopped != REACHED_ITS_END else None
