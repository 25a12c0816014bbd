"""How the stand gets at modules before they are imported, and what stands in for absent packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvwitness.patches.stand import after_import as after_import_module
from kvwitness.patches.stand import packages
from kvwitness.patches.stand.after_import import after_import


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder on the path, and finders and modules put back afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    after_import_module._waiting.clear()
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def add_one(module: ModuleType) -> None:
    module.value += 1  # type: ignore[attr-defined]


def test_module_is_changed_after_its_own_code_and_keeps_its_loader(tmp_path: Path) -> None:
    (tmp_path / "kvw_later.py").write_text("value = 1\n")
    after_import("kvw_later", add_one)
    after_import("kvw_later", add_one)

    module = importlib.import_module("kvw_later")

    assert module.value == 3
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__


def test_module_that_is_loaded_is_changed_at_once(tmp_path: Path) -> None:
    (tmp_path / "kvw_loaded.py").write_text("value = 1\n")
    module = importlib.import_module("kvw_loaded")

    after_import("kvw_loaded", add_one)

    assert module.value == 2


def test_change_that_fails_ends_the_process_even_in_an_optional_import(tmp_path: Path) -> None:
    (tmp_path / "kvw_other.py").write_text("")
    after_import("kvw_other", add_one)

    with pytest.raises(SystemExit, match="kvw_other: AttributeError"):
        try:
            importlib.import_module("kvw_other")
        except Exception:
            pytest.fail("an optional import would have gone on without the change")


GROUP: packages.Group = {
    "kvw_absent": lambda: {"known": 1},
    "kvw_absent.part": dict,
    "kvw_real": lambda: {"known": 2},
    "kvw_real.part": dict,
}


def test_absent_package_is_stood_in_for_and_says_what_it_has_not() -> None:
    packages.provide(GROUP)
    package, part = importlib.import_module("kvw_absent"), importlib.import_module("kvw_absent.part")

    assert package.known == 1
    with pytest.raises(NotImplementedError, match=r"kvw_absent\.part\.kernel\.fast"):
        part.kernel.fast(1)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kvw_absent.other")


def test_package_that_is_there_is_never_hidden_or_added_to(tmp_path: Path) -> None:
    (tmp_path / "kvw_real").mkdir()
    (tmp_path / "kvw_real" / "__init__.py").write_text("known = 'real'\n")
    packages.provide(GROUP)

    assert importlib.import_module("kvw_real").known == "real"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kvw_real.part")
