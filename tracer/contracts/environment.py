"""What a Python has: which SGLang, whether it sees kvwitness, where journals would go. SGLang is not imported."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from kvwitness.patches.config import Config, ConfigError

_TIMEOUT_S: Final = 60
_LONGEST_COMPLAINT: Final = 120

# Runs in the Python that is examined, which may be as old as 3.8 and has nothing of ours.
_PROBE: Final = """
import importlib.util, json, sys
from importlib import metadata
if sys.path and sys.path[0] == "":
    del sys.path[0]  # what is installed counts, not what lies in the folder where doctor was called
def folder(name):
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        return None
    return list(spec.submodule_search_locations)[0] if spec and spec.submodule_search_locations else None
try:
    version = metadata.version("sglang")
except metadata.PackageNotFoundError:
    version = None
points = metadata.entry_points()
group = "sglang.srt.plugins"
points = points.select(group=group) if hasattr(points, "select") else points.get(group, ())
print("\\n" + json.dumps({
    "executable": sys.executable,
    "python": "%d.%d.%d" % sys.version_info[:3],
    "package": folder("sglang"),
    "version": version,
    "announced": any(point.value.startswith("kvwitness.patches.entry") for point in points),
    "importable": folder("kvwitness.patches") is not None,
}))
"""


class NoSuchPython(ValueError):
    """It is not a Python that can be run; the message says why."""


class PythonFacts(msgspec.Struct, frozen=True):
    """What a Python answered about itself."""

    executable: str
    python: str
    package: str | None
    """The folder of its sglang package."""
    version: str | None
    announced: bool
    """Whether kvwitness's plugin entry point is there for SGLang to load."""
    importable: bool
    """Whether ``kvwitness.patches`` can be imported there."""

    @property
    def plugin_visible(self) -> bool:
        return self.announced and self.importable


class JournalRoom(msgspec.Struct, frozen=True):
    """Where the journals would go, and whether they would fit."""

    directory: str | None
    """KVWITNESS_DIR; None when it is not set."""
    writable: bool = False
    free_bytes: int = 0
    quota_bytes: int = 0
    """Size of one process's journal."""
    problem: str = ""

    @property
    def journals(self) -> int:
        """How many journals fit."""
        return self.free_bytes // self.quota_bytes if self.quota_bytes else 0


def ask_python(executable: str) -> PythonFacts:
    """Ask a Python what it has. Raises :class:`NoSuchPython`."""
    try:
        done = subprocess.run(
            [executable, "-c", _PROBE], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        # The last line: a site's own start-up may print before it.
        return msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=PythonFacts)
    except OSError as error:
        raise NoSuchPython(f"no such Python ({error.strerror or error})") from error
    except subprocess.TimeoutExpired as error:
        raise NoSuchPython(f"it did not answer within {_TIMEOUT_S} s") from error
    except msgspec.MsgspecError as error:
        last = done.stderr.strip().rpartition("\n")[2]
        # Another program may repeat the whole question in its complaint.
        if not last or len(last) > _LONGEST_COMPLAINT:
            last = f"exit code {done.returncode}"
        raise NoSuchPython(f"not a Python that can be asked ({last})") from error


def journal_room(environ: Mapping[str, str]) -> JournalRoom:
    """Look at KVWITNESS_DIR and KVWITNESS_QUOTA_MB as the recorder would."""
    directory = environ.get("KVWITNESS_DIR")
    if not directory:
        return JournalRoom(None)
    try:
        quota = Config.from_environment(environ).quota_bytes
    except ConfigError as error:
        return JournalRoom(directory, problem=str(error))
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return JournalRoom(directory, False, free, quota, f"{place} is not a folder that can be written to")
    problem = "" if free >= quota else "not even one journal fits: free some space, or lower KVWITNESS_QUOTA_MB"
    return JournalRoom(directory, True, free, quota, problem)
