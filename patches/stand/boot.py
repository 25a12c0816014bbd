"""The stand's way into a process: once, and before anything else of SGLang or kvwitness is changed.

For SGLang before 0.5.23 this runs while the interpreter starts, from a line in a .pth file of the stand's
own virtual environment (kvwitness.tracer.stand.environment writes it); a .pth file is read before
`sitecustomize`, by which kvwitness's own hooks come, so that the hooks see the stand as SGLang itself.
From 0.5.23 on, SGLang's plugins call it.
"""

from __future__ import annotations

import os
import sys

_installed = False


def install() -> None:
    """Put the shims and the asked-for faults of this SGLang release in place. Idempotent.

    Nothing of SGLang is imported: each change waits for the import of what it changes. Raises SystemExit
    on a fault that does not exist.
    """
    global _installed
    if _installed:
        return
    from kvwitness.patches.stand import faults, releases, shims

    try:
        faults.requested()
        shims.install(releases.running())
        faults.install_faults()
    except Exception as error:
        raise SystemExit(f"kvwitness stand: {type(error).__name__}: {error}") from error
    _installed = True


def from_pth() -> None:
    """As `install`, for a .pth line: what is wrong is said in one line, and the process ends.

    `site` goes on after an exception in a .pth line, and buries a SystemExit in a fatal error of the
    interpreter.
    """
    try:
        install()
    except SystemExit as stop:
        print(stop, file=sys.stderr, flush=True)
        os._exit(1)
