"""Order of SGLang releases."""

from __future__ import annotations

import re
from importlib import metadata

# The first release that the stand enters by SGLang's plugins alone: with an out-of-tree platform of its
# own. Older ones ask such a platform for classes of memory pools (from 0.5.12), or have no plugins
# (before 0.5.11), and are entered while the interpreter starts: kvwitness.patches.stand.boot.
ENTERED_BY_PLUGIN_FROM = "0.5.23"


def order(release: str) -> tuple[int, ...]:
    """A key that sorts releases: 0.5.12 before 0.5.12.post1 before 0.5.13."""
    return tuple(int(number) for number in re.findall(r"\d+", release))


def running() -> str:
    """The SGLang release of this environment, without importing it. One that is not installed but run from
    a bare folder is taken to be the newest that the stand knows."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ENTERED_BY_PLUGIN_FROM


def entered_by_plugin(release: str) -> bool:
    """Whether the stand's own plugins are its way into `release`."""
    return order(release) >= order(ENTERED_BY_PLUGIN_FROM)
