"""Small SGLang packages, made up for tests: a folder of modules, or a wheel."""

from __future__ import annotations

import textwrap
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvwitness.patches.contract import Hook
from kvwitness.tracer.contracts.facts import ReleaseFacts

VERSION = "9.8.7"

UNIFIED_MODULE = "sglang.srt.mem_cache.unified_radix_cache"

REGISTRY = """
    def default_radix_cache_factory(ctx):
        if ctx.enable_lmcache:
            return Other()
        return _create(ctx)

    def _create(ctx):
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        cache = (ctx.cache_class or UnifiedRadixCache)(ctx.params)
        return cache
"""


def files_of(modules: Mapping[str, str]) -> dict[str, str]:
    """The package's files by path, from the source text of its modules."""
    files = {"sglang/__init__.py": "raise RuntimeError('never import this')\n"}
    for name, text in modules.items():
        files[f"{name.replace('.', '/')}.py"] = textwrap.dedent(text)
    return files


def make_wheel(folder: Path, modules: Mapping[str, str], version: str = VERSION) -> Path:
    """A wheel with these modules."""
    path = folder / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files_of(modules).items():
            archive.writestr(name, text)
        archive.writestr(f"sglang-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nVersion: {version}\n")
    return path


def make_folder(site: Path, modules: Mapping[str, str], version: str = VERSION) -> Path:
    """The same as an installed package; the path of ``.../sglang``."""
    for name, text in files_of(modules).items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = site / f"sglang-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return site / "sglang"


def modules_for(hooks: Sequence[Hook], changed: Mapping[str, str] | None = None) -> dict[str, str]:
    """Source text in which every hook finds what it knows, but for ``changed`` ({target: parameters or ""}).

    A target whose parameters are "" is left out. Where hooks have one target, the first of them is served.
    """
    texts = {hook.target: f"({', '.join(hook.parameters)})" for hook in reversed(hooks)}
    return _modules(hooks, texts | dict(changed or {}))


def modules_like(
    facts: ReleaseFacts, hooks: Sequence[Hook], changed: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Source text in which the hooks find what they find in a real release, but for ``changed``."""
    return _modules(hooks, facts.functions | dict(changed or {}))


def _modules(hooks: Sequence[Hook], texts: Mapping[str, str]) -> dict[str, str]:
    bodies: dict[str, dict[str, list[str]]] = {}
    for hook in {hook.target: hook for hook in hooks}.values():
        text = texts.get(hook.target)
        if text:
            functions = bodies.setdefault(hook.module, {}).setdefault(hook.owner, [])
            functions.append(f"def {hook.attribute}{text}: ...")
    modules = {"sglang.srt.plugins": "", "sglang.srt.mem_cache.registry": REGISTRY}
    for module, owners in bodies.items():
        lines = []
        for owner, functions in owners.items():
            lines += [f"class {owner}:", *(f"    {line}" for line in functions)] if owner else functions
        modules[module] = "\n".join(lines) + "\n"
    return modules


def hook(attribute: str, parameters: str, links: str = "", **rest: Any) -> Hook:
    """A hook on the unified tree, or wherever ``rest`` says."""
    settings: dict[str, Any] = {
        "name": f"tree.{attribute}",
        "module": UNIFIED_MODULE,
        "owner": "UnifiedRadixCache",
        "family": "unified",
    } | rest
    return Hook(
        attribute=attribute,
        parameters=tuple(parameters.split()),
        links=tuple(links.split()),
        seen=lambda *_: None,
        **settings,
    )
