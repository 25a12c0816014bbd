"""The releases that the page of supported releases is made from, and how their wheels are had."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

RELEASES: Final = (
    "0.4.6.post5",
    "0.4.7",
    "0.4.8",
    "0.4.9.post6",
    "0.4.10.post2",
    "0.5.0rc2",
    "0.5.1",
    "0.5.2",
    "0.5.3",
    "0.5.4",
    "0.5.5",
    "0.5.6.post2",
    "0.5.7",
    "0.5.8",
    "0.5.9",
    "0.5.10.post1",
    "0.5.11",
    "0.5.12.post1",
    "0.5.13",
    "0.5.14",
    "0.5.15",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)
"""One of each minor release. There is no 0.5.0 but its candidates."""

_WHEEL_OF: Final = ("--python-version=3.11", "--platform=manylinux_2_34_x86_64", "--platform=any")
"""From 0.5.11 on wheels are per Python and platform. Their Python files are the same."""


def wheel_cache() -> Path:
    """Where wheels are kept: outside every checkout, so that each is downloaded once for a machine."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvwitness" / "wheels"


def find_wheel(version: str, folder: Path) -> Path | None:
    """The wheel of a release in ``folder``."""
    return next(iter(sorted(folder.glob(f"sglang-{version}-*.whl"))), None)


def download(version: str, folder: Path) -> None:
    """Have pip put the wheel of a release into ``folder``, without what it depends on."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    what = ["--no-deps", "--only-binary=:all:", *_WHEEL_OF, f"--dest={folder}", f"sglang=={version}"]
    subprocess.run([*pip, *what], check=True)


def version_key(version: str) -> tuple[tuple[int, ...], int, int]:
    """For sorting: candidates before their release, posts after it."""
    match = re.fullmatch(r"([\d.]+?)(?:\.?(rc|post)(\d+))?", version)
    if match is None:
        return (), 0, 0
    numbers = tuple(int(part) for part in match[1].split("."))
    return numbers, {"rc": -1, None: 0, "post": 1}[match[2]], int(match[3] or 0)
