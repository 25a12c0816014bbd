"""Hooks fail open: they never change a call, never raise, and are not installed where they do not fit."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.config import Config, ConfigError, Faults
from kvwitness.patches.contract import MARK, NOTHING, Hook, argument
from kvwitness.patches.install import Installer
from kvwitness.patches.schema.events import HookFailed
from kvwitness.patches.witness import Witness

TARGET = '''
class Cache:
    def match(self, key, limit=3, *, exact=False):
        """Doc."""
        if key == "bad":
            raise KeyError(key)
        return [key, limit, exact]

    def newer(self, key, must):
        return key

    @staticmethod
    def helper():
        return 1
'''


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module that is importable and not imported yet."""
    name = f"kvw_target_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(TARGET)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def witness(tmp_path: Path, faults: Faults | None = None) -> Witness:
    w = Witness(Config(tmp_path / "journals", 2 << 20, faults or Faults()))
    w.open("scheduler")
    return w


def hook(module: str, attribute: str = "match", parameters: tuple[str, ...] = ("self", "key"), **rest: Any) -> Hook:
    return Hook(f"test.{attribute}", module, "Cache", attribute, parameters, ("born",), **rest)


def install(w: Witness, *hooks: Hook) -> Installer:
    installer = Installer(w, hooks)
    installer.install()
    return installer


def cache_of(module: ModuleType) -> Any:
    return module.Cache()


def test_the_call_and_its_result_pass_through_unchanged(tmp_path: Path, target: str) -> None:
    calls: list[tuple[Any, ...]] = []
    module = importlib.import_module(target)
    w = witness(tmp_path)
    install(
        w,
        hook(
            target,
            enter=lambda w, args, kwargs: ("token", argument(args, kwargs, 1, "key")),
            seen=lambda w, token, result, args, kwargs: calls.append((token, result)),
        ),
    )
    cache = cache_of(module)
    result = cache.match(key="k", exact=True)
    assert result == ["k", 3, True]
    assert calls == [(("token", "k"), ["k", 3, True])]
    assert calls[0][1] is result
    assert module.Cache.match.__doc__ == "Doc." and module.Cache.match.__name__ == "match"


def test_an_exception_of_the_original_reaches_the_caller_and_context_is_undone(tmp_path: Path, target: str) -> None:
    module = importlib.import_module(target)
    w = witness(tmp_path)
    undone: list[str] = []
    install(
        w,
        hook(
            target,
            enter=lambda w, args, kwargs: "t",
            leave=lambda w, token: undone.append(token),
            seen=lambda *_: undone.append("seen"),
        ),
    )
    with pytest.raises(KeyError):
        cache_of(module).match("bad")
    assert undone == ["t"]


@pytest.mark.parametrize("leave", [None, lambda w, token: token.append("undone")])
def test_where_there_is_nothing_to_see_the_other_observers_are_not_called(
    tmp_path: Path, target: str, leave: Any
) -> None:
    module = importlib.import_module(target)
    w = witness(tmp_path)
    calls: list[Any] = []
    install(
        w,
        hook(
            target,
            enter=lambda w, args, kwargs: NOTHING if args[1] == "idle" else calls,
            leave=leave,
            seen=lambda w, token, result, args, kwargs: calls.append(result),
        ),
    )
    cache = cache_of(module)
    assert cache.match("idle") == ["idle", 3, False] and not calls
    assert cache.match("busy") == ["busy", 3, False]
    assert calls == [*(["undone"] if leave else []), ["busy", 3, False]]
    (journal,) = (read_journal(path) for path in find_journals(tmp_path))
    assert not any(isinstance(event, HookFailed) for event in journal.events)


def test_an_exception_of_the_original_does_not_come_with_one_of_a_hook(tmp_path: Path, target: str) -> None:
    module = importlib.import_module(target)

    def broken(*_: Any) -> None:
        raise ValueError("broken hook")

    install(witness(tmp_path), hook(target, enter=broken, seen=lambda *_: None))
    with pytest.raises(KeyError) as raised:
        cache_of(module).match("bad")
    assert raised.value.__context__ is None


@pytest.mark.parametrize("part", ["enter", "seen", "leave"])
def test_a_raising_hook_is_counted_and_never_seen_by_the_caller(tmp_path: Path, target: str, part: str) -> None:
    module = importlib.import_module(target)
    w = witness(tmp_path)

    def broken(*_: Any) -> None:
        raise ValueError("broken hook")

    observers: dict[str, Any] = {"enter": lambda *_: None, "seen": lambda *_: None, "leave": lambda *_: None}
    install(w, hook(target, **(observers | {part: broken})))
    cache = cache_of(module)
    assert [cache.match(str(i)) for i in range(3)] == [[str(i), 3, False] for i in range(3)]
    (journal,) = (read_journal(path) for path in find_journals(tmp_path))
    failed = [event for event in journal.events if isinstance(event, HookFailed)]
    assert failed[-1].count == 3 and "broken hook" in failed[-1].error


def test_fault_raise_makes_every_hook_raise(tmp_path: Path, target: str) -> None:
    module = importlib.import_module(target)
    w = witness(tmp_path, Faults(raise_in_hooks=True))
    seen: list[int] = []
    install(w, hook(target, seen=lambda *_: seen.append(1)))
    assert cache_of(module).match("x") == ["x", 3, False]
    assert not seen


def test_unknown_signature_is_not_hooked_and_says_why(tmp_path: Path, target: str) -> None:
    module = importlib.import_module(target)
    original = module.Cache.__dict__["match"]
    installer = install(
        witness(tmp_path),
        hook(target, parameters=("self", "tokens"), seen=lambda *_: None),
        hook(target, "newer", ("self", "key"), seen=lambda *_: None),
        hook(target, "gone", seen=lambda *_: None),
    )
    assert [state.status for state in installer.states] == ["unknown_signature", "unknown_signature", "missing"]
    assert "tokens" in installer.states[0].detail
    assert "must" in installer.states[1].detail
    assert module.Cache.__dict__["match"] is original


def test_a_module_is_hooked_right_after_its_import(tmp_path: Path, target: str) -> None:
    installer = install(witness(tmp_path), hook(target, seen=lambda *_: None))
    assert installer.states[0].status == "pending"
    assert target not in sys.modules, "installing must not import what SGLang has not imported"
    module = importlib.import_module(target)
    assert installer.states[0].status == "installed"
    assert getattr(module.Cache.match, MARK) == "test.match"
    assert module.__spec__ is not None and type(module.__spec__.loader).__name__ == "SourceFileLoader"
    installer.uninstall()


def test_uninstall_puts_the_very_originals_back(tmp_path: Path, target: str) -> None:
    module = importlib.import_module(target)
    original = module.Cache.__dict__["match"]
    finders = list(sys.meta_path)
    installer = install(witness(tmp_path), hook(target, seen=lambda *_: None))
    assert module.Cache.__dict__["match"] is not original
    installer.uninstall()
    assert module.Cache.__dict__["match"] is original
    assert sys.meta_path == finders


def test_nothing_is_observed_before_a_journal_is_open(tmp_path: Path, target: str) -> None:
    module = importlib.import_module(target)
    w = Witness(Config(tmp_path, 2 << 20, Faults()))
    seen: list[int] = []
    install(w, hook(target, seen=lambda *_: seen.append(1)))
    assert cache_of(module).match("x") == ["x", 3, False]
    assert not seen and not list(tmp_path.glob("*.kvwj"))


def test_off_means_off() -> None:
    """Without KVWITNESS_DIR the entry point imports nothing, starts nothing, hooks nothing."""
    script = textwrap.dedent("""
        import sys, threading
        from kvwitness.patches.entry import plugin
        before = set(sys.modules)
        finders = list(sys.meta_path)
        plugin()
        assert set(sys.modules) == before, set(sys.modules) - before
        assert sys.meta_path == finders
        assert threading.active_count() == 1
        names = [m for m in sys.modules if m.startswith("kvwitness")]
        assert sorted(names) == ["kvwitness", "kvwitness.patches", "kvwitness.patches.entry"], names
    """)
    env = {"PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", script], check=True, env=env)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVWITNESS_QUOTA_MB", "lots"),
        ("KVWITNESS_QUOTA_MB", "0"),
        ("KVWITNESS_FAULT", "explode"),
        ("KVWITNESS_FAULT", "drop"),
        ("KVWITNESS_DIGEST", "some"),
        ("KVWITNESS_DIGEST", "1/0"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.from_environment({"KVWITNESS_DIR": "x", name: value})


def test_a_wrong_setting_turns_kvwitness_off_and_not_the_server(tmp_path: Path) -> None:
    script = "from kvwitness.patches.entry import plugin; plugin(); print('serving')"
    env = {"PATH": "/usr/bin:/bin", "KVWITNESS_DIR": str(tmp_path), "KVWITNESS_QUOTA_MB": "lots"}
    done = subprocess.run([sys.executable, "-c", script], check=True, env=env, capture_output=True, text=True)
    assert done.stdout == "serving\n"
    assert "KVWITNESS_QUOTA_MB" in done.stderr
