"""Standby in a process of its own making: a small scheduler, its loop on one thread, the socket on another."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwitness.collectors.journal import Journal, find_journals, read_journal
from kvwitness.collectors.standby import ControlError, ask, sockets_in
from kvwitness.patches import install as install_module
from kvwitness.patches.config import Config, Faults
from kvwitness.patches.contract import MARK
from kvwitness.patches.schema import control
from kvwitness.patches.schema import events as ev
from kvwitness.patches.standby import listener as listener_module
from kvwitness.patches.standby import wait
from kvwitness.patches.standby.step import NoStep, Stepper
from kvwitness.patches.start import is_id
from standby.fakes import PAGE, HiRadixCache, Node, Scheduler, sglang

TOKENS = list(range(100, 100 + 6 * PAGE))
LOOP, INIT, MATCH = Scheduler.get_next_batch_to_run, Scheduler.__init__, HiRadixCache.match_prefix


class Loop:
    """A scheduler's thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._stop = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self._stop:
            self.scheduler.get_next_batch_to_run()
            time.sleep(0.001)

    def end(self) -> None:
        self._stop = True
        self.thread.join()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(tmp_path / "data", 4 << 20, Faults(), standby=True)


@pytest.fixture
def scheduler(config: Config) -> Iterator[Scheduler]:
    """One that was constructed on standby."""
    with sglang() as module:
        watch = wait.SchedulerWatch(config)
        watch.start()
        made = module.Scheduler()
        yield made


@pytest.fixture
def loop(scheduler: Scheduler) -> Iterator[Loop]:
    running = Loop(scheduler)
    yield running
    running.end()


def control_socket(config: Config) -> Path:
    return sockets_in(config.directory)[os.getpid()]


def grow(tree: Any) -> tuple[Node, Node, Node]:
    """A node in both tiers, below it one that is in L2 alone and one whose backup is under way."""
    both = Node(TOKENS[: 2 * PAGE], tree.root_node, list(range(2 * PAGE)))
    host = Node(TOKENS[2 * PAGE : 4 * PAGE], both, list(range(64, 64 + 2 * PAGE)), device=False)
    pending = Node([9] * PAGE, both, list(range(128, 128 + PAGE)))
    tree.ongoing_write_through[pending.id] = (pending, PAGE, [pending])
    return both, host, pending


def only_journal(config: Config) -> Journal:
    (path,) = find_journals(config.directory)
    return read_journal(path)


# --- idle --------------------------------------------------------------------------------------------


def test_on_standby_the_functions_are_the_originals_and_nothing_is_recorded(config: Config, loop: Loop) -> None:
    status = ask(control_socket(config), control.STATUS)
    assert (status.ok, status.state, status.tree_class, status.hicache) == (True, "idle", "HiRadixCache", True)
    assert Scheduler.__init__ is INIT and Scheduler.get_next_batch_to_run is LOOP
    assert HiRadixCache.match_prefix is MATCH
    assert find_journals(config.directory) == []


def test_the_socket_is_for_its_user_alone(config: Config, scheduler: Scheduler) -> None:
    path = control_socket(config)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_another_users_request_is_not_answered(
    config: Config, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = control_socket(config)
    monkeypatch.setattr(listener_module.os, "geteuid", lambda: 4242)
    with pytest.raises(ControlError, match="hung up"):
        ask(path, control.STATUS)


def test_a_folder_that_others_can_reach_is_not_used(config: Config) -> None:
    folder = config.directory / control.FOLDER
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    listener_module._check_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    other = config.directory / "elsewhere"
    other.symlink_to(folder)
    with pytest.raises(PermissionError):
        listener_module._check_private(other)


def test_what_is_no_request_is_refused(config: Config, loop: Loop) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(control_socket(config)))
        connection.sendall(b'{"command": "eval"}\n')
        assert b"unknown command" in connection.recv(4096)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(control_socket(config)))
        connection.sendall(b"nonsense\n")
        assert connection.recv(4096) == b""
    assert ask(control_socket(config), control.STATUS).ok


def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVWITNESS_DIR", str(tmp_path))
    monkeypatch.setenv("KVWITNESS_STANDBY", "1")
    called: list[Config] = []
    monkeypatch.setattr(wait, "stand_by", called.append)
    assert install_module.install() is None
    assert called[0].standby and called[0].directory == tmp_path


# --- attach and detach -------------------------------------------------------------------------------


def test_attach_hooks_on_the_schedulers_thread_and_detach_puts_everything_back(config: Config, loop: Loop) -> None:
    both, host, pending = grow(loop.scheduler.tree_cache)
    path = control_socket(config)
    before = threading.active_count()
    attached = ask(path, control.ATTACH)
    assert attached.ok, attached
    assert getattr(HiRadixCache.match_prefix, MARK) == "hiradix.match_prefix"
    assert Scheduler.get_next_batch_to_run is LOOP
    assert ask(path, control.STATUS).state == "attached"
    detached = ask(path, control.DETACH)
    assert detached.ok and detached.not_restored == ()
    assert HiRadixCache.match_prefix is MATCH and Scheduler.get_next_batch_to_run is LOOP
    assert threading.active_count() == before
    journal = only_journal(config)
    assert journal.closed and not journal.gaps and not journal.anomalies
    nodes = {event.node: event for event in journal.events if isinstance(event, ev.ResidentNode)}
    assert [(nodes[n.id].l1, nodes[n.id].l2) for n in (both, host, pending)] == [(1, 1), (0, 1), (1, 2)]
    assert nodes[host.id].parent == both.id and (nodes[host.id].start, nodes[host.id].end) == (32, 64)
    assert nodes[host.id].slots == (ev.Run(64, 32),) and nodes[pending.id].slots == ()
    (end,) = [event for event in journal.events if isinstance(event, ev.SnapshotEnd)]
    assert (end.nodes, end.complete) == (3, 1)


def test_a_snapshots_digests_are_those_of_a_request_with_the_same_tokens(config: Config, loop: Loop) -> None:
    from kvwitness.patches.digests import Chain, load_key

    _, host, _ = grow(loop.scheduler.tree_cache)
    ask(control_socket(config), control.ATTACH)
    ask(control_socket(config), control.DETACH)
    chain = Chain(load_key(config.directory), PAGE, (None, None))
    chain.extend(TOKENS[: 4 * PAGE])
    told = {e.node: e for e in only_journal(config).events if isinstance(e, ev.ResidentDigests)}
    assert told[host.id].first_cell == 2 and list(told[host.id].digests) == chain.cells[2:]


def test_copies_under_way_are_named_and_waiting_requests_too(config: Config, loop: Loop) -> None:
    tree = loop.scheduler.tree_cache
    both, host, _ = grow(tree)
    tree.ongoing_load_back[host.id] = host
    ack = type("Ack", (), {"node_ids": [both.id], "num_tokens": 32})()
    tree.cache_controller.ack_write_queue.append(ack)
    request = type("Req", (), {"rid": "waits", "origin_input_ids": [1] * 40, "output_ids": []})()
    loop.scheduler.waiting_queue.append(request)
    ask(control_socket(config), control.ATTACH)
    ask(control_socket(config), control.DETACH)
    events = only_journal(config).events
    (flight,) = [event for event in events if isinstance(event, ev.InFlight)]
    assert (flight.direction, flight.launched, flight.tokens, flight.nodes) == (1, 1, 32, (both.id,))
    (waiting,) = [event for event in events if isinstance(event, ev.WaitingAtAttach)]
    assert waiting.prompt_tokens == 40
    # A load-back brings some of the path to its anchor: none of it is claimed to be in L1.
    nodes = {event.node: event for event in events if isinstance(event, ev.ResidentNode)}
    assert nodes[both.id].l1 == ev.AtAttach.UNDER_WAY


def test_a_node_that_was_deleted_is_not_in_the_snapshot(config: Config, loop: Loop) -> None:
    both, host, _ = grow(loop.scheduler.tree_cache)
    both.children.clear()  # It still knows its parent.
    ask(control_socket(config), control.ATTACH)
    ask(control_socket(config), control.DETACH)
    assert host.id not in {e.node for e in only_journal(config).events if isinstance(e, ev.ResidentNode)}


def test_twice_is_refused_and_again_is_a_new_journal(config: Config, loop: Loop) -> None:
    path = control_socket(config)
    assert ask(path, control.DETACH).problem == control.Problem.NOT_ATTACHED
    for count in (1, 2, 3):
        assert ask(path, control.ATTACH).ok
        assert ask(path, control.ATTACH).problem == control.Problem.ATTACHED
        assert ask(path, control.DETACH).ok
        assert len(find_journals(config.directory)) == count


def test_the_start_is_whoever_attaches_own_and_without_one_nobody_elses(config: Config, loop: Loop) -> None:
    path = control_socket(config)
    given = "0123456789abcdef"
    for about in ({control.START: given}, {}, {control.START: "no id"}):
        assert ask(path, control.ATTACH, about=about).ok
        assert ask(path, control.DETACH).ok
    facts = [
        json.loads(event.json)
        for journal in map(read_journal, find_journals(config.directory))
        for event in journal.events
        if isinstance(event, ev.Facts) and event.kind == ev.FactKind.PROCESS
    ]
    starts = [process["start"] for process in facts]
    assert starts.count(given) == 1 and len(set(starts)) == 3 and all(map(is_id, starts))
    assert len({(process["host"], process["key"]) for process in facts}) == 1


def test_a_function_that_was_wrapped_by_something_else_is_named_and_left(config: Config, loop: Loop) -> None:
    path = control_socket(config)
    assert ask(path, control.ATTACH).ok
    ours = HiRadixCache.match_prefix

    def theirs(self: Any, params: Any) -> Any:
        return ours(self, params)

    HiRadixCache.match_prefix = theirs  # type: ignore[method-assign]
    assert ask(path, control.DETACH).not_restored == ("HiRadixCache.match_prefix",)
    assert HiRadixCache.match_prefix is theirs
    assert loop.scheduler.tree_cache.match_prefix("as before") == "as before"


# --- what cannot be attached to ----------------------------------------------------------------------


def test_a_server_without_hicache_is_refused(config: Config, loop: Loop) -> None:
    loop.scheduler.tree_cache.cache_controller = None
    refused = ask(control_socket(config), control.ATTACH)
    assert (refused.ok, refused.problem) == (False, control.Problem.NO_HICACHE)
    assert find_journals(config.directory) == []


def test_a_scheduler_that_does_not_come_by_is_left_as_it_is(
    config: Config, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_STEP_S", 0.1)
    refused = ask(control_socket(config), control.ATTACH)
    assert refused.problem == control.Problem.NO_STEP
    assert Scheduler.get_next_batch_to_run is LOOP and HiRadixCache.match_prefix is MATCH
    assert find_journals(config.directory) == []


def test_a_failure_while_attaching_is_rolled_back(config: Config, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvwitness.patches.standby import attachment

    def broken(_: Any) -> dict[str, Any]:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(attachment, "describe_instance", broken)
    refused = ask(control_socket(config), control.ATTACH)
    assert refused.problem == control.Problem.FAILED and "broken on purpose" in refused.error
    assert HiRadixCache.match_prefix is MATCH and Scheduler.get_next_batch_to_run is LOOP
    assert find_journals(config.directory) == []


def test_no_room_for_the_journal_is_said(config: Config, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    refused = ask(control_socket(config), control.ATTACH)
    assert refused.problem == control.Problem.NO_JOURNAL and "No space left" in refused.error
    assert HiRadixCache.match_prefix is MATCH


def test_a_scheduler_that_is_still_starting_says_so(config: Config) -> None:
    waiting = listener_module.Listener(config)
    waiting.start()
    assert ask(control_socket(config), control.STATUS).state == control.State.STARTING
    assert ask(control_socket(config), control.ATTACH).problem == control.Problem.STARTING


# --- steps -------------------------------------------------------------------------------------------


class Pieces:
    """Work in pieces, perhaps broken."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.left = count
        self.error = error

    def step(self) -> bool:
        if self.error is not None:
            raise self.error
        self.left -= 1
        return self.left == 0


def test_a_step_does_one_piece() -> None:
    scheduler = Scheduler()
    stepper = Stepper(scheduler, Pieces(3))
    threading.Thread(target=stepper.offer, args=(5.0,)).start()
    while Scheduler.get_next_batch_to_run is LOOP:
        time.sleep(0.001)
    Scheduler().get_next_batch_to_run()  # Another one's loop is not ours.
    assert not stepper.begun
    for count in (1, 2, 3):
        assert not stepper.done
        assert scheduler.get_next_batch_to_run() == count
    assert stepper.done and stepper.error is None
    assert Scheduler.get_next_batch_to_run is LOOP


def test_work_that_raises_never_reaches_the_scheduler() -> None:
    scheduler = Scheduler()
    stepper = Stepper(scheduler, Pieces(1, IndexError("own")))
    threading.Thread(target=stepper.offer, args=(5.0,)).start()
    while Scheduler.get_next_batch_to_run is LOOP:
        time.sleep(0.001)
    assert scheduler.get_next_batch_to_run() == 1
    assert stepper.done and isinstance(stepper.error, IndexError)
    assert Scheduler.get_next_batch_to_run is LOOP


def test_a_withdrawn_offer_is_not_begun() -> None:
    scheduler = Scheduler()
    stepper = Stepper(scheduler, Pieces(1))
    with pytest.raises(NoStep):
        stepper.offer(0.01)
    assert Scheduler.get_next_batch_to_run is LOOP
    scheduler.get_next_batch_to_run()
    assert not stepper.begun
