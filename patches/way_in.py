"""The way into SGLang releases that have no plugin group (before 0.5.11): through ``sitecustomize``.

SGLang starts its scheduler in a fresh interpreter that inherits nothing but the environment. Python imports
``sitecustomize`` while it starts, before anything of SGLang; ``kvwitness serve`` puts a folder with one on
PYTHONPATH (kvwitness.tracer.stand.paths), which calls :func:`start`. Interpreters that are told to ignore
the environment (``-I``, ``-E``, ``-S``) do not come by here.

Where SGLang has the plugin group, this does nothing: there kvwitness is loaded as a plugin.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_passed: set[Path] = set()
"""Folders whose ``sitecustomize`` has come by here in this process."""


def start(own: str) -> None:
    """Load kvwitness if it is asked for and needed, then the ``sitecustomize`` that ``own`` stands before.

    Problems of kvwitness are kept from the process; those of another ``sitecustomize`` are its own. With
    several of these folders on the path (one server command within another), each is gone through once.
    """
    folder = Path(own).absolute().parent
    if folder in _passed:
        return
    _passed.add(folder)
    if os.environ.get("KVWITNESS_DIR"):
        try:
            if _is_needed():
                from kvwitness.patches.entry import plugin

                plugin()
        except Exception as error:
            print(f"kvwitness is off in this process: {type(error).__name__}: {error}", file=sys.stderr)
    _chain_load()


def _is_needed() -> bool:
    """Whether this interpreter has an SGLang without a plugin group. Nothing of it is imported."""
    spec = importlib.util.find_spec("sglang")
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    if not places:
        return False
    return not any(Path(place, "srt", "plugins", "__init__.py").exists() for place in places)


def _chain_load() -> None:
    """Run the ``sitecustomize`` that would have been found if our folders were not on the path."""
    rest = [entry for entry in sys.path if Path(entry).absolute() not in _passed]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
