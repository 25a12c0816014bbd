"""Stand-ins for compiled packages that older releases of SGLang import, GPU or not.

They are found last of all finders, so that a package which is really there is never hidden. What a
stand-in does not have is there by name and raises NotImplementedError when it is called.
"""

from __future__ import annotations

import importlib.abc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What a stand-in has when it is imported, and stand-ins by module name.
Filler = Callable[[], Mapping[str, Any]]
Group = Mapping[str, Filler]


class MissingKernel:
    """A name of a stand-in that nothing on the stand may call."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"kvwitness stand: {self.__name__} is not available on a CPU")

    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")


def rotary_embedding(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool = True
) -> None:
    """Rotate `query` and `key` in place, as the kernel of this name does."""
    import torch

    tokens = positions.flatten()
    cosines, sines = cos_sin_cache[tokens].float().unsqueeze(1).chunk(2, dim=-1)
    turned = 2 * cosines.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.reshape(len(tokens), -1, head_size)
        part = heads[..., :turned].float()
        first, second = part.chunk(2, dim=-1) if is_neox else (part[..., 0::2], part[..., 1::2])
        rotated = (first * cosines - second * sines, second * cosines + first * sines)
        joined = torch.cat(rotated, dim=-1) if is_neox else torch.stack(rotated, dim=-1).flatten(-2)
        whole = torch.cat((joined.to(tensor.dtype), heads[..., turned:]), dim=-1)
        tensor.copy_(whole.reshape(tensor.shape))


def _transfer_functions() -> Mapping[str, Any]:
    from kvwitness.patches.stand import copies

    return copies.transfer_functions()


def _rotary() -> Mapping[str, Any]:
    return {"rotary_embedding": rotary_embedding}


def _own_layers(kind: str) -> Filler:
    """vLLM's classes under names that SGLang gives its own: SGLang takes vLLM's where it has no kernels of
    its own, right after it has defined them."""

    def fill() -> Mapping[str, Any]:
        return vars(sys.modules[f"sglang.srt.layers.{kind}"])

    return fill


def _logger() -> Mapping[str, Any]:
    return {"logger": logging.getLogger("vllm")}


def _nothing() -> Mapping[str, Any]:
    return {}


SGL_KERNEL: Group = {
    "sgl_kernel": _rotary,
    "sgl_kernel.kvcacheio": _transfer_functions,
}
VLLM_ROTARY: Group = {
    "vllm": _nothing,
    "vllm.logger": _logger,
    "vllm._custom_ops": _rotary,
}
VLLM_LAYERS: Group = {
    "vllm.model_executor": _nothing,
    "vllm.model_executor.layers": _nothing,
    "vllm.model_executor.layers.activation": _own_layers("activation"),
    "vllm.model_executor.layers.layernorm": _own_layers("layernorm"),
}


def provide(*groups: Group) -> None:
    """Make these modules importable where their packages are absent."""
    sys.meta_path.append(_StandIns({name: fill for group in groups for name, fill in group.items()}))


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, fillers: Mapping[str, Filler]) -> None:
        self._fillers = fillers

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._fillers or not self._owns_parent(name):
            return None
        return ModuleSpec(name, self, is_package=any(other.startswith(f"{name}.") for other in self._fillers))

    def _owns_parent(self, name: str) -> bool:
        """Whether `name` is a whole package, or part of one that is a stand-in and not a real one."""
        parent = name.rpartition(".")[0]
        return not parent or getattr(sys.modules.get(parent), "__loader__", None) is self

    def exec_module(self, module: ModuleType) -> None:
        def absent(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return MissingKernel(f"{module.__name__}.{name}")

        fixed = {name: value for name, value in self._fillers[module.__name__]().items() if not name.startswith("__")}
        vars(module).update(fixed, __getattr__=absent, __version__="0")
