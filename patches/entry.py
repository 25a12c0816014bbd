"""The entry point that SGLang (0.5.11 and newer) loads in every one of its processes.

Off means off: without ``KVWITNESS_DIR`` this module returns before it imports anything else.
"""

import os


def plugin() -> None:
    """Called by ``sglang.srt.plugins.load_plugins``. Never raises, never changes SGLang's behaviour."""
    if not os.environ.get("KVWITNESS_DIR"):
        return
    if os.environ.get("KVWITNESS_STAND"):
        # The stand's faults belong to the server that is observed: they go below our hooks.
        from kvwitness.patches.stand.entry import plugin as stand

        stand()
    from kvwitness.patches.install import install

    install()
