"""The hooks against the parameter lists of the real releases: each must find what its family needs.

``signatures.json`` holds parameter names only, read from the released wheels: function -> parameters ->
releases. "=" marks a default.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvwitness.patches.contract import COMMON, HIMAMBA, HIRADIX, UNIFIED, UNIFIED_OBJ, Hook, mismatch
from kvwitness.patches.hooks import all_hooks

KNOWN = json.loads((Path(__file__).parent / "signatures.json").read_text())
RELEASES: list[str] = KNOWN["releases"]
LINKS = {"born", "backed_up", "left_l1", "resident_l1", "resident_l2", "read", "used"}

# Which trees with HiCache a release can build (HiRadixCache is dead code in 0.5.19 and 0.5.20), or only has
# (HiMambaRadixCache from 0.5.13 on).
FAMILIES = {
    "0.4.6.post5": (HIRADIX,),
    "0.4.7": (HIRADIX,),
    "0.4.8": (HIRADIX,),
    "0.4.9.post6": (HIRADIX,),
    "0.4.10.post2": (HIRADIX,),
    "0.5.2": (HIRADIX,),
    "0.5.4": (HIRADIX,),
    "0.5.6.post2": (HIRADIX,),
    "0.5.8": (HIRADIX,),
    "0.5.10.post1": (HIRADIX, HIMAMBA),
    "0.5.11": (HIRADIX, HIMAMBA),
    "0.5.12.post1": (HIRADIX, HIMAMBA, UNIFIED_OBJ),
    "0.5.14": (HIRADIX, HIMAMBA, UNIFIED_OBJ),
    "0.5.16": (HIRADIX, HIMAMBA, UNIFIED_OBJ),
    "0.5.17": (HIRADIX, HIMAMBA, UNIFIED),
    "0.5.18": (HIRADIX, UNIFIED),
    "0.5.20": (UNIFIED,),
    "0.5.21": (UNIFIED,),
    "0.5.22": (UNIFIED,),
    "0.5.23": (UNIFIED,),
}


def functions(release: str) -> dict[str, Any]:
    """Stand-ins with the parameters that the release's functions have."""
    found: dict[str, Any] = {}
    for name, by_signature in KNOWN["functions"].items():
        for signature, releases in by_signature.items():
            if release in releases:
                scope: dict[str, Any] = {}
                parameters = ", ".join(p + "None" if p.endswith("=") else p for p in signature.split())
                exec(f"def function({parameters}): ...", scope)
                found[name] = scope["function"]
    return found


def state(hook: Hook, found: dict[str, Any]) -> str:
    function = found.get(f"{hook.module}:{hook.owner}.{hook.attribute}")
    if function is None:
        return "missing"
    return "unknown" if mismatch(function, hook.parameters) else "installed"


def best_states(release: str, family: str) -> dict[str, tuple[str, set[str]]]:
    """As the verdicts see it: one state per hook name, of the tree's family; alternatives count as one."""
    found = functions(release)
    best: dict[str, tuple[str, set[str]]] = {}
    for hook in all_hooks():
        if hook.family in (COMMON, family):
            new = state(hook, found)
            old, links = best.get(hook.name, ("missing", set()))
            best[hook.name] = (new if old != "installed" else old, links | set(hook.links))
    return best


@pytest.mark.parametrize(("release", "family"), [(r, f) for r in RELEASES for f in FAMILIES[r]])
def test_every_hook_that_a_link_rests_on_is_there(release: str, family: str) -> None:
    needed = {name: s for name, (s, links) in best_states(release, family).items() if links & LINKS}
    assert {name for name, s in needed.items() if s != "installed"} == set()


@pytest.mark.parametrize(("release", "family"), [(r, f) for r in RELEASES for f in FAMILIES[r]])
def test_every_link_is_served(release: str, family: str) -> None:
    served: set[str] = set()
    for _, links in best_states(release, family).values():
        served |= links
    assert served >= LINKS


@pytest.mark.parametrize("release", RELEASES)
def test_no_function_is_wrapped_by_two_hooks_that_record_the_same(release: str) -> None:
    """Hooks of one name are installed once. Two names on one function must be of one purpose each."""
    found = functions(release)
    names: dict[str, set[str]] = defaultdict(set)
    for hook in all_hooks():
        if state(hook, found) == "installed" and not hook.attribute.startswith("__"):
            names[hook.target].add(hook.name)
    assert {target: found_names for target, found_names in names.items() if len(found_names) > 1} == {}
