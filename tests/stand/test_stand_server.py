"""A real SGLang 0.5.23 on the stand. What is asserted of prompts is SGLang's own report and its tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from stand_fixtures import StartServer, play_story

from kvwitness.tracer.stand.environment import StandEnvironment
from kvwitness.tracer.stand.server import StandServerError

pytestmark = [pytest.mark.stand, pytest.mark.timeout(900)]

# 1,500 shared tokens in whole pages of 16, but for the page that the differing tokens end.
PREFIX_TOKENS = 1488


def test_prefix_comes_back_from_the_host(start_server: StartServer) -> None:
    server = start_server()
    story = play_story(server.url)

    assert story.a.cached_tokens == 0
    assert (story.b.device_tokens, story.b.host_tokens) == (PREFIX_TOKENS, 0)
    assert (story.c.device_tokens, story.c.host_tokens) == (0, PREFIX_TOKENS)
    assert story.c.tokens == story.a.tokens
    assert story.b.tokens != story.a.tokens, "the model must tell these prompts apart"

    assert len(server.scheduler_pids()) == 1
    tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    server.stop()
    assert [process for process in tree if runs(process)] == []


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_zeroed_copies_show_in_the_tokens(start_server: StartServer) -> None:
    story = play_story(start_server(faults="copy-zero:h2d").url)

    assert story.c.host_tokens == PREFIX_TOKENS, "SGLang believes that it loaded the prefix"
    assert story.c.tokens != story.a.tokens


def test_unknown_fault_stops_a_server_at_once(start_server: StartServer) -> None:
    # Past the check on the tool's side, as someone who sets the variable by hand would be.
    with pytest.raises(StandServerError) as caught:
        start_server(extra_env={"KVWITNESS_STAND_FAULT": "copy-explode"})

    assert "unknown fault 'copy-explode'" in str(caught.value)


def test_a_killed_run_leaves_no_server_behind(tmp_path: Path, stand_environment: StandEnvironment) -> None:
    script = """
import sys
from pathlib import Path
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.progress import SilentProgress
from kvwitness.tracer.stand.server import StandServer
quiet = SilentProgress()
environment = ensure_environment(quiet)
with StandServer(environment, ensure_model(environment, quiet), workdir=Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    sys.stdin.read()
"""
    run = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(tree, timeout=30)
    assert [process for process in alive if runs(process)] == []
