"""From hooks that fit to links, from links to claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from journal_tools import described

from contracts.packages import REGISTRY, UNIFIED_MODULE, hook, make_folder, make_wheel, modules_for
from kvwitness.patches.contract import COMMON, Hook
from kvwitness.patches.hooks import all_hooks
from kvwitness.tracer.contracts.check import Fit, HookCheck, NotRead, check
from kvwitness.tracer.contracts.conditions import REST_ON_PATHS, pathless
from kvwitness.tracer.contracts.facts import ReleaseFacts, extract, read_facts, write_facts
from kvwitness.tracer.contracts.prove import Claim, ReleaseSupport, hook_links, prove
from kvwitness.tracer.contracts.source import NotSglang, open_folder, open_wheel
from kvwitness.tracer.contracts.trees import default_tree
from kvwitness.tracer.ledger.facts import HookState, InstanceFacts
from kvwitness.tracer.model import Link
from kvwitness.tracer.verdicts.links import HOOK_OF_LINK, unsound_links

SCHEDULER = {"module": "sglang.srt.managers.scheduler", "owner": "Scheduler", "family": COMMON}
POOL = {"module": "sglang.srt.mem_cache.pool_host.base", "owner": "HostKVCache", "family": COMMON}
HOOKS = [
    hook("__init__", "self server_args", "instance", name="scheduler.init", **SCHEDULER),
    hook("run_batch", "self batch", "used", name="scheduler.run_batch", **SCHEDULER),
    hook("_add_request_to_queue", "self req", "born", name="scheduler.queue", **SCHEDULER),
    hook("abort", "self req", name="scheduler.abort", **SCHEDULER),
    hook("alloc", "self need_size", "resident_l2", name="host_pool.alloc", **POOL),
    hook("_reset_full", "self", "epoch"),
    hook("match_prefix", "self params", "resident_l1 resident_l2 left_l1"),
    hook("insert", "self params", "born"),
    hook("_evict", "self params", "left_l1"),
    hook("_finish_write_through_ack", "self ack_id", "backed_up"),
    hook("loading_check", "self", "read"),
    hook("start_writing", "self", "content"),
    hook("on_release", "self req", "used"),
    hook("prefetch_from_storage", "self request", "prefetched"),
]
SIGNATURES = Path(__file__).parent / "signatures"


def facts_of(tmp_path: Path, hooks: list[Hook], changed: dict[str, str] | None = None) -> ReleaseFacts:
    with open_wheel(make_wheel(tmp_path, modules_for(hooks, changed))) as source:
        return extract(source, hooks)


def support_of(tmp_path: Path, hooks: list[Hook], changed: dict[str, str] | None = None) -> ReleaseSupport:
    facts = facts_of(tmp_path, hooks, changed)
    return prove(facts, check(hooks, facts))


def test_where_every_hook_fits_every_claim_can_be_confirmed(tmp_path: Path) -> None:
    support = support_of(tmp_path, HOOKS)
    assert support.default_tree == "UnifiedRadixCache"
    assert support.default.family == "unified"
    assert all(link.provable and link.hooks and not link.reason for link in support.default.links)
    assert all(support.default.confirms(claim) for claim in Claim)


@pytest.mark.parametrize("broken", HOOKS, ids=lambda hook: hook.name)
@pytest.mark.parametrize("parameters", ["", "(self, something, else_)"], ids=["absent", "changed"])
def test_each_hook_that_does_not_fit_costs_its_links_and_what_rests_on_them(
    tmp_path: Path, broken: Hook, parameters: str
) -> None:
    support = support_of(tmp_path, HOOKS, {broken.target: parameters}).default
    needed_by_all = bool({"instance", "epoch"} & set(broken.links))
    assert support.setup.provable is not needed_by_all
    for link in support.links:
        own = bool(set(hook_links(link.link)) & set(broken.links))
        assert link.provable is not (own or needed_by_all), link
        assert (f"{broken.name}: " in link.reason) is own
    lost = {link.link for link in support.links if not link.provable}
    for claim in support.claims:
        assert set(claim.missing) <= lost
        assert claim.confirmable is not bool(claim.missing)
    if Link.READ in lost:
        assert not support.confirms(Claim.L2_READ) and not support.confirms(Claim.L3_READ)


def missed_by_verdicts(checks: tuple[HookCheck, ...], family: str) -> set[Link]:
    """The links that a journal with this coverage would not let a verdict rest on."""
    empty: dict[str, Any] = dict.fromkeys(InstanceFacts.__struct_fields__, ())
    filled = {
        "facts": described(
            {
                "family": family,
                "ranks": {"tp_size": 1},
                "page_size": 16,
                "pools": [{"pool": 0, "hooked": True}],
            }
        ),
        "hooks": tuple(HookState(c.name, c.target, str(c.fit), c.links, c.detail, c.family) for c in checks),
        "hook_failures": {},
    }
    return set(unsound_links(InstanceFacts(**(empty | filled))))


@pytest.mark.parametrize("broken", HOOKS, ids=lambda hook: hook.name)
def test_the_verdicts_would_miss_the_same_links(tmp_path: Path, broken: Hook) -> None:
    """The answer before a run and the one that a journal's coverage gives."""
    checks = check(HOOKS, facts_of(tmp_path, HOOKS, {broken.target: ""}))
    own = {link for link in HOOK_OF_LINK if set(hook_links(link)) & set(broken.links)}
    assert missed_by_verdicts(checks, "unified") == own


@pytest.mark.parametrize("path", sorted(SIGNATURES.glob("*.json")), ids=lambda path: path.stem)
def test_the_verdicts_would_miss_the_same_links_on_every_release(path: Path) -> None:
    facts = read_facts(path)
    checks = check(all_hooks(), facts)
    for tree in prove(facts, checks).trees:
        if tree.family and tree.setup.provable:
            missed = missed_by_verdicts(checks, tree.family)
            # That the tree's core tells no paths is seen in a run by the paths, not by the hooks.
            unseen = REST_ON_PATHS if pathless(tree.family, facts) else frozenset[Link]()
            assert missed | unseen == {link.link for link in tree.links if not link.provable}


def test_one_of_several_hooks_of_a_name_is_enough(tmp_path: Path) -> None:
    older = hook("match_prefix", "self key", "resident_l1 resident_l2 left_l1")
    newer = hook("match_prefix", "self params", "resident_l1 resident_l2 left_l1")
    modules = {UNIFIED_MODULE: "class UnifiedRadixCache:\n    def match_prefix(self, params): ...\n"}
    modules["sglang.srt.mem_cache.registry"] = REGISTRY
    with open_wheel(make_wheel(tmp_path, modules)) as source:
        facts = extract(source, [older, newer])
    for hooks in ([older, newer], [newer, older]):
        links = {link.link: link for link in prove(facts, check(hooks, facts)).default.links}
        assert links[Link.LEFT_L1].provable and links[Link.LEFT_L1].hooks == ("tree.match_prefix",)
        assert links[Link.BORN].reason == "no hook serves this link"
    alone = {link.link: link for link in prove(facts, check([older], facts)).default.links}
    assert not alone[Link.LEFT_L1].provable
    assert "tree.match_prefix: parameters are (self, params)" in alone[Link.LEFT_L1].reason


def test_a_tree_without_hooks_says_so(tmp_path: Path) -> None:
    hooks = [hook("match_prefix", "self params", "resident_l1")]
    modules = {
        "sglang.srt.mem_cache.hiradix_cache": "class HiRadixCache: ...\n",
        "sglang.srt.managers.scheduler": """
            class Scheduler:
                def init_cache(self):
                    if self.disable_radix_cache:
                        self.tree_cache = ChunkCache()
                    else:
                        if envs.UNIFIED.get():
                            self.tree_cache = UnifiedRadixCache(params)
                        elif self.enable_hierarchical_cache:
                            self.tree_cache = HiRadixCache(params)
        """,
    }
    with open_wheel(make_wheel(tmp_path, modules)) as source:
        facts = extract(source, hooks)
    assert (facts.default_tree, facts.trees) == ("HiRadixCache", ("HiRadixCache",))
    assert facts.default_from == "sglang.srt.managers.scheduler:Scheduler.init_cache"
    support = prove(facts, check(hooks, facts)).default
    assert {link.reason for link in support.links} == {"kvwitness has no hooks for HiRadixCache"}
    assert not any(support.confirms(claim) for claim in Claim)


def test_generations_of_one_tree_are_told_apart(tmp_path: Path) -> None:
    """The family that fits serves the tree, whichever comes first."""
    old = [hook("insert", "self key", "born", family="unified_before")]
    new = [hook("insert", "self params", "born")]
    modules = {UNIFIED_MODULE: "class UnifiedRadixCache:\n    def insert(self, params): ...\n"}
    with open_wheel(make_wheel(tmp_path, modules)) as source:
        for hooks in ([*old, *new], [*new, *old]):
            facts = extract(source, hooks)
            (tree,) = prove(facts, check(hooks, facts)).trees
            assert tree.family == "unified"


def test_a_release_whose_choice_cannot_be_read_claims_nothing(tmp_path: Path) -> None:
    modules = modules_for(HOOKS)
    modules["sglang.srt.mem_cache.registry"] = "def default_radix_cache_factory(ctx): return ctx.make()\n"
    with open_wheel(make_wheel(tmp_path, modules)) as source:
        facts = extract(source, HOOKS)
        assert default_tree(source) == ("", "")
    support = prove(facts, check(HOOKS, facts))
    assert not support.default.confirms(Claim.L2_READ)
    assert "could not be told" in support.default.links[0].reason
    assert support.trees[0].confirms(Claim.L2_READ)


def test_a_wheel_and_a_folder_give_the_same_facts(tmp_path: Path) -> None:
    modules = modules_for(HOOKS)
    with open_wheel(make_wheel(tmp_path, modules)) as source:
        from_wheel = extract(source, HOOKS)
    from_folder = extract(open_folder(make_folder(tmp_path / "site", modules)), HOOKS)
    assert from_wheel == from_folder
    assert read_facts(write_facts(from_wheel, tmp_path / "facts")) == from_wheel


def test_facts_from_before_a_hook_existed_are_refused(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, HOOKS)
    with pytest.raises(NotRead, match="brand_new"):
        check([hook("brand_new", "self")], facts)


def test_functions_defined_in_several_ways_are_not_guessed(tmp_path: Path) -> None:
    text = """
        class UnifiedRadixCache:
            if FAST:
                def insert(self, params): ...
            else:
                def insert(self, key): ...
    """
    hooks = [hook("insert", "self params", "born")]
    with open_wheel(make_wheel(tmp_path, {UNIFIED_MODULE: text})) as source:
        (found,) = check(hooks, extract(source, hooks))
    assert found.fit is Fit.MISSING
    assert found.detail == "defined in several ways: (self, key) or (self, params)"


def test_what_is_no_sglang_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.whl"
    text.write_text("no archive")
    (tmp_path / "sglang").mkdir()
    with pytest.raises(NotSglang, match="not a wheel"), open_wheel(text):
        pass
    with pytest.raises(NotSglang, match="no such file"), open_wheel(tmp_path / "absent.whl"):
        pass
    with pytest.raises(NotSglang, match="no sglang inside"):
        open_folder(tmp_path / "sglang")


def test_broken_modules_are_as_good_as_absent(tmp_path: Path) -> None:
    hooks = [hook("insert", "self params", "born")]
    with open_wheel(make_wheel(tmp_path, {UNIFIED_MODULE: "class UnifiedRadixCache(:\n"})) as source:
        facts = extract(source, hooks)
    assert facts.trees == () and "does not exist" in next(iter(facts.absent.values()))


def test_facts_hold_names_only(tmp_path: Path) -> None:
    """The kept facts must not carry code along: neither defaults nor annotations."""
    text = "class UnifiedRadixCache:\n    def insert(self, params: Secret, size: int = some_call(1)): return 2\n"
    hooks = [hook("insert", "self params", "born")]
    with open_wheel(make_wheel(tmp_path, {UNIFIED_MODULE: text})) as source:
        facts = extract(source, hooks)
    assert list(facts.functions.values()) == ["(self, params, size=...)"]
    assert b"some_call" not in msgspec.json.encode(facts)
