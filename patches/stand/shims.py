"""What each SGLang release needs changed to run HiCache on a CPU.

Every release needs the transfer functions, host pools that do not pin memory, and (from 0.5.8) MLA models
sent through the absorbed path; releases up to the one that a shim names also need that shim. Nothing that
is really there is replaced, but for triton kernels, which no CPU runs. Packages that SGLang merely imports
(triton, torchvision) are real in the stand's environments and need no stand-in.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvwitness.patches.stand import packages
from kvwitness.patches.stand.after_import import Change, after_import
from kvwitness.patches.stand.releases import order

# Where 0.5.23 defines host pools; an older release has some of these. Only the first five, and in older
# releases memory_pool_host, call transfer functions.
HOST_POOL_MODULES = (
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
# The device pool, which in 0.4.9 copies by itself.
DEVICE_POOL_MODULE = "sglang.srt.mem_cache.memory_pool"


def host_pool_modules() -> list[ModuleType]:
    """The modules of the running SGLang that define host pools, imported."""
    return [importlib.import_module(name) for name in HOST_POOL_MODULES if _exists(name)]


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package is missing too
        return False


def own_classes(module: ModuleType) -> Iterator[type]:
    """The classes that `module` itself defines."""
    for value in list(vars(module).values()):
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield value


# --- every release --------------------------------------------------------------------------------------


def provide_transfer_functions(module: ModuleType) -> None:
    """Give a host pool module the transfer functions that its compiled package did not give it."""
    # Here, because torch is not to be imported while an interpreter starts.
    from kvwitness.patches.stand import copies

    for name, function in copies.transfer_functions().items():
        if not hasattr(module, name):
            setattr(module, name, function)


def never_pin(module: ModuleType) -> None:
    """Make host pools allocate ordinary memory: pinning calls the CUDA driver."""
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


def absorb_mla(handlers: ModuleType) -> None:
    """Send DeepSeek-style attention through the absorbed path on torch_native.

    torch_native reads keys and values from the latent pool, so it cannot serve the MHA path; SGLang has
    no entry for it and falls back to triton's, which picks MHA and crashes at the first prefill.
    """
    registry = handlers.AttentionBackendRegistry
    if "torch_native" not in registry._handlers:
        registry.register("torch_native", lambda _attention, _batch: handlers.AttnForwardMethod.MLA)


# --- older releases -------------------------------------------------------------------------------------


def use_cpu_streams(controller: ModuleType) -> None:
    """Give a cache controller streams that need no GPU.

    It takes them from the device that this torch was built for, which without a driver is not there.
    torch.cpu has all that is called, and refuses to measure time.
    """
    import torch

    from kvwitness.patches.stand import streams

    if hasattr(controller, "device_module"):
        controller.device_module = torch.cpu  # type: ignore[attr-defined]
    else:
        controller.torch = streams.TorchWithCpuStreams()  # type: ignore[attr-defined]


def allocate_pages_in_torch(allocator: ModuleType) -> None:
    """Replace the paged allocator's triton kernels, which need a GPU driver."""
    from kvwitness.patches.stand import page_kernels

    for name, function in (
        ("alloc_extend_kernel", page_kernels.alloc_extend),
        ("alloc_decode_kernel", page_kernels.alloc_decode),
    ):
        if hasattr(allocator, name):
            setattr(allocator, name, page_kernels.Launcher(getattr(allocator, name), function))


def skip_unasked_torchao(module: ModuleType) -> None:
    """Import torchao only for a model that is to be quantized with it, not before looking whether one is."""
    apply = module.apply_torchao_config_to_model

    @functools.wraps(apply)
    def apply_if_asked(model: Any, torchao_config: str | None, *args: Any, **kwargs: Any) -> Any:
        return apply(model, torchao_config, *args, **kwargs) if torchao_config else model

    module.apply_torchao_config_to_model = apply_if_asked  # type: ignore[attr-defined]


def answer_amx_question(_module: ModuleType) -> None:
    """Answer the question for AMX under the name that torch no longer has.

    No, whatever the CPU: with AMX SGLang would call its compiled CPU kernels, which are not here.
    """
    import torch

    if not hasattr(torch._C._cpu, "_is_amx_tile_supported"):
        torch._C._cpu._is_amx_tile_supported = lambda: False


# --- the table ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shim:
    """A change to modules right after their import; `through` is the newest release that needs it, None
    where the newest known one does. A module that a release does not have is never imported."""

    change: Change
    modules: tuple[str, ...]
    through: str | None = None


@dataclass(frozen=True)
class StandIns:
    """Packages that releases up to `through` import, and that are stood in for where they are absent."""

    modules: packages.Group
    through: str


SHIMS = (
    Shim(provide_transfer_functions, HOST_POOL_MODULES),
    Shim(never_pin, HOST_POOL_MODULES),
    Shim(absorb_mla, ("sglang.srt.models.deepseek_common.attention_backend_handler",)),
    Shim(
        use_cpu_streams,
        ("sglang.srt.managers.cache_controller", "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"),
        through="0.5.17",
    ),
    Shim(
        allocate_pages_in_torch,
        ("sglang.srt.mem_cache.allocator.paged", "sglang.srt.mem_cache.allocator"),
        through="0.5.17",
    ),
    Shim(skip_unasked_torchao, ("sglang.srt.layers.torchao_utils",), through="0.5.8"),
    Shim(answer_amx_question, ("torch",), through="0.4.10.post2"),
)

STAND_INS = (
    StandIns(packages.SGL_KERNEL, through="0.5.12.post1"),
    StandIns(packages.VLLM_ROTARY, through="0.5.17"),
    StandIns(packages.VLLM_LAYERS, through="0.5.6.post2"),
)


def _needed(through: str | None, release: str) -> bool:
    return through is None or order(release) <= order(through)


def shims_of(release: str) -> tuple[Shim, ...]:
    """The shims that `release` needs."""
    return tuple(shim for shim in SHIMS if _needed(shim.through, release))


def stand_ins_of(release: str) -> tuple[StandIns, ...]:
    """The packages that `release` needs stood in for."""
    return tuple(stand_ins for stand_ins in STAND_INS if _needed(stand_ins.through, release))


def install(release: str) -> None:
    """Install what `release`, the running SGLang, needs. Imports nothing of SGLang; not idempotent."""
    groups = [stand_ins.modules for stand_ins in stand_ins_of(release)]
    if groups:
        packages.provide(*groups)
    for shim in shims_of(release):
        for name in shim.modules:
            after_import(name, shim.change)
