"""The two entry points of the stand (groups sglang.srt.platforms and sglang.srt.plugins).

kvwitness's own distribution does not register them: SGLang leaves out the general plugins of a
distribution whose platform is not the one that SGLANG_PLATFORM selects, and kvwitness's hooks would go
with it. `kvwitness.tracer.stand.paths.stand_path` writes them as the distribution `kvwitness-cpu-stand`.
"""

from __future__ import annotations

import os

STAND_VARIABLE = "KVWITNESS_STAND"
PLATFORM_CLASS = "kvwitness.patches.stand.platform.StandPlatform"


def enabled() -> bool:
    """Whether this process is asked to be a stand."""
    return os.environ.get(STAND_VARIABLE) == "1"


def activate() -> str | None:
    """Platform entry point: the platform class by its dotted name, or None where this is no stand.

    None also in a release that would ask the platform for pool classes; the stand has other ways there.
    """
    if not enabled():
        return None
    from kvwitness.patches.stand import releases

    return PLATFORM_CLASS if releases.entered_by_plugin(releases.running()) else None


def plugin() -> None:
    """General plugin: put the stand's shims and the asked-for faults in place.

    Does nothing, and imports nothing, unless KVWITNESS_STAND=1. Idempotent: SGLang does not order its
    plugins, so `kvwitness.patches.entry` calls this before it wraps anything, and its hooks then see a
    fault as if SGLang itself behaved that way.

    Raises SystemExit on a fault that does not exist or on an SGLang that the shims do not fit. (SGLang
    logs an ordinary exception of a plugin and starts without the plugin, which on a stand would only
    crash later and less clearly.)
    """
    if not enabled():
        return
    from kvwitness.patches.stand import boot

    boot.install()
