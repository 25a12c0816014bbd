"""Settings read again and again: what counts as a change, and what only passes."""

from __future__ import annotations

from kvwitness.collectors.environment import ProcessIdentity
from kvwitness.tracer.protocol.settings import SettingsRead, flat_settings, logged, setting_differences

SERVER = {
    "page_size": 16,
    "port": 1,
    "random_seed": 5,
    "internal_states": [{"last_gen_throughput": 3.0}],
    "cuda_graph_config": {"decode": {"max_bs": 32}},
    "revision": None,
}


def read(moment: str, started: float | None = 1.0, **changes: object) -> SettingsRead:
    processes = () if started is None else (ProcessIdentity(7, started),)
    return SettingsRead(moment, flat_settings({**SERVER, **changes}), processes)


def test_what_passes_is_no_setting() -> None:
    assert flat_settings(SERVER) == {"page_size": "16", "cuda_graph_config.decode.max_bs": "32", "revision": "not set"}
    assert setting_differences(SERVER, {**SERVER, "port": 2, "internal_states": []}) == ()


def test_every_change_is_named_with_its_moments() -> None:
    log = logged([read("a"), read("b"), read("c", page_size=64), read("d", page_size=64, extra=True)])
    assert [(one.after, one.before, one.name, one.one, one.other) for one in log.changes] == [
        ("b", "c", "page_size", "16", "64"),
        ("c", "d", "extra", "not there", "true"),
    ]
    assert (log.moments, log.restarts, log.processes) == (("a", "b", "c", "d"), (), "watched")


def test_other_processes_are_a_restart() -> None:
    log = logged([read("a"), read("b", started=60.0), read("c", started=None), read("d", started=61.0)])
    assert log.restarts == ("between a and b the server's processes were replaced",)
    assert "cannot be seen from here" in logged([read("a", None), read("b", None)]).processes


def test_a_server_that_says_nothing_has_not_changed() -> None:
    assert setting_differences({}, SERVER) == ()
    assert logged([]).moments == ()
