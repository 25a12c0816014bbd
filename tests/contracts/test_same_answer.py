"""What is read from source and what the installer sees in the loaded module must be the same."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.packages import make_folder
from kvwitness.collectors.journal import read_journal
from kvwitness.patches.config import Config, Faults
from kvwitness.patches.contract import Hook, mismatch
from kvwitness.patches.hooks import all_hooks
from kvwitness.patches.install import Installer
from kvwitness.patches.witness import Witness
from kvwitness.tracer.contracts.check import check
from kvwitness.tracer.contracts.facts import extract, read_facts
from kvwitness.tracer.contracts.signatures import StandIn, to_signature, to_text
from kvwitness.tracer.contracts.source import open_folder
from kvwitness.tracer.judgement import judge

MODULE = """
import functools
from typing import TYPE_CHECKING
from sglang.kvw_helpers import Exported, keeps_too, elsewhere
from sglang.kvw_helpers import elsewhere as under_another_name

if TYPE_CHECKING:
    from sglang.kvw_nowhere import Cache as Cache

def keeps(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

def hides(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

def hides_with(option):
    def decorate(function):
        def wrapper(self, anything=None):
            return function(self)
        return wrapper
    return decorate

def optional(function=None, *, option=None):
    def decorate(function):
        if option == "off":
            return function
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)
        return wrapper
    if function is not None:
        return decorate(function)
    else:
        return decorate

def optional_hides(function=None, *, option=None):
    def decorate(function):
        def wrapper(self, anything=None):
            return function(self)
        return wrapper
    if function is None:
        return decorate
    return decorate(function)

def module_level(self, key): ...

class Other:
    def borrowed(self, key, size=1): ...

class Base:
    def inherited(self, key): ...

class Cache(Base):
    def plain(self, key): ...
    def more_required(self, key, must): ...
    def more_optional(self, key, size=1, *args, flag=False, **kwargs): ...
    def keyword_only(self, key, *, must): ...
    def keyword_default(self, key, *, size=None): ...
    def by_keyword(self, *, key): ...
    def positional_only(self, key, /, size=2): ...
    def renamed(self, tokens): ...
    def swapped(self, size, key): ...
    def variadic(self, *args, **kwargs): ...
    def annotated(self, key: "list[int]", size: int = 3) -> "int": ...
    async def later(self, key): ...
    @keeps
    def kept(self, key): ...
    @keeps_too("a reason")
    def kept_elsewhere(self, key): ...
    @hides
    def hidden(self, key): ...
    @hides_with(3)
    def hidden_with(self, key): ...
    @hides
    @keeps
    def hidden_outside(self, key): ...
    @optional
    def optional_bare(self, key): ...
    @optional(option=1)
    def optional_called(self, key): ...
    @optional_hides
    def hidden_bare(self, key): ...
    @optional_hides(option=1)
    def hidden_called(self, key): ...
    @functools.lru_cache(maxsize=None)
    def cached(self, key): ...
    @staticmethod
    def static(self, key): ...
    @classmethod
    def of_class(self, key): ...
    @property
    def a_property(self): ...
    alias = plain
    alias_of_alias = alias
    alias_of_module = module_level
    alias_of_import = under_another_name
    alias_of_other = Other.borrowed
    wrapped_static = staticmethod(module_level)
    a_lambda = lambda self, key, size=0: None
    a_number = 3
    late = plain
    def late(self, tokens): ...
    if functools is not None:
        def conditional(self, key): ...
    else:
        conditional = plain
    try:
        import kvw_no_such_module
    except ImportError:
        def fallback(self, key): ...
    def deleted(self, key): ...
    del deleted
"""

HELPERS = """
import functools

def keeps_too(reason):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)
        return wrapper
    return decorate

def elsewhere(self, key, size=1): ...

class Exported:
    def plain(self, key): ...
"""

_NAMES = """
    plain more_required more_optional keyword_only keyword_default by_keyword positional_only renamed swapped variadic
    annotated later kept kept_elsewhere hidden hidden_with hidden_outside cached static of_class a_property alias
    alias_of_alias alias_of_module alias_of_import alias_of_other wrapped_static a_lambda a_number late conditional
    fallback deleted inherited absent optional_bare optional_called hidden_bare hidden_called
"""
ATTRIBUTES = _NAMES.split()
FITTING = """
    plain more_optional keyword_default by_keyword positional_only annotated later kept kept_elsewhere cached static
    alias alias_of_alias alias_of_module alias_of_import alias_of_other wrapped_static a_lambda conditional fallback
    optional_bare optional_called
"""

TARGETS = [
    *(("sglang.kvw_target", "Cache", attribute) for attribute in ATTRIBUTES),
    ("sglang.kvw_target", "", "module_level"),
    ("sglang.kvw_target", "", "elsewhere"),
    ("sglang.kvw_target", "", "absent"),
    ("sglang.kvw_target", "Exported", "plain"),
    ("sglang.kvw_target", "NoSuchClass", "plain"),
]
KNOWN = [("self", "key"), ("self",), (), ("self", "key", "size")]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = make_folder(tmp_path, {"sglang.kvw_target": MODULE, "sglang.kvw_helpers": HELPERS})
    # Here, and only here, the package is imported as well.
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_static_and_installed_agree(package: Path, tmp_path: Path, known: tuple[str, ...]) -> None:
    hooks = [
        Hook(f"{owner}.{attribute}", module, owner, attribute, known, ("born",), seen=lambda *_: None)
        for module, owner, attribute in TARGETS
    ]
    static = check(hooks, extract(open_folder(package), hooks))
    importlib.import_module("sglang.kvw_target")
    installer = Installer(Witness(Config(tmp_path / "journals", 2 << 20, Faults())), hooks)
    installer.install()
    answers = {state.hook.name: (state.status, state.detail) for state in installer.states}
    installer.uninstall()

    differing = {}
    for item in static:
        status, detail = answers[item.name]
        if item.fits != (status == "installed"):
            differing[item.name] = (item.fit, item.detail, status, detail)
        # A signature that both could read is described in the same words.
        elif item.fit == status == "unknown_signature" and "cannot be read" not in detail:
            assert item.detail == detail
    assert not differing


def test_the_installed_ones_are_those_that_one_expects(package: Path) -> None:
    """Keeps the comparison above from agreeing on nonsense."""
    hooks = [
        Hook(f"{owner}.{attribute}", module, owner, attribute, ("self", "key"), (), seen=lambda *_: None)
        for module, owner, attribute in TARGETS
    ]
    fitting = {item.name for item in check(hooks, extract(open_folder(package), hooks)) if item.fits}
    others = {".module_level", ".elsewhere", "Exported.plain"}
    assert fitting == {f"Cache.{name}" for name in FITTING.split()} | others


def test_a_real_server_installed_what_fits() -> None:
    """The coverage in the journal of a real server, against what was read from that release's wheel."""
    tests = Path(__file__).parents[1]
    (instance,) = judge([read_journal(tests / "fixtures" / "abc-0.5.23-rust.kvwj")]).instances
    facts = read_facts(tests / "contracts" / "signatures" / "0.5.23.json")
    # Several hooks may have one name and one target, each for another signature.
    found: dict[tuple[str, str], bool] = {}
    for item in check(all_hooks(), facts):
        found[item.name, item.target] = item.fits or found.get((item.name, item.target), False)
    recorded = {
        key: hook.status == "installed"
        for hook in instance.hooks
        if (key := (hook.name, hook.target)) in found and hook.status != "pending"
    }
    assert len(recorded) > 20 and recorded.items() <= found.items()


NAMES = st.lists(st.sampled_from(["self", "key", "size", "node", "req", "tokens"]), unique=True, max_size=6)


@given(NAMES, st.data())
def test_any_parameter_list_gets_the_verdict_of_the_function(names: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(names)), min_size=2, max_size=2)))
    before, between, after = names[: cuts[0]], names[cuts[0] : cuts[1]], names[cuts[1] :]
    required = data.draw(st.integers(0, cuts[1]))
    parts = [name + ("=1" if index >= required else "") for index, name in enumerate([*before, *between])]
    if before:
        parts.insert(len(before), "/")
    star = data.draw(st.sampled_from(["", "*args"]))
    if star or after:
        parts.append(star or "*")
    parts += [name + data.draw(st.sampled_from(["", "=2"])) for name in after]
    if data.draw(st.booleans()):
        parts.append("**kwargs")
    space: dict[str, Any] = {}
    exec(f"def function({', '.join(parts)}): ...", space)
    module = ModuleType("made")
    module.__dict__.update(space)

    known = tuple(data.draw(st.one_of(st.just(names[: data.draw(st.integers(0, 6))]), NAMES)))
    text = _text_of(", ".join(parts))
    assert mismatch(StandIn(text), known) == mismatch(space["function"], known)


def _text_of(parameters: str) -> str:
    (function,) = ast.parse(f"def function({parameters}): ...").body
    assert isinstance(function, ast.FunctionDef)
    text = to_text(function.args)
    assert str(to_signature(text)).replace("Ellipsis", "...") == text
    return text
