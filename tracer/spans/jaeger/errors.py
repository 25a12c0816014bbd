"""What goes wrong with a Jaeger, and the end of its logs."""

from __future__ import annotations

from pathlib import Path


class JaegerUnavailable(RuntimeError):
    """There is no Jaeger program and none can be built: why, what to do, and the log of a build if there is one."""

    def __init__(self, what: str, what_to_do: str, log: str = "") -> None:
        super().__init__("\n".join(filter(None, (f"{what}; {what_to_do}", log))))
        self.what = what
        self.what_to_do = what_to_do
        self.log = log


class JaegerError(RuntimeError):
    """Jaeger did not start, or ended by itself; the message has the end of its log."""


def log_tail(path: Path, lines: int = 30) -> str:
    """The last ``lines`` lines of the log at ``path``."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error})"
