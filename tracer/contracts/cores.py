"""The cores of the unified tree: which one a release takes, and which of them do not tell the path to a node.

Since 0.5.17 the tree is known by node ids. The Python core resolves them; the Rust core tells paths from 0.5.22
on. Without paths nothing is known of where a node lies, whatever hooks are installed.
"""

from __future__ import annotations

import ast
from typing import Final

from kvwitness.tracer.contracts.find import NotFound, has_class, parameters_of
from kvwitness.tracer.contracts.source import Source

SWITCH: Final = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"

_ENVIRONMENT: Final = "sglang.srt.environ"
# What SGLang calls it -> module, class, the methods of which one is enough.
_CORES: Final = {
    "python": (
        "sglang.srt.mem_cache.unified_cache.unified_tree_core",
        "UnifiedTreeCore",
        ("collect_path_info", "node_by_id"),
    ),
    "rust": ("sglang.srt.mem_cache.rust_tree_core.adapter", "RustUnifiedTreeCore", ("collect_path_info",)),
}


def default_core(source: Source) -> str:
    """The core that is taken where nobody chooses; "" where there is no choice or it could not be told."""
    environment = source.module(_ENVIRONMENT)
    for node in ast.walk(environment) if environment is not None else ():
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(args=[ast.Constant(value=str() as value), *_])
            ) if name == SWITCH:
                return value
    return ""


def silent_cores(source: Source) -> tuple[str, ...]:
    """The cores in this package that do not tell the path to a node."""
    return tuple(
        name
        for name, (module, owner, methods) in _CORES.items()
        if has_class(source, module, owner) and not any(_has(source, module, owner, method) for method in methods)
    )


def _has(source: Source, module: str, owner: str, method: str) -> bool:
    try:
        parameters_of(source, module, owner, method)
    except NotFound:
        return False
    return True
