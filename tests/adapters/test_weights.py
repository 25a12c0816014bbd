"""Changes of the weights, with SGLang's signatures of each generation and on a scheduler of its own making."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.config import Config, Faults
from kvwitness.patches.hooks import weights
from kvwitness.patches.install import Installer
from kvwitness.patches.schema.events import HookFailed, WeightsKind, WeightsUpdated
from kvwitness.patches.standby.swap import Swaps
from kvwitness.patches.witness import Witness
from kvwitness.tracer.contracts.check import Fit, check
from kvwitness.tracer.contracts.facts import ReleaseFacts
from kvwitness.tracer.contracts.releases import version_key
from kvwitness.tracer.contracts.support import read_all

RELEASES = read_all(Path(__file__).parents[1] / "contracts" / "signatures")
ALWAYS = {"weights.from_disk", "weights.from_tensor", "weights.from_distributed"}
SINCE = {
    "weights.lora_load": "0.4.9.post6",
    "weights.lora_unload": "0.4.9.post6",
    "weights.from_ipc": "0.5.4",
    "weights.check": "0.5.6.post2",
    "weights.lora_load_tensors": "0.5.8",
    "weights.session_end": "0.5.21",
}


@pytest.mark.parametrize("facts", RELEASES, ids=lambda facts: facts.version)
def test_every_way_of_a_release_is_hooked_once(facts: ReleaseFacts) -> None:
    fits = check(weights.HOOKS, facts)
    found = [each.name for each in fits if each.fit is Fit.INSTALLABLE]
    newer = {name for name, since in SINCE.items() if version_key(facts.version) >= version_key(since)}
    assert len(found) == len(set(found)) and set(found) == ALWAYS | newer
    assert not [each for each in fits if each.fit is Fit.UNKNOWN_SIGNATURE]


def test_the_link_rests_on_what_every_release_has() -> None:
    named = {hook.name for hook in weights.HOOKS if "weights" in hook.links}
    assert named == ALWAYS
    assert {hook.name for hook in weights.HOOKS if "weights_too" in hook.links} == {
        "weights.from_ipc",
        "weights.check",
        "weights.session_end",
    }


# --- a scheduler -------------------------------------------------------------------------------------


@dataclass
class Request:
    """What SGLang's own requests have of this."""

    flush_cache: Any = True
    weight_version: Any = None
    action: str = "compare"


@dataclass
class Answer:
    success: Any = True


class SchedulerUpdateWeightsMixin:
    def update_weights_from_disk(self, recv_req: Any) -> Any:
        return Answer()

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return Answer("who knows")

    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        return False, "an answer of another kind"

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        raise AssertionError("Cache flush failed after updating weights")

    def check_weights(self, recv_req: Any) -> Any:
        return Answer()


class Scheduler(SchedulerUpdateWeightsMixin):
    def load_lora_adapter(self, recv_req: Any) -> Any:
        return Answer()

    def unload_lora_adapter(self, recv_req: Any) -> Any:
        return Answer(False)


class SchedulerWeightUpdaterManager:
    def __init__(self) -> None:
        self._session: Any = None

    def end_weight_update(self, recv_req: Any) -> Any:
        session, self._session = self._session, None
        return Answer(session is not None)


class Dispatcher:
    """SGLang's, with a list of pairs or a dictionary and its memory."""

    def __init__(self, handlers: dict[str, Any], *, pairs: bool) -> None:
        self._mapping: Any = list(handlers.items()) if pairs else dict(handlers)
        if not pairs:
            self._mro_cache: dict[str, Any] = {}

    def __call__(self, kind: str, request: Any) -> Any:
        return dict(self._mapping)[kind](request)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These classes under the names that the hooks look for, unhooked afterwards."""
    kept = {kind: dict(vars(kind)) for kind in (SchedulerUpdateWeightsMixin, Scheduler, SchedulerWeightUpdaterManager)}
    for (module, owner), kind in zip((weights.MIXIN, weights.SCHEDULER, weights.MANAGER), kept, strict=True):
        made = types.ModuleType(module)
        setattr(made, owner, kind)
        monkeypatch.setitem(sys.modules, module, made)
    yield
    for kind, attributes in kept.items():
        for name, value in attributes.items():
            if callable(value):
                setattr(kind, name, value)


@pytest.fixture
def witness(tmp_path: Path, sglang: None) -> Witness:
    w = Witness(Config(tmp_path, 4 << 20, Faults()))
    w.open("scheduler")
    return w


@pytest.fixture
def hooked(witness: Witness) -> Witness:
    Installer(witness, weights.HOOKS).install()
    return witness


def changes(w: Witness) -> list[tuple[int, int, int, int, str]]:
    w.close()
    (path,) = find_journals(w.config.directory)
    events = read_journal(path).events
    assert not [event for event in events if isinstance(event, HookFailed)]
    return [(e.update, e.kind, e.ok, e.flushed, e.label) for e in events if isinstance(e, WeightsUpdated)]


def test_each_change_says_how_whether_and_what_was_asked(hooked: Witness) -> None:
    scheduler = Scheduler()
    scheduler.update_weights_from_disk(Request(weight_version="step-7"))
    scheduler.update_weights_from_disk(recv_req=Request(flush_cache=False, weight_version="é" * 100))
    scheduler.update_weights_from_tensor(Request(weight_version=8))
    scheduler.update_weights_from_distributed(object())
    scheduler.load_lora_adapter(object())
    scheduler.unload_lora_adapter(object())
    assert changes(hooked) == [
        (1, WeightsKind.DISK, 1, 1, "step-7"),
        (2, WeightsKind.DISK, 1, 0, "é" * 64),
        # An answer that is not known says nothing, and a request without the field asked for nothing.
        (3, WeightsKind.TENSORS, 0, 1, "8"),
        (4, WeightsKind.DISTRIBUTED, 0, 0, ""),
        (5, WeightsKind.LORA_LOADED, 1, 0, ""),
        (6, WeightsKind.LORA_UNLOADED, 0, 0, ""),
    ]


def test_one_that_raises_is_recorded_as_failed_and_raises(hooked: Witness) -> None:
    def fail() -> None:
        with pytest.raises(AssertionError, match="Cache flush failed"):
            Scheduler().update_weights_from_ipc(Request())

    fail()
    try:
        raise KeyError("being handled while the next ones run")
    except KeyError:
        fail()
        Scheduler().update_weights_from_disk(Request())
    failed = (WeightsKind.IPC, 0, 1, "")
    assert changes(hooked) == [(1, *failed), (2, *failed), (3, WeightsKind.DISK, 1, 1, "")]


def test_a_check_changes_the_weights_only_where_it_overwrites_them(hooked: Witness) -> None:
    for action in ("snapshot", "reset_tensors", "compare", "checksum"):
        Scheduler().check_weights(Request(action=action, flush_cache=None))
    assert changes(hooked) == [(1, WeightsKind.CHECK, 1, 0, "")]


def test_a_session_without_a_load_was_written_by_another_process(hooked: Witness) -> None:
    manager = SchedulerWeightUpdaterManager()
    manager.end_weight_update(object())  # None is open: nothing changes.
    for loaded in (True, False):
        manager._session = types.SimpleNamespace(loaded_weights=loaded)
        manager.end_weight_update(object())
    assert changes(hooked) == [(1, WeightsKind.IPC, 1, 0, "")]


# --- attached later ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "dictionary"])
def test_attaching_reaches_what_the_scheduler_has_bound(witness: Witness, pairs: bool) -> None:
    scheduler: Any = Scheduler()
    original = scheduler.update_weights_from_disk
    handlers = {"disk": original, "lora": scheduler.load_lora_adapter, "other": print}
    dispatcher = scheduler._request_dispatcher = Dispatcher(handlers, pairs=pairs)
    if not pairs:
        dispatcher._mro_cache.update({"subclass": original, "nothing": None})
    swaps = Swaps(weights.HOOKS, witness, scheduler)
    states = {state.hook.name: state for state in swaps.states if state.status == "installed"}
    assert set(states) == {"weights.from_disk", "weights.lora_load"}
    blind = next(s for s in swaps.states if s.hook.name == "weights.from_tensor" and s.hook.owner == weights.MIXIN[1])
    assert blind.status == "missing" and "does not call" in blind.detail
    dispatcher("disk", Request())
    swaps.put_in()
    assert dispatcher("disk", Request(weight_version="seen")).success
    dispatcher("lora", object())
    if not pairs:
        dispatcher._mro_cache["subclass"](Request(weight_version="remembered"))
    assert swaps.put_back() == ()
    assert dict(dispatcher._mapping) == handlers
    assert pairs or dispatcher._mro_cache == {"subclass": original, "nothing": None}
    dispatcher("disk", Request())
    found = changes(witness)
    assert [(kind, label) for _, kind, _, _, label in found][:2] == [
        (WeightsKind.DISK, "seen"),
        (WeightsKind.LORA_LOADED, ""),
    ]
    assert len(found) == (2 if pairs else 3)


def test_a_scheduler_without_a_dispatcher_is_not_watched(witness: Witness) -> None:
    swaps = Swaps(weights.HOOKS, witness, Scheduler())
    assert {state.status for state in swaps.states if state.hook.owner == weights.MIXIN[1]} == {"missing"}
