"""The processes of one start of a server share an id; two starts do not, whoever starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kvwitness.patches.config import Config, Faults
from kvwitness.patches.instance import describe_process
from kvwitness.patches.start import (
    INHERITED,
    VARIABLE,
    begin_launch,
    given_id,
    host_id,
    is_id,
    key_id,
    new_id,
    start_id,
)
from kvwitness.patches.witness import Witness
from kvwitness.tracer.cli.serve import child_environment
from kvwitness.tracer.ledger.described import Process, read_as

ENGINE = """
import multiprocessing
import os
import subprocess
import sys

from kvwitness.patches.start import start_id

def _set_envs_and_config(server_args):
    pass

def tell(queue):
    queue.put(start_id())

def control(queue, method):
    # A controller of data-parallel ranks, which starts the schedulers itself.
    _start(queue, method)

def _start(queue, method):
    child = multiprocessing.get_context(method).Process(target=tell, args=(queue,))
    child.start()
    child.join()

def _launch_subprocesses(late=None):
    _set_envs_and_config(None)
    if late is not None:
        late()
    found = [start_id()]
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        _start(queue, method)
        controller = context.Process(target=control, args=(queue, method))
        controller.start()
        controller.join()
        found += [queue.get(), queue.get()]
    return found
"""


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    """A folder with a package that launches as SGLang does."""
    folder = tmp_path / "site" / "sglang" / "srt" / "entrypoints"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (folder / "engine.py").write_text(ENGINE)
    return tmp_path / "site"


def run(site: Path, program: str, **environ: str) -> Any:
    """What a program of its own prints, as JSON; kvwitness is on."""
    path = site / "program.py"
    path.write_text(textwrap.dedent(program))
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("KVWITNESS_", "_KVWITNESS_"))}
    env = {**rest, "PYTHONPATH": str(site), "KVWITNESS_DIR": str(site / "data"), **environ}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


SERVER = """
import json
from kvwitness.patches.entry import plugin

if __name__ == "__main__":
    plugin()
    from sglang.srt.entrypoints.engine import _launch_subprocesses
    print(json.dumps(_launch_subprocesses()))
"""

TWICE = """
import json
from kvwitness.patches.entry import plugin

if __name__ == "__main__":
    plugin()
    from sglang.srt.entrypoints.engine import _launch_subprocesses
    print(json.dumps([_launch_subprocesses(), _launch_subprocesses()]))
"""

LATE = """
import json
from kvwitness.patches.entry import plugin

if __name__ == "__main__":
    from sglang.srt.entrypoints.engine import _launch_subprocesses
    print(json.dumps(_launch_subprocesses(late=plugin)))
"""


def test_all_processes_of_one_launch_share_an_id(sglang: Path) -> None:
    found = run(sglang, SERVER)
    assert len(found) == 5 and len(set(found)) == 1 and is_id(found[0])


def test_two_launches_have_two_ids(sglang: Path) -> None:
    first, second = run(sglang, SERVER), run(sglang, SERVER)
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]


def test_two_launches_of_one_process_have_two_ids(sglang: Path) -> None:
    first, second = run(sglang, TWICE)
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]


def test_a_launch_that_loads_its_plugins_late_is_one_too(sglang: Path) -> None:
    assert len(set(run(sglang, LATE))) == 1


def test_a_supervisor_that_loads_kvwitness_starts_two(sglang: Path) -> None:
    """It restarts a server with the same environment; it is an ancestor of both, and alive."""
    (sglang / "server.py").write_text(textwrap.dedent(SERVER))
    found = run(
        sglang,
        f"""
        import json, os, subprocess, sys
        from kvwitness.patches.entry import plugin

        plugin()
        import sglang.srt.entrypoints.engine
        starts = [subprocess.run([sys.executable, {str(sglang / "server.py")!r}], stdout=-1, check=True) for _ in "12"]
        print(json.dumps([*(json.loads(s.stdout) for s in starts), {INHERITED!r} in os.environ]))
        """,
    )
    first, second, marked = found
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]
    assert not marked


def test_a_server_that_a_server_starts_is_another_one(sglang: Path) -> None:
    (sglang / "server.py").write_text(textwrap.dedent(SERVER))
    outer, inner = run(
        sglang,
        f"""
        import json, subprocess, sys
        from kvwitness.patches.entry import plugin

        if __name__ == "__main__":
            plugin()
            from sglang.srt.entrypoints.engine import _launch_subprocesses
            outer = _launch_subprocesses()
            inner = subprocess.run([sys.executable, {str(sglang / "server.py")!r}], stdout=-1, check=True)
            print(json.dumps([outer, json.loads(inner.stdout)]))
        """,
    )
    assert len(set(outer)) == len(set(inner)) == 1 and outer[0] != inner[0]


def test_what_is_left_of_another_process_does_not_count(sglang: Path) -> None:
    """Its maker is no ancestor, has ended, or its number was given to another process since."""
    left: dict[str, str] = {}
    begin_launch(left)
    mine = start_id(left)
    assert mine == start_id(left) == left[INHERITED].split(":")[0]
    found, pid, since = left[INHERITED].split(":")
    for text in (
        f"{found}:{os.getppid()}:{int(since) + 1}",
        f"{found}:{pid}:{int(since) + 1}",
        f"{found}:1:0",
        f"{found}:{pid}",
        f"{found}:nobody:{since}",
        f"no id:{pid}:{since}",
        "",
    ):
        other = start_id({INHERITED: text})
        assert is_id(other) and other != mine, text
    ended = run(
        sglang,
        """
        import json, os
        from kvwitness.patches.start import begin_launch

        begin_launch()
        print(json.dumps(os.environ["_KVWITNESS_STARTED_BY"]))
        """,
    )
    assert start_id({INHERITED: ended}) != ended.split(":")[0]


def test_nothing_inherited_is_an_id_of_its_own() -> None:
    assert start_id({}) != start_id({})


def test_the_users_text_wins_on_every_host_alike(sglang: Path) -> None:
    first, second = (set(run(sglang, SERVER, **{VARIABLE: "run 7"})) for _ in range(2))
    assert first == second == {given_id({VARIABLE: "run 7"})}
    assert is_id(given_id({VARIABLE: "x" * 5000 + "\n\udce9"}))
    assert given_id({VARIABLE: "run 8"}) != given_id({VARIABLE: "run 7"})
    assert given_id({VARIABLE: ""}) is None is given_id({})


def test_serve_passes_on_the_users_text_and_no_other_servers_id(tmp_path: Path) -> None:
    outer = {INHERITED: f"{new_id()}:1:1", VARIABLE: "run 7"}
    found = child_environment(outer, tmp_path, tmp_path)
    assert INHERITED not in found and found[VARIABLE] == "run 7"


def test_host_and_key_are_told_apart_and_not_told() -> None:
    key, other = b"k" * 32, b"o" * 32
    assert host_id("node-1", key) == host_id("node-1", key)
    assert len({host_id("node-1", key), host_id("node-2", key), host_id("node-1", other), key_id(key)}) == 4
    assert key_id(key) == key_id(key) != key_id(other)
    assert all(is_id(text) for text in (host_id("node-1", key), key_id(key), new_id()))
    assert not any(is_id(text) for text in ("", "0" * 15, "0" * 17, "G" * 16, 7, None))


def test_a_process_says_all_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "a-host-with-a-name")
    w = Witness(Config(tmp_path, 4 << 20, Faults()))
    w.open("scheduler")
    facts = describe_process(w, "scheduler", object(), start="0123456789abcdef")
    told = read_as(Process, facts)
    assert told.start == "0123456789abcdef"
    assert (told.host, told.key) == (host_id("a-host-with-a-name", w.digest_key), key_id(w.digest_key))
    assert "a-host-with-a-name" not in json.dumps(facts)
    assert is_id(describe_process(w, "scheduler", object())["start"])
