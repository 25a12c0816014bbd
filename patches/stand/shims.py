"""What SGLang needs changed to run HiCache on a CPU, by release.

0.5.23 needs three things: the transfer functions, host pools that do not pin memory, and MLA models sent
through the absorbed path. Nothing that is really there is replaced. Packages that SGLang merely imports
(triton, torchvision) are real in the stand's environment and need no stand-in.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from kvwitness.patches.stand import copies

log = logging.getLogger(__name__)

# Where 0.5.23 defines host pools. Only the first five call transfer functions.
_HOST_POOL_MODULES = (
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.pool_host.mla",
    "sglang.srt.mem_cache.pool_host.mamba",
    "sglang.srt.mem_cache.pool_host.dsa",
    "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.mem_cache.pool_host.base",
    "sglang.srt.mem_cache.pool_host.group",
    "sglang.srt.mem_cache.pool_host.hisparse",
    "sglang.srt.mem_cache.pool_host.mha_mxfp8",
    "sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4",
    "sglang.srt.mem_cache.pool_host.qsa",
    "sglang.srt.mem_cache.pool_host.page_interleave",
    "sglang.srt.mem_cache.pool_host.page_unified",
    "sglang.srt.mem_cache.pool_host.unified",
)


def host_pool_modules() -> list[ModuleType]:
    """The modules of the running SGLang that define host pools, imported. Raises ImportError."""
    return [importlib.import_module(name) for name in _HOST_POOL_MODULES]


def own_classes(module: ModuleType) -> Iterator[type]:
    """The classes that `module` itself defines."""
    for value in list(vars(module).values()):
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield value


def provide_transfer_functions() -> None:
    """Give host pool modules the transfer functions that their compiled package did not give them."""
    functions = copies.transfer_functions()
    for module in host_pool_modules():
        for name, function in functions.items():
            if not hasattr(module, name):
                setattr(module, name, function)


def never_pin() -> None:
    """Make every host pool allocate ordinary memory: pinning calls the CUDA driver."""
    for module in host_pool_modules():
        for cls in own_classes(module):
            init = vars(cls).get("__init__")
            if init is not None and "pin_memory" in inspect.signature(init).parameters:
                cls.__init__ = _without_pinning(init)  # type: ignore[misc]


def _without_pinning(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def unpinned(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["pin_memory"] = False
        init(*bound.args, **bound.kwargs)

    return unpinned


def absorb_mla() -> None:
    """Send DeepSeek-style attention through the absorbed path on torch_native.

    torch_native reads keys and values from the latent pool, so it cannot serve the MHA path; 0.5.23 has
    no entry for it and falls back to triton's, which picks MHA and crashes at the first prefill.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    registry = handlers.AttentionBackendRegistry
    if "torch_native" not in registry._handlers:
        registry.register("torch_native", lambda _attention, _batch: handlers.AttnForwardMethod.MLA)


Shim = Callable[[], None]

SHIMS_BY_RELEASE: dict[str, tuple[Shim, ...]] = {
    "0.5.23": (provide_transfer_functions, never_pin, absorb_mla),
}


def install() -> None:
    """Install the shims of the running SGLang release; one that is not listed gets the newest release's.

    Not idempotent: `kvwitness.patches.stand.entry.plugin` calls it once for each process.
    """
    from sglang.version import __version__ as release

    shims = SHIMS_BY_RELEASE.get(release)
    if shims is None:
        newest = list(SHIMS_BY_RELEASE)[-1]
        log.warning("kvwitness stand: SGLang %s is not known, using the shims of %s", release, newest)
        shims = SHIMS_BY_RELEASE[newest]
    for shim in shims:
        shim()
