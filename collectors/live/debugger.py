"""Which gdb goes into processes: where it is, what it is started with, and its version.

In this order: the one that ``KVWITNESS_GDB`` names, the one that pip installed beside kvwitness, the one on PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

GDB_VARIABLE: Final = "KVWITNESS_GDB"
GDB_PACKAGE: Final = "gdb-for-pwndbg"
INSTALL_GDB: Final = "pip install 'kvwitness[live]'"
KNOWS_AMX: Final = 14
"""From here on gdb asks the processor for the size of its registers. Before, it wrote back less than one with AMX has,
which the kernel refuses: 13.1 was seen to fail, and cuda-gdb 13.0, which is built from 14.2, to go in."""

_PROGRAM: Final = "gdb_for_pwndbg/_vendor/bin/gdb"
_DATA: Final = Path("share", "gdb")
_TOOL: Final = re.compile(r"(cuda-gdb|GNU gdb)\b.* (\d+(?:\.\d+)+)\S*$", re.MULTILINE)
_GNU: Final = re.compile(r"GNU gdb\b.* (\d+(?:\.\d+)+)\S*$", re.MULTILINE)
_VERSION_S: Final = 20.0


class NoGdb(Exception):
    """There is none that can be run; the message says why, and what would help."""

    def __init__(self, what: str, what_to_do: str) -> None:
        super().__init__(what)
        self.what = what
        self.what_to_do = what_to_do


class Gdb(msgspec.Struct, frozen=True):
    """A gdb that can be run."""

    command: tuple[str, ...]
    """The program, and the arguments that always stand first."""
    name: str
    """With its version, as ``gdb 18.1`` or ``cuda-gdb 13.0``."""
    version: tuple[int, ...] = ()
    """Of the GNU gdb that it is, or is built from; () where it does not say."""
    own: Mapping[str, str] = {}
    """Variables that it needs, which leave no other ``PYTHON...`` to it."""
    passed_over: str = ""
    """Why the package's gdb, which would have come first, cannot be run."""

    @property
    def shown(self) -> str:
        return f"{self.name} ({self.command[0]})"

    @property
    def knows_amx(self) -> bool:
        """Whether it can go into processes on a processor with AMX; where that is unknown it may try."""
        return not self.version or self.version[0] >= KNOWS_AMX

    @property
    def newer(self) -> str:
        """How one that can is had."""
        if self.passed_over:
            return f"{self.passed_over}; or name a newer one in {GDB_VARIABLE}"
        return f"{INSTALL_GDB} brings a newer one, or name one in {GDB_VARIABLE}"

    def environment(self) -> dict[str, str]:
        """The variables to start it with."""
        return _environment(self.own)


def find_gdb() -> Gdb:
    """The gdb to use. Raises :class:`NoGdb`."""
    named = os.environ.get(GDB_VARIABLE)
    if named:
        found = _ask((named,))
        if isinstance(found, Gdb):
            return found
        raise NoGdb(f"{named}, which {GDB_VARIABLE} names, cannot be run: {found}", f"name another in {GDB_VARIABLE}")
    passed_over = ""
    program = _packaged()
    if program is not None:
        command = (str(program), "--data-directory", str(program.parents[1] / _DATA))
        found = _ask(command, _own_python(program))
        if isinstance(found, Gdb):
            return found
        passed_over = _mend(found)
    on_path = shutil.which("gdb")
    found = _ask((on_path,)) if on_path is not None else ""
    if isinstance(found, Gdb):
        return msgspec.structs.replace(found, passed_over=passed_over)
    if found:
        raise NoGdb(f"{on_path} cannot be run: {found}", passed_over or f"install another: {INSTALL_GDB}")
    if passed_over:
        raise NoGdb("there is no gdb that can be run", passed_over)
    raise NoGdb("gdb is not installed", f"install it: {INSTALL_GDB}")


def _packaged() -> Path | None:
    """The program of :data:`GDB_PACKAGE` in the environment that kvwitness runs in."""
    try:
        files = metadata.files(GDB_PACKAGE) or ()
    except metadata.PackageNotFoundError:
        return None
    program = next((Path(str(file.locate())) for file in files if file.as_posix() == _PROGRAM), None)
    return program if program is not None and program.is_file() else None


def _own_python(program: Path) -> dict[str, str]:
    """What the Python inside the package's gdb needs, which is the one that runs kvwitness, as a shared library.

    The package's own start script looks for that library, too, but leaves a link to it in the environment.
    """
    configured = sysconfig.get_config_var("LIBDIR")
    libraries = [str(Path(sys.base_exec_prefix, "lib")), *([str(configured)] if configured else [])]
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([*dict.fromkeys(libraries), *([before] if before else [])]),
        "PYTHONHOME": os.pathsep.join([sys.base_prefix, sys.base_exec_prefix]),
        "PYTHONPATH": str(program.parents[3]),
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not own or not name.startswith("PYTHON")}
    return {**kept, **own}


def _ask(command: tuple[str, ...], own: Mapping[str, str] | None = None) -> Gdb | str:
    """The gdb that ``command`` starts, or why it starts none."""
    own = own or {}
    try:
        done = subprocess.run(
            [*command, "-nx", "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_S,
            check=False,
            env=_environment(own),
        )
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return f"it did not say its version within {_VERSION_S:.0f} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    tool, gnu = _TOOL.search(done.stdout), _GNU.search(done.stdout)
    name = f"{tool[1].removeprefix('GNU ')} {tool[2]}" if tool else "gdb"
    return Gdb(command, name, tuple(map(int, gnu[1].split("."))) if gnu else (), own)


def _mend(why: str) -> str:
    """What would make the package's gdb run, which says ``why`` it does not."""
    library = re.search(r"libpython(\d+\.\d+)\S*", why)
    if library is None:
        return f"that of {GDB_PACKAGE} cannot be run ({why}): install it again"
    return (
        f"that of {GDB_PACKAGE} needs this Python's shared library {library[0].rstrip(':')}: install it "
        f"(Debian, Ubuntu: apt-get install libpython{library[1]})"
    )
