"""The page of supported releases is what the check says about the facts that were read from the wheels."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwitness.patches.hooks import all_hooks
from kvwitness.tracer.contracts.check import NotRead
from kvwitness.tracer.contracts.facts import extract, read_facts
from kvwitness.tracer.contracts.prove import Claim
from kvwitness.tracer.contracts.releases import RELEASES, find_wheel, version_key, wheel_cache
from kvwitness.tracer.contracts.source import open_wheel
from kvwitness.tracer.contracts.support import examine, read_all, support_page

ROOT = Path(__file__).parents[2]
SIGNATURES = Path(__file__).parent / "signatures"
STALE = "the hooks changed: run `make support`"


def test_the_page_says_what_the_check_says() -> None:
    try:
        releases = [examine(facts, all_hooks()) for facts in read_all(SIGNATURES)]
    except NotRead as error:
        pytest.fail(f"{error} was not read from the wheels; {STALE}")
    assert (ROOT / "docs" / "support.md").read_text() == support_page(releases), STALE


def test_the_facts_of_every_release_are_kept() -> None:
    assert sorted(path.stem for path in SIGNATURES.glob("*.json")) == sorted(RELEASES)
    assert list(RELEASES) == sorted(RELEASES, key=version_key)


SAMPLE = {"0.4.6.post5", "0.5.4", "0.5.12.post1", "0.5.16", "0.5.19", "0.5.23"}


@pytest.mark.parametrize("version", [pytest.param(v, marks=() if v in SAMPLE else pytest.mark.slow) for v in RELEASES])
def test_the_kept_facts_are_those_of_the_wheel(version: str) -> None:
    wheel = find_wheel(version, wheel_cache())
    if wheel is None:
        pytest.skip("its wheel is not on this machine (make wheels)")
    kept = read_facts(SIGNATURES / f"{version}.json")
    with open_wheel(wheel) as source:
        found = extract(source, all_hooks())
    assert found == kept, STALE


# Which tree a plain model gets, read by eye in the releases: keeps the derivation honest.
@pytest.mark.parametrize(
    ("tree", "versions"),
    [
        ("HiRadixCache", RELEASES[: RELEASES.index("0.5.19")]),
        ("UnifiedRadixCache", RELEASES[RELEASES.index("0.5.19") :]),
    ],
)
def test_the_tree_of_a_plain_model(tree: str, versions: tuple[str, ...]) -> None:
    assert {read_facts(SIGNATURES / f"{version}.json").default_tree for version in versions} == {tree}


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23"])
def test_the_releases_that_kvwitness_is_run_against_can_be_proven(version: str) -> None:
    support = examine(read_facts(SIGNATURES / f"{version}.json"), all_hooks())
    assert all(support.default.confirms(claim) for claim in Claim)
