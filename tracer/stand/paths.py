"""A folder that, on PYTHONPATH, makes any SGLang load kvwitness: nothing is installed next to SGLang."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from importlib import metadata
from pathlib import Path

from kvwitness.tracer.stand.places import stand_home

PLUGINS_GROUP = "sglang.srt.plugins"
PLATFORMS_GROUP = "sglang.srt.platforms"
STAND_NAME = "kvwitness_cpu_stand"

_STAND_ENTRY_POINTS = {
    PLATFORMS_GROUP: {STAND_NAME: "kvwitness.patches.stand.entry:activate"},
    PLUGINS_GROUP: {STAND_NAME: "kvwitness.patches.stand.entry:plugin"},
}
_MAIN_ENTRY_POINTS = {PLUGINS_GROUP: {"kvwitness": "kvwitness.patches.entry:plugin"}}

# For SGLang before 0.5.11, which has no plugin group. kvwitness.patches may be out of reach of an interpreter
# (another user's, a broken link): that must not keep it from starting.
_SITECUSTOMIZE = """\
try:
    from kvwitness.patches.way_in import start
except ImportError:
    pass
else:
    start(__file__)
"""


def patches_folder() -> Path:
    """The folder of this installation's `kvwitness.patches`, found without importing it."""
    spec = importlib.util.find_spec("kvwitness.patches")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("kvwitness.patches is not part of this installation")
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def kvwitness_version() -> str:
    """The version of this installation, or 0 if it runs from a bare folder."""
    try:
        return metadata.version("kvwitness")
    except metadata.PackageNotFoundError:
        return "0"


def stand_path(folder: Path | None = None, *, stand: bool = False) -> Path:
    """Make the folder to put on the PYTHONPATH of an SGLang process, and return it. Idempotent.

    It holds `kvwitness/patches`, a link to this installation's, and the metadata of the distribution
    `kvwitness`, whose entry point SGLang (0.5.11 and newer) loads in each of its processes, and a
    `sitecustomize` that does the same for older releases (kvwitness.patches.way_in). With `stand`,
    also the metadata of `kvwitness-cpu-stand`, which makes the process a CPU stand where KVWITNESS_STAND=1.
    Only `patches` is linked, so that nothing which needs the tool's own dependencies can be imported there.

    Without `folder`, one under `stand_home()` is used that belongs to this installation alone: another
    checkout's servers keep finding their own.
    """
    patches, version = patches_folder(), kvwitness_version()
    if folder is None:
        identity = hashlib.sha256(f"{patches}\n{version}\n{stand}".encode()).hexdigest()[:16]
        folder = stand_home() / "paths" / identity
    (folder / "kvwitness").mkdir(parents=True, exist_ok=True)
    _link(folder / "kvwitness" / "patches", patches)
    _write_distribution(folder, "kvwitness", version, _MAIN_ENTRY_POINTS)
    _write(folder / "sitecustomize.py", _SITECUSTOMIZE)
    if stand:
        _write_distribution(folder, STAND_NAME, version, _STAND_ENTRY_POINTS)
    return folder


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and link.readlink() == target:
        return
    # By rename, so that a process which looks at this moment finds the old link or the new one.
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target, target_is_directory=True)
    fresh.replace(link)


def _write_distribution(folder: Path, name: str, version: str, entry_points: dict[str, dict[str, str]]) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    shown_name = name.replace("_", "-")
    _write(info / "METADATA", f"Metadata-Version: 2.1\nName: {shown_name}\nVersion: {version}\n")
    sections = (
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""])
        for group, points in entry_points.items()
    )
    _write(info / "entry_points.txt", "\n".join(sections))


def _write(path: Path, text: str) -> None:
    if path.is_file() and path.read_text() == text:
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
