"""What was read from one release: names and parameters, no code. Small enough to be kept in a repository."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvwitness.patches.contract import Hook
from kvwitness.tracer.contracts.cores import default_core, silent_cores
from kvwitness.tracer.contracts.find import NotFound, parameters_of
from kvwitness.tracer.contracts.source import Source
from kvwitness.tracer.contracts.trees import default_tree, shipped_trees

_PLUGINS = "sglang.srt.plugins"


class ReleaseFacts(msgspec.Struct, frozen=True):
    """One SGLang package, as far as the hooks are concerned."""

    version: str
    trees: tuple[str, ...]
    """Tree classes with an L2 that it ships."""
    default_tree: str
    """The one that it builds for a plain model with HiCache on; "" when that could not be told."""
    default_from: str
    """Where its source says so."""
    loads_plugins: bool
    """Whether it loads plugins that other distributions announce: how kvwitness gets into its processes."""
    functions: dict[str, str]
    """Parameters of each hooked function that exists, by the hook's target."""
    absent: dict[str, str]
    """Why there is no such function, for every other target."""
    default_core: str = ""
    """The core of the unified tree that it takes by itself; "" where there is no choice."""
    silent_cores: tuple[str, ...] = ()
    """Its cores that do not tell the path to a node."""


def extract(source: Source, hooks: Sequence[Hook]) -> ReleaseFacts:
    """Read what the hooks need to know about a package."""
    functions, absent = dict[str, str](), dict[str, str]()
    for hook in sorted(hooks, key=lambda hook: hook.target):
        try:
            functions[hook.target] = parameters_of(source, hook.module, hook.owner, hook.attribute)
        except NotFound as error:
            absent[hook.target] = str(error)
    tree, where = default_tree(source)
    return ReleaseFacts(
        version=source.version,
        trees=shipped_trees(source),
        default_tree=tree,
        default_from=where,
        loads_plugins=source.module(_PLUGINS) is not None,
        functions=functions,
        absent=absent,
        default_core=default_core(source),
        silent_cores=silent_cores(source),
    )


def write_facts(facts: ReleaseFacts, folder: Path) -> Path:
    """Keep the facts as ``<version>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{facts.version}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")
    return path


def read_facts(path: Path) -> ReleaseFacts:
    """The facts of one release, as :func:`write_facts` kept them."""
    return msgspec.json.decode(path.read_bytes(), type=ReleaseFacts)
