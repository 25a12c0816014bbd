"""``kvwitness doctor``: what it says about wheels and Pythons, its exit codes, its errors."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
from contracts.packages import VERSION, make_folder, make_wheel, modules_like
from gdb_tools import saying_gdb

from cli.conftest import Command
from kvwitness.collectors.live import preflight
from kvwitness.patches.hooks import all_hooks
from kvwitness.tracer.contracts.facts import read_facts
from kvwitness.tracer.stand.paths import stand_path

LOADING_CHECK = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.loading_check"


def modules(changed: dict[str, str] | None = None) -> dict[str, str]:
    """A package with the hooked functions of SGLang 0.5.23, but for ``changed``."""
    facts = read_facts(Path(__file__).parents[1] / "contracts" / "signatures" / "0.5.23.json")
    return modules_like(facts, all_hooks(), changed)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python with an sglang of its own, which would raise if it were imported."""
    site = tmp_path / "site"
    make_folder(site, modules())
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{site}:$EXTRA" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


def test_a_wheel_that_fits(kvwitness: Command, tmp_path: Path) -> None:
    result = kvwitness("doctor", "--wheel", make_wheel(tmp_path, modules()))
    assert result.exit_code == 0, result.output
    assert f"sglang {VERSION}" in result.output and "UnifiedRadixCache" in result.output
    for claim in ("L1 read", "L2 read", "L3 read"):
        assert f"{claim}: can be confirmed\n" in result.output
    assert "NO" not in result.output


def test_a_hook_with_another_signature_names_the_lost_link(kvwitness: Command, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, modules({LOADING_CHECK: "(self, queue)"}))
    result = kvwitness("doctor", "--wheel", wheel)
    assert result.exit_code == 1
    assert "L2 read: cannot be confirmed (no proof of read)" in result.output
    assert "L1 read: can be confirmed" in result.output
    assert "tree.loading_check: new required parameters: queue" in result.output

    document = json.loads(kvwitness("doctor", "--wheel", wheel, "--json").stdout)
    assert document["ok"] is False
    (package,) = document["packages"]
    fits = {hook["fit"] for hook in package["hooks"] if hook["target"] == LOADING_CHECK}
    assert fits == {"unknown_signature"}
    tree = next(tree for tree in package["support"]["trees"] if tree["tree"] == "UnifiedRadixCache")
    assert {link["link"] for link in tree["links"] if not link["provable"]} == {"read"}


def test_one_bad_wheel_of_several_decides_the_exit_code(kvwitness: Command, tmp_path: Path) -> None:
    good = make_wheel(tmp_path, modules(), "1.0")
    bad = make_wheel(tmp_path, modules({LOADING_CHECK: ""}), "2.0")
    result = kvwitness("doctor", "--wheel", good, "--wheel", bad)
    assert result.exit_code == 1
    assert "sglang 1.0" in result.output and "sglang 2.0" in result.output


def test_a_python_is_asked_without_importing_sglang(
    kvwitness: Command, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVWITNESS_DIR", raising=False)
    result = kvwitness("doctor", "--python", python)
    assert result.exit_code == 0, result.output
    assert str(python.parent / "site" / "sglang") in result.output
    assert "KVWITNESS_DIR is not set" in result.output


def test_the_python_of_the_shell_is_the_default(
    kvwitness: Command, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(python.parent), prepend=":")
    result = kvwitness("doctor", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["python"]["version"] == VERSION


def test_whether_the_plugin_is_visible(
    kvwitness: Command, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTRA", str(stand_path(tmp_path / "way-in")))
    facts = json.loads(kvwitness("doctor", "--python", python, "--json").stdout)["python"]
    assert facts["announced"] and facts["importable"]
    assert "kvwitness plugin: installed" in kvwitness("doctor", "--python", python).output


def test_what_would_go_into_a_server_of_this_python(
    kvwitness: Command, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = saying_gdb(tmp_path / "old", version="GNU gdb (Debian 13.1-3) 13.1")
    monkeypatch.setenv("KVWITNESS_GDB", str(old))
    monkeypatch.setattr(preflight, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags : fpu\n")
    assert f"attach --live: by gdb 13.1 ({old})" in kvwitness("doctor", "--python", python).output
    (tmp_path / "cpuinfo").write_text("flags : fpu amx_tile\n")
    result = kvwitness("doctor", "--python", python)
    assert result.exit_code == 0 and "gdb 14 and newer can: pip install 'kvwitness[live]'" in result.output
    gdb = json.loads(kvwitness("doctor", "--python", python, "--json").stdout)["gdb"]
    assert gdb["gdb"] == f"gdb 13.1 ({old})" and "AMX" in gdb["problem"]


def test_where_the_journals_would_go(
    kvwitness: Command, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWITNESS_DIR", str(tmp_path / "not" / "yet"))
    monkeypatch.setenv("KVWITNESS_QUOTA_MB", "2")
    journals = json.loads(kvwitness("doctor", "--python", python, "--json").stdout)["journals"]
    assert journals["writable"] and journals["quota_bytes"] == 2 << 20 and not journals["problem"]
    assert "journals of 2 MiB fit" in kvwitness("doctor", "--python", python).output

    monkeypatch.setenv("KVWITNESS_QUOTA_MB", str(1 << 30))
    assert "not even one journal fits" in kvwitness("doctor", "--python", python).output

    monkeypatch.setenv("KVWITNESS_QUOTA_MB", "lots")
    assert "give a whole number of MiB" in kvwitness("doctor", "--python", python).output

    monkeypatch.setenv("KVWITNESS_QUOTA_MB", "2")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVWITNESS_DIR", str(tmp_path / "file"))
    assert "not a folder that can be written to" in kvwitness("doctor", "--python", python).output


def test_a_python_of_the_shell_that_does_not_run_is_passed_over(
    kvwitness: Command, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "shims" / "python"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(shim.parent), prepend=":")
    monkeypatch.setattr(sys, "executable", str(python))
    result = kvwitness("doctor")
    assert result.exit_code == 0, result.output


def error_of(kvwitness: Command, *args: object) -> str:
    result = kvwitness("doctor", *args)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr.count("\n") == 1
    return result.stderr


def test_bad_input_is_one_line(kvwitness: Command, tmp_path: Path) -> None:
    text = tmp_path / "text.whl"
    text.write_text("no archive")
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/__init__.py", "")
    assert "not a wheel" in error_of(kvwitness, "--wheel", text)
    assert "no such file" in error_of(kvwitness, "--wheel", tmp_path / "absent.whl")
    assert "no sglang inside" in error_of(kvwitness, "--wheel", other)
    assert "no such Python" in error_of(kvwitness, "--python", tmp_path / "nowhere" / "python")
    assert "can be asked" in error_of(kvwitness, "--python", "/bin/false")
    assert "exclude each other" in error_of(kvwitness, "--python", "/bin/false", "--wheel", text)


def test_a_python_without_sglang(kvwitness: Command, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    assert "no sglang inside" in error_of(kvwitness, "--python", bare)
