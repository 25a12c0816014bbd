"""What the hooks on the storage threads see of SGLang's own functions; run by the stand's Python.

Not collected by pytest: `test_stand_storage_threads.py` runs it. The controller is SGLang's class without its
``__init__``: only what the functions of the storage threads touch is there, and a storage class written for the test.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvwitness.patches.config import Config
from kvwitness.patches.hooks import all_hooks
from kvwitness.patches.install import Installer
from kvwitness.patches.stand import entry
from kvwitness.patches.witness import Witness

entry.plugin()
os.environ["KVWITNESS_DIR"] = sys.argv[1]
witness = Witness(Config.from_environment())
Installer(witness, all_hooks()).install()

from sglang.srt.managers import cache_controller as sglang_module  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402

PAGE = 16


class Backend:
    """A storage class that SGLang does not know: pages in a dictionary, and what a test wants to fail."""

    def __init__(self) -> None:
        self.pages: dict[str, Any] = {}
        self.broken = ""

    def may(self, what: str) -> None:
        if self.broken == what:
            raise OSError(f"{what} refused on purpose")

    def batch_exists(self, keys: list[str], *_: Any) -> int:
        self.may("look-up")
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def batch_get(self, keys: list[str], *_: Any) -> list[Any]:
        self.may("read")
        return [self.pages.get(key) for key in keys]

    def batch_set(self, keys: list[str], values: list[Any], *_: Any) -> bool:
        self.may("write")
        self.pages.update(zip(keys, values, strict=True))
        return True


def hashes(tokens: Any, last: Any, page_size: int) -> list[str]:
    return [f"{last}-{i}" for i in range(len(tokens) // page_size)]


def controller_of(backend: Backend) -> Any:
    controller = object.__new__(HiCacheController)
    pool = SimpleNamespace(
        page_size=PAGE,
        get_data_page=lambda index, *_, **__: torch.full((PAGE,), float(index)),
        get_dummy_flat_data_page=lambda: torch.zeros(PAGE),
        set_from_flat_data_page=lambda index, page: None,
    )
    vars(controller).update(
        page_size=PAGE,
        storage_backend=backend,
        mem_pool_host=pool,
        storage_host_pool=pool,
        get_hash_str=hashes,
        has_draft=False,
        prefetch_sync_queue=SimpleNamespace(put=lambda _: None),
    )
    controller.page_get_func, controller.page_set_func = controller._generic_page_get, controller._generic_page_set
    return controller


def operation_of(tokens: int, **more: Any) -> Any:
    ended = SimpleNamespace(done=False)
    return SimpleNamespace(
        token_ids=list(range(tokens)),
        last_hash="h",
        prefix_keys=None,
        hash_value=hashes(range(tokens), "h", PAGE),
        host_indices=torch.arange(tokens),
        completed_tokens=0,
        is_terminated=lambda: ended.done,
        mark_terminate=lambda: setattr(ended, "done", True),
        increment=lambda count: True,
        **more,
    )


def on_a_thread(function: Any, *args: Any) -> BaseException | None:
    """As SGLang calls it: on a thread of its own. What it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function(*args)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def main() -> None:
    vars(sglang_module)["get_storage_hash_str"] = hashes
    witness.open("scheduler")
    backend = Backend()
    controller = witness.controller = controller_of(backend)
    witness.page_size = PAGE
    assert on_a_thread(controller._page_backup, operation_of(64)) is None
    assert on_a_thread(controller._storage_hit_query, operation_of(96, request_id="hit")) is None
    backend.broken = "write"
    assert isinstance(on_a_thread(controller._page_backup, operation_of(64)), OSError)
    backend.broken = "look-up"
    assert isinstance(on_a_thread(controller._storage_hit_query, operation_of(64, request_id="lost")), OSError)
    backend.broken = "read"
    # Newer releases catch it themselves; the hook saw it before.
    on_a_thread(controller._page_transfer, operation_of(64, request_id="torn"))
    backend.broken = ""
    # An exception that somebody else is handling is none of ours.
    try:
        raise KeyError("elsewhere")
    except KeyError:
        controller._storage_hit_query(operation_of(32, request_id="fine"))
    other = controller_of(backend)
    on_a_thread(other._storage_hit_query, operation_of(32, request_id="not watched"))
    witness.close()
    print(next(Path(sys.argv[1]).glob("*.kvwj")))


main()
