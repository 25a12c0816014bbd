"""What is put into a running scheduler by gdb or ``sys.remote_exec``: this text, which nothing ever imports.

It is run on the scheduler's main thread, between two of its byte codes, in a namespace of its own. All it does
there is to start a thread. That thread takes the request, a file which names what to load, and leaves a report
beside it: what an injected text raises would be seen by nobody. A request that was withdrawn meanwhile is not
there any more, and nothing happens.

Nothing is put on ``sys.path``: where ``kvwitness.patches`` is not loaded already it is loaded from its own folder.
"""

from __future__ import annotations

import _thread
import sys
from typing import Any

PATCHES = "kvwitness.patches"
LIVE = "kvwitness.patches.standby.live"


def begin(request: str, buffer: int, size: int) -> None:
    """On the scheduler's thread. ``buffer``: the memory that this text came in, 0 where there is none."""
    _thread.start_new_thread(_take, (request, buffer, size))


def _take(request: str, buffer: int, size: int) -> None:
    import json
    import os

    _give_back(buffer, size)
    taken = f"{request}.taken"
    try:
        # Of the two that may rename it one succeeds: this process, or whoever gave up waiting for it.
        os.rename(request, taken)  # noqa: PTH104 - before anything else is loaded
    except OSError:
        return
    try:
        with open(taken, encoding="utf-8") as file:  # noqa: PTH123
            settings = json.load(file)
        report = _load(settings["patches"], settings["source"]).enter(settings)
    except BaseException as error:
        report = {"ok": False, "problem": "failed", "error": f"{type(error).__name__}: {error}"}
    with open(taken, "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(report, file, default=str)
    os.rename(taken, f"{request}.report")  # noqa: PTH104


def _give_back(buffer: int, size: int) -> None:
    """Unmap the memory that gdb had this process map: the text was compiled from it before it could run."""
    if not buffer:
        return
    import ctypes

    ctypes.CDLL(None).munmap(ctypes.c_void_p(buffer), ctypes.c_size_t(size))


def _load(patches: str, source: str) -> Any:
    """``kvwitness.patches.standby.live`` of the folder ``patches``, as the files are now (``source``)."""
    import importlib
    import importlib.util
    import os
    import types

    package = sys.modules.get(PATCHES)
    live: Any = sys.modules.get(LIVE)
    folder = next(iter(getattr(package, "__path__", ())), "")
    elsewhere = os.path.realpath(folder) != os.path.realpath(patches)
    # SOURCE is "" where the process loaded it by itself.
    if elsewhere or (live is not None and live.SOURCE not in ("", source)):
        _make_room()
        if "kvwitness" not in sys.modules and importlib.util.find_spec("kvwitness") is None:
            parent = types.ModuleType("kvwitness")
            parent.__path__ = []
            sys.modules["kvwitness"] = parent
        importlib.import_module("kvwitness")
        init = os.path.join(patches, "__init__.py")  # noqa: PTH118
        spec = importlib.util.spec_from_file_location(PATCHES, init, submodule_search_locations=[patches])
        if spec is None or spec.loader is None:
            raise ImportError(f"{patches} is not a package")
        package = importlib.util.module_from_spec(spec)
        sys.modules[PATCHES] = package
        spec.loader.exec_module(package)
    live = importlib.import_module(LIVE)
    live.SOURCE = source
    return live


def _make_room() -> None:
    """Forget another copy of ``kvwitness.patches`` that is loaded and idle; raises where it is at work."""
    at_work = (
        ("kvwitness.patches.install", "_installer"),
        ("kvwitness.patches.standby.wait", "_waiting"),
    )
    for module, name in at_work:
        if getattr(sys.modules.get(module), name, None) is not None:
            raise RuntimeError("another installation of kvwitness is at work in it")
    live = sys.modules.get(LIVE)
    if live is not None and live.is_in():
        raise RuntimeError("another installation of kvwitness is at work in it")
    for name in [name for name in sys.modules if name == PATCHES or name.startswith(f"{PATCHES}.")]:
        del sys.modules[name]
