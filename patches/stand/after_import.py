"""Change a module right after its import, in a process that may not have imported it yet.

SGLang is not imported on the stand's account: most of its processes never load most of what is changed,
and before 0.5.11 the stand gets in while the interpreter starts, where importing SGLang would be wrong.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]

_waiting: dict[str, list[Change]] = defaultdict(list)


def after_import(name: str, change: Change) -> None:
    """Call `change` with the module `name`: now if it is loaded, else when its import has just ended.

    A `change` that raises ends the process, since a stand that is only half made shows nothing.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _apply(change, module)
        return
    _waiting[name].append(change)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _apply(change: Change, module: ModuleType) -> None:
    try:
        change(module)
    except Exception as error:
        # SystemExit, because SGLang catches what an optional import or a plugin raises, and goes on.
        raise SystemExit(f"kvwitness stand: {module.__name__}: {type(error).__name__}: {error}") from error


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and changes it once it has been executed."""

    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting or name in self._busy:
            return None
        self._busy.add(name)
        try:
            # Past all other finders, so that another one which works in this way has its turn too.
            found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
            spec = next((one for one in found if one is not None), None)
        finally:
            self._busy.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenChange(spec.loader)
        return spec


class _ThenChange(importlib.abc.Loader):
    """The module's own loader, followed by the changes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for change in _waiting.pop(module.__name__, ()):
            _apply(change, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
