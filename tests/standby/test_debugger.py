"""Which gdb is taken, in which order, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from gdb_tools import saying_gdb

from kvwitness.collectors.live import debugger, preflight
from kvwitness.collectors.live.debugger import NoGdb, find_gdb
from kvwitness.collectors.live.preflight import look_for_gdb

NO_LIBRARY = "gdb: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared object file"


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what a test puts there."""
    monkeypatch.delenv("KVWITNESS_GDB", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/path")


def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, then: str = "exit 1", **options: str) -> Path:
    """A package whose gdb is a script."""
    folder = tmp_path / "site" / "gdb_for_pwndbg" / "_vendor" / "bin"
    path = saying_gdb(folder, then=then, **options)
    monkeypatch.setattr(debugger, "_packaged", lambda: path)
    return path


def broken(path: Path) -> None:
    path.write_text(f"#!/bin/sh\necho '{NO_LIBRARY}' >&2\nexit 127\n")


def test_the_named_one_then_the_packages_then_the_one_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = saying_gdb(tmp_path / "named", version="GNU gdb (GDB) 17.2")
    on_path = saying_gdb(tmp_path / "path", version="GNU gdb (GDB) 15.1")
    package = packaged(monkeypatch, tmp_path)
    monkeypatch.setenv("KVWITNESS_GDB", str(named))
    assert find_gdb().command == (str(named),) and find_gdb().name == "gdb 17.2"
    monkeypatch.delenv("KVWITNESS_GDB")
    assert find_gdb().command[0] == str(package) and find_gdb().version == (18, 1)
    monkeypatch.setattr(debugger, "_packaged", lambda: None)
    assert find_gdb().command == (str(on_path),) and find_gdb().passed_over == ""


@pytest.mark.parametrize(
    ("says", "name", "version"),
    [
        ("GNU gdb (GDB) 18.1", "gdb 18.1", (18, 1)),
        ("GNU gdb (Debian 13.1-3) 13.1", "gdb 13.1", (13, 1)),
        ("GNU gdb (Ubuntu 12.1-0ubuntu1~22.04.2) 12.1", "gdb 12.1", (12, 1)),
        ("GNU gdb (GDB) Red Hat Enterprise Linux 10.2-11.el9", "gdb 10.2", (10, 2)),
        (
            "exec: /usr/local/cuda/bin/cuda-gdb-python3.12-tui -nx --version\nNVIDIA (R) cuda-gdb 13.0\n"
            "Portions Copyright (C) 2007-2025 NVIDIA Corporation\nBased on GNU gdb 14.2",
            "cuda-gdb 13.0",
            (14, 2),
        ),
        ("something else", "gdb", ()),
    ],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, name: str, version: tuple[int, ...]
) -> None:
    monkeypatch.setenv("KVWITNESS_GDB", str(saying_gdb(tmp_path / "named", version=says)))
    found = find_gdb()
    assert (found.name, found.version) == (name, version)


def test_the_packages_gdb_leaves_the_users_python_settings_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/home/user/own")
    monkeypatch.setenv("PYTHONINSPECT", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/libraries")
    package = packaged(monkeypatch, tmp_path)
    found = find_gdb()
    environment = found.environment()
    assert found.command[1:] == ("--data-directory", str(package.parents[1] / "share" / "gdb"))
    assert environment["PYTHONPATH"] == str(tmp_path / "site") and "PYTHONINSPECT" not in environment
    assert environment["PYTHONHOME"].split(":")[0] == sys.base_prefix
    assert environment["LD_LIBRARY_PATH"].endswith(":/opt/libraries")


def test_a_package_that_lacks_this_pythons_library_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(packaged(monkeypatch, tmp_path))
    with pytest.raises(NoGdb) as none:
        find_gdb()
    assert "apt-get install libpython3.11" in none.value.what_to_do
    old = saying_gdb(tmp_path / "path", version="GNU gdb (Debian 13.1-3) 13.1")
    assert find_gdb().command == (str(old),)
    (tmp_path / "cpuinfo").write_text("flags : amx_tile\n")
    monkeypatch.setattr(preflight, "_CPUINFO", tmp_path / "cpuinfo")
    found = look_for_gdb()
    assert found.gdb == f"gdb 13.1 ({old})" and "gdb 14 and newer can" in found.problem
    assert "apt-get install libpython3.11" in found.what_to_do and "KVWITNESS_GDB" in found.what_to_do


def test_none_and_ones_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(debugger, "_packaged", lambda: None)
    found = look_for_gdb()
    assert (found.gdb, found.problem) == ("", "gdb is not installed") and "kvwitness[live]" in found.what_to_do
    broken(saying_gdb(tmp_path / "path"))
    with pytest.raises(NoGdb, match=r"path/gdb cannot be run: .*libpython"):
        find_gdb()
    monkeypatch.setenv("KVWITNESS_GDB", "/nowhere/gdb")
    with pytest.raises(NoGdb, match="/nowhere/gdb, which KVWITNESS_GDB names, cannot be run: No such file"):
        find_gdb()


def test_the_real_package_reads_no_configuration_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its program, started as the product starts it, by a user with settings of every kind; it writes nothing."""
    try:
        metadata.distribution(debugger.GDB_PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{debugger.GDB_PACKAGE} has no wheel for this platform")
    for name in (".gdbinit", ".gdbearlyinit", ".config/gdb/gdbinit", ".config/gdb/gdbearlyinit"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("shell echo READ\n")
    (tmp_path / "gdb.py").write_text("print('READ')\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = find_gdb()
    if debugger.GDB_PACKAGE in found.passed_over:
        pytest.skip(found.passed_over)
    command = [*found.command, "-nx", "-q", "-batch", "-ex", "python print('Python of', gdb.VERSION)"]
    done = subprocess.run(command, env=found.environment(), capture_output=True, text=True, check=False)
    assert found.version >= (18, 1)
    assert done.stdout.strip() == f"Python of {'.'.join(map(str, found.version))}" and done.stderr == ""
    assert sorted(tmp_path.rglob("*")) == before
