"""Releases older than the newest: what is known of each, their environments, and how the stand gets in."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvwitness.patches.stand import releases, shims
from kvwitness.tracer.stand import environment as env_module
from kvwitness.tracer.stand.environment import ensure_environment, environment_root, pins_text, venv_python
from kvwitness.tracer.stand.progress import Progress, SilentProgress
from kvwitness.tracer.stand.releases import NEWEST, RELEASES, UnsupportedError, known_release
from kvwitness.tracer.stand.server import ServerOptions

OLDER = [name for name in RELEASES if name != NEWEST]


def pins(release: str) -> dict[str, str]:
    return dict(line.split("==") for line in pins_text(release).splitlines())


@pytest.mark.parametrize("release", OLDER)
def test_pins_of_an_older_release_are_only_what_it_has_of_its_own(release: str) -> None:
    own, shared = pins(release), pins(NEWEST)

    assert own["sglang"] == release
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in own)
    assert not [name for name in own if shared.get(name) == own[name]]
    assert "torch" not in own


def test_releases_are_in_order_and_a_release_is_asked_for_by_its_exact_name() -> None:
    assert list(RELEASES) == sorted(RELEASES, key=releases.order, reverse=True)
    assert releases.order("0.5.12") < releases.order("0.5.12.post1") < releases.order("0.5.13")
    with pytest.raises(UnsupportedError, match=r"0\.5\.12 \(it runs .*0\.5\.12\.post1"):
        known_release("0.5.12")
    with pytest.raises(UnsupportedError):
        environment_root("0.5")


def test_stand_enters_by_plugin_only_where_a_platform_of_its_own_is_enough() -> None:
    assert [name for name in RELEASES if releases.entered_by_plugin(name)] == [NEWEST]


def test_flags_are_those_that_a_release_has() -> None:
    def flags(release: str) -> set[str]:
        return {part for part in ServerOptions().arguments(known_release(release)) if part.startswith("--")}

    newest = flags(NEWEST)
    assert newest - flags("0.4.9.post6") == {"--hicache-mem-layout"}
    assert flags("0.4.10.post2") == flags("0.5.17") == newest
    assert flags("0.5.6.post2") - newest == {"--prefill-attention-backend", "--decode-attention-backend"}


@pytest.mark.parametrize(
    ("release", "options"),
    [
        ("0.4.9.post6", ServerOptions(mem_layout="page_first")),
        ("0.4.10.post2", ServerOptions(mem_layout="page_first_direct")),
        ("0.5.14", ServerOptions(tree_core="rust")),
    ],
)
def test_choice_that_a_release_does_not_have_is_refused(release: str, options: ServerOptions) -> None:
    with pytest.raises(UnsupportedError, match=release):
        options.arguments(known_release(release))


def test_older_release_needs_all_that_a_newer_one_needs() -> None:
    oldest_first = sorted(RELEASES, key=releases.order)
    for older, newer in itertools.pairwise(oldest_first):
        assert set(shims.shims_of(newer)) <= set(shims.shims_of(older))
        assert {id(one) for one in shims.stand_ins_of(newer)} <= {id(one) for one in shims.stand_ins_of(older)}
    names = {name: {shim.change.__name__ for shim in shims.shims_of(name)} for name in RELEASES}
    every_release = {"provide_transfer_functions", "never_pin", "absorb_mla"}
    assert names[NEWEST] == every_release
    assert names["0.5.17"] == every_release | {"use_cpu_streams", "allocate_pages_in_torch"}
    assert not shims.stand_ins_of(NEWEST)


class FakePip:
    """Notes which release is installed, in order."""

    def __init__(self) -> None:
        self.installed: list[str] = []

    def __call__(self, venv: Path, pins_file: Path, log: Path, progress: Progress) -> None:
        self.installed += re.findall(r"^sglang==(.*)$", pins_file.read_text(), re.MULTILINE)
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").touch()


def test_environment_of_an_older_release_builds_the_shared_one_first_and_once(tmp_path: Path) -> None:
    pip = FakePip()
    first = ensure_environment(SilentProgress(), release="0.5.17", home=tmp_path, install=pip)
    ensure_environment(SilentProgress(), release="0.5.8", home=tmp_path, install=pip)
    ensure_environment(SilentProgress(), release="0.5.17", home=tmp_path, install=pip)

    assert pip.installed == [NEWEST, "0.5.17", "0.5.8"]
    assert first.shared is not None and first.shared.root == environment_root(NEWEST, tmp_path)
    assert first.root != first.shared.root and first.torch_extensions != first.shared.torch_extensions


def test_shared_environment_is_part_of_an_older_releases_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = {name: environment_root(name, tmp_path) for name in RELEASES}
    real = pins_text
    monkeypatch.setattr(env_module, "pins_text", lambda name=NEWEST: real(name) + ("a==1\n" if name == NEWEST else ""))

    assert not [name for name in RELEASES if environment_root(name, tmp_path) == before[name]]


def test_environment_without_its_interpreter_is_built_again(tmp_path: Path) -> None:
    pip = FakePip()
    built = ensure_environment(SilentProgress(), release="0.5.8", home=tmp_path, install=pip)
    venv_python(built.root).unlink()
    ensure_environment(SilentProgress(), release="0.5.8", home=tmp_path, install=pip)

    assert pip.installed == [NEWEST, "0.5.8", "0.5.8"]


def run_pth_line(tmp_path: Path, stand: str, boot: str) -> subprocess.CompletedProcess[str]:
    """Start an interpreter whose site-packages has the stand's .pth line, and whose `boot` is `boot`."""
    package = tmp_path / "path" / "kvwitness" / "patches" / "stand"
    package.mkdir(parents=True)
    (package / "boot.py").write_text(boot)
    site = tmp_path / "site"
    site.mkdir()
    (site / "kvwitness_stand.pth").write_text(env_module._ENTER_THE_STAND)
    return subprocess.run(
        [sys.executable, "-S", "-c", f"import site; site.addsitedir({str(site)!r}); print('running')"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "path"), "KVWITNESS_STAND": stand},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("stand", "expected"), [("1", "entered\nrunning\n"), ("0", "running\n"), ("", "running\n")])
def test_pth_line_acts_on_a_stand_alone(tmp_path: Path, stand: str, expected: str) -> None:
    done = run_pth_line(tmp_path, stand, "def from_pth():\n    print('entered')\n")

    assert (done.stdout, done.stderr) == (expected, "")


def test_process_that_cannot_be_a_stand_ends_at_once_and_says_why() -> None:
    script = "from kvwitness.patches.stand.boot import from_pth; from_pth(); print('running')"
    wrong = {"KVWITNESS_STAND": "1", "KVWITNESS_STAND_FAULT": "copy-explode"}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | wrong, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"kvwitness stand: .*unknown fault 'copy-explode'.*\n", done.stderr)
