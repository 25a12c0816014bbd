"""The transfer functions and the shims, in the stand's own Python: this one has neither torch nor SGLang."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvwitness.tracer.stand.environment import StandEnvironment
from kvwitness.tracer.stand.paths import stand_path

pytestmark = [pytest.mark.stand, pytest.mark.timeout(600)]


def run_in_stand(environment: StandEnvironment, *argv: str, **env: str) -> str:
    own = {"PYTHONPATH": str(stand_path(stand=True)), "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    done = subprocess.run([str(environment.python), *argv], env=os.environ | own | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_transfer_function_moves_what_its_layout_says(stand_environment: StandEnvironment) -> None:
    out = run_in_stand(stand_environment, str(Path(__file__).with_name("check_copies.py")))

    for check in (
        "direct page_first_direct",
        "kernel page_head",
        "kernel mla page_first",
        "empty index",
        "rows of nothing",
    ):
        assert check in out


def test_page_kernels_and_rotation_do_what_theirs_do(stand_environment: StandEnvironment) -> None:
    out = run_in_stand(stand_environment, str(Path(__file__).with_name("check_pages.py")))

    assert out == "pages and rotation agree\n"


# Run where SGLang is: every transfer function that SGLang's host pools name is there after the plugin.
FIND_MISSING = """
import types
from kvwitness.patches.stand import entry, shims

entry.plugin()
entry.plugin()

def names(code):
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names(constant)

called = set()
for module in shims.host_pool_modules():
    source = compile(open(module.__file__).read(), module.__file__, "exec")
    for name in set(names(source)):
        # The names for Ascend devices come from a package of their own.
        if name.startswith("transfer_kv_") and name != "transfer_kv_dim_exchange":
            called.add(name)
            assert hasattr(module, name), (module.__name__, name)
print(len(called))
"""


def test_no_transfer_function_is_missing(stand_environment: StandEnvironment) -> None:
    assert int(run_in_stand(stand_environment, "-c", FIND_MISSING, KVWITNESS_STAND="1")) == 15


PLATFORM = """
from sglang.srt.platforms import current_platform
print(type(current_platform).__name__, current_platform.is_pin_memory_available())
"""


def test_platform_is_the_stand_only_when_asked(stand_environment: StandEnvironment) -> None:
    assert run_in_stand(stand_environment, "-c", PLATFORM, KVWITNESS_STAND="1") == "StandPlatform False\n"
    assert "StandPlatform" not in run_in_stand(stand_environment, "-c", PLATFORM, KVWITNESS_STAND="0")
