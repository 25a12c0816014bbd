"""The process that starts the others of a server, SGLang 0.4.6 to 0.5.23: from here on they belong to one start.

``Engine`` and the HTTP server come by here before they start anything: SGLang sets its children's environment.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from kvwitness.patches.contract import Args, Hook, Kwargs
from kvwitness.patches.start import begin_launch
from kvwitness.patches.witness import Witness

MODULE: Final = "sglang.srt.entrypoints.engine"
_LAUNCH: Final = "_launch_subprocesses"


def begin_if_launching() -> None:
    """Where SGLang loads its plugins only once it is launching (a program of one's own), the hook comes too late."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == _LAUNCH and frame.f_globals.get("__name__") == MODULE:
            begin_launch()
            return
        frame = frame.f_back


def _enter(w: Witness, args: Args, kwargs: Kwargs) -> None:
    begin_launch()


HOOKS: tuple[Hook, ...] = (
    Hook(
        name="launch",
        module=MODULE,
        owner="",
        attribute="_set_envs_and_config",
        parameters=("server_args",),
        links=(),
        enter=_enter,
        always=True,
    ),
)
