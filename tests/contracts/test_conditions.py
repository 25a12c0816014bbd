"""What a release gives only under a condition: the tree's core, the page size, the schedule policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.packages import make_wheel
from kvwitness.patches.hooks import all_hooks
from kvwitness.tracer.contracts.conditions import REST_ON_PATHS
from kvwitness.tracer.contracts.cores import default_core, silent_cores
from kvwitness.tracer.contracts.facts import read_facts
from kvwitness.tracer.contracts.prove import Claim, TreeSupport
from kvwitness.tracer.contracts.source import open_wheel
from kvwitness.tracer.contracts.support import examine

SIGNATURES = Path(__file__).parent / "signatures"

ENVIRONMENT = """
    class Envs:
        OTHER = EnvStr("python")
        SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND = EnvStr("rust")
"""
PYTHON = "class UnifiedTreeCore:\n    def node_by_id(self, node_id): ...\n"
RUST = "class RustUnifiedTreeCore:\n    def node_by_id(self, node_id): raise NotImplementedError\n"


def tree_of(version: str, tree: str = "UnifiedRadixCache") -> TreeSupport:
    support = examine(read_facts(SIGNATURES / f"{version}.json"), all_hooks())
    return next(item for item in support.trees if item.tree == tree)


@pytest.mark.parametrize("told", [False, True])
def test_the_cores_are_read_from_the_source(tmp_path: Path, told: bool) -> None:
    modules = {
        "sglang.srt.environ": ENVIRONMENT,
        "sglang.srt.mem_cache.unified_cache.unified_tree_core": PYTHON,
        "sglang.srt.mem_cache.rust_tree_core.adapter": RUST
        + ("    def collect_path_info(self, node_ids): ...\n" if told else ""),
    }
    with open_wheel(make_wheel(tmp_path, modules)) as source:
        assert default_core(source) == "rust"
        assert silent_cores(source) == (() if told else ("rust",))


def test_without_a_choice_of_cores_there_is_none(tmp_path: Path) -> None:
    with open_wheel(
        make_wheel(tmp_path, {"sglang.srt.environ": "class Envs:\n    OTHER = EnvStr('rust')\n"})
    ) as source:
        assert default_core(source) == "" and silent_cores(source) == ()


def test_a_default_core_that_tells_no_paths_proves_nothing() -> None:
    tree = tree_of("0.5.21")
    assert not any(tree.confirms(claim) for claim in Claim)
    lost = {link.link: link.reason for link in tree.links if not link.provable}
    assert lost.keys() == REST_ON_PATHS
    assert all("rust tree core" in reason and "=python" in reason for reason in lost.values())


@pytest.mark.parametrize(
    ("version", "condition"), [("0.5.19", True), ("0.5.20", True), ("0.5.18", False), ("0.5.22", False)]
)
def test_a_core_that_is_not_the_default_is_a_condition(version: str, condition: bool) -> None:
    tree = tree_of(version)
    assert tree.confirms(Claim.L2_READ)
    assert any("rust" in text for text in tree.conditions) is condition


@pytest.mark.parametrize(
    ("version", "words"), [("0.4.6.post5", ["page size", "policy"]), ("0.4.8", ["page size"]), ("0.4.9.post6", [])]
)
def test_what_the_early_releases_ask_for(version: str, words: list[str]) -> None:
    tree = tree_of(version, "HiRadixCache")
    assert tree.confirms(Claim.L1_READ) and tree.confirms(Claim.L2_READ)
    # Storage came with 0.4.9.
    assert tree.confirms(Claim.L3_READ) is (version == "0.4.9.post6")
    assert len(tree.conditions) == len(words)
    assert all(word in text for word, text in zip(words, tree.conditions, strict=True))


def test_the_tree_of_recurrent_states_says_what_its_claims_are_about() -> None:
    tree = tree_of("0.5.12.post1", "HiMambaRadixCache")
    assert tree.confirms(Claim.L2_READ)
    assert any("full-attention KV" in text for text in tree.conditions)
