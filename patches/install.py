"""Install the hooks: at once where a module is loaded already, right after its import where it is not.

Nothing of SGLang is imported on our account: a process that never loads the scheduler stays as it is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections import defaultdict
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any, Protocol

from kvwitness.patches.config import Config, ConfigError
from kvwitness.patches.contract import MARK, Hook, Installed, mismatch, wrap
from kvwitness.patches.schema.events import FactKind
from kvwitness.patches.witness import Witness

logger = logging.getLogger("kvwitness")

_installer: Installer | None = None


class Installer:
    """The hooks of this process and what became of each."""

    def __init__(self, witness: Witness, hooks: Sequence[Hook]) -> None:
        self.witness = witness
        self.states = [Installed(hook) for hook in hooks]
        self._waiting: dict[str, list[Installed]] = defaultdict(list)
        self._finder: AfterImport | None = None
        witness.on_open.append(self.report)

    def install(self) -> None:
        """Hook what is imported, wait for the import of the rest."""
        for state in self.states:
            module = sys.modules.get(state.hook.module)
            if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
                self._waiting[state.hook.module].append(state)
            else:
                self._apply(state, module)
        if self._waiting:
            self._finder = AfterImport(self)
            sys.meta_path.insert(0, self._finder)

    def waits_for(self, name: str) -> bool:
        """Whether hooks wait for module ``name``."""
        return name in self._waiting

    def imported(self, module: types.ModuleType) -> None:
        """Hook the functions of a module that was just imported."""
        waiting = self._waiting.pop(module.__name__, ())
        for state in waiting:
            self._apply(state, module)
        if waiting and self.witness.recording:
            self.report()

    def settle(self) -> None:
        """Hook modules whose import was under way when :meth:`install` ran."""
        for name in list(self._waiting):
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                self.imported(module)

    def _apply(self, state: Installed, module: types.ModuleType) -> None:
        hook = state.hook
        found = state.find(module)
        if found is None:
            return
        owner, original = found
        if getattr(original, MARK, None) == hook.name:
            state.status = "installed"
            return
        wrong = mismatch(original, hook.parameters)
        if wrong is not None:
            state.status, state.detail = "unknown_signature", wrong
            return
        try:
            setattr(owner, hook.attribute, wrap(original, hook, self.witness))
        except Exception as error:
            state.status, state.detail = "missing", f"{type(error).__name__}: {error}"
            return
        state.status, state.original = "installed", original

    def uninstall(self) -> None:
        """Put the originals back where our wrapper still stands; later wrappers of others are left alone."""
        if self._finder is not None:
            sys.meta_path.remove(self._finder)
            self._finder = None
        for state in self.states:
            if state.original is None:
                continue
            module = sys.modules[state.hook.module]
            owner: Any = getattr(module, state.hook.owner) if state.hook.owner else module
            if getattr(vars(owner).get(state.hook.attribute), MARK, None) == state.hook.name:
                setattr(owner, state.hook.attribute, state.original)
                state.status, state.original = "pending", None

    def report(self) -> None:
        """Record which hooks stand in this process."""
        self.witness.facts(FactKind.COVERAGE, {"hooks": [state.as_facts() for state in self.states]})


class WaitsForImports(Protocol):
    """Whom :class:`AfterImport` tells of imports."""

    def waits_for(self, name: str) -> bool: ...

    def imported(self, module: types.ModuleType) -> None: ...


class AfterImport(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module and calls the installer once it has been executed."""

    def __init__(self, installer: WaitsForImports) -> None:
        self._installer = installer
        self._busy: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self._busy or not self._installer.waits_for(name):
            return None
        self._busy.add(name)
        try:
            spec = None
            for finder in sys.meta_path:
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        break
        finally:
            self._busy.discard(name)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        spec.loader = _Observed(spec.loader, self._installer)
        return spec


class _Observed(importlib.abc.Loader):
    """The module's own loader, followed by the hooks."""

    def __init__(self, loader: Any, installer: WaitsForImports) -> None:
        self._loader = loader
        self._installer = installer

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # The module must look as if we had not been there, also to importlib.resources and pickle.
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            self._installer.imported(module)
        except Exception:
            logger.warning("kvwitness could not hook %s", module.__name__, exc_info=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def install() -> Installer | None:
    """Set the hooks up in this process, once. Fails open: a problem is one line in the log."""
    global _installer
    if _installer is not None:
        return _installer
    try:
        config = Config.from_environment()
        if config.standby:
            from kvwitness.patches.standby.wait import stand_by

            stand_by(config)
            return None
        from kvwitness.patches.hooks import all_hooks, launch

        installer = Installer(Witness(config), all_hooks())
        installer.install()
        launch.begin_if_launching()
    except ConfigError as error:
        logger.error("kvwitness is off in this process: %s", error)
        return None
    except Exception:
        logger.warning("kvwitness is off in this process", exc_info=True)
        return None
    _installer = installer
    return installer


def installed() -> Installer | None:
    """The installer of this process; None where kvwitness is off."""
    return _installer
