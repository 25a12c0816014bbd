"""Which links of the chain can be proven on a release, and so which claims.

A link needs every hook that it rests on; of several hooks of one name, which are alternatives for different
releases, one is enough. This is what the verdicts ask of a journal (kvwitness.tracer.verdicts.links), asked
before there is one. On top of it, every link needs the hooks that see the process start, the cache being set
up and the cache being reset: without them a journal has no facts to be read with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from kvwitness.patches.contract import COMMON
from kvwitness.tracer.contracts.check import Fit, HookCheck
from kvwitness.tracer.contracts.conditions import REST_ON_PATHS, conditions, pathless
from kvwitness.tracer.contracts.facts import ReleaseFacts
from kvwitness.tracer.contracts.trees import TREES
from kvwitness.tracer.model import Link
from kvwitness.tracer.verdicts.links import HOOK_OF_LINK

SETUP: Final = ("instance", "epoch")
"""What hooks declare that every link rests on: the instance's facts, the resets of its cache."""


_NO_SETUP: Final = "its own hooks fit; the set-up is not seen"


class Claim(StrEnum):
    """What a verdict may say about a token range."""

    L1_READ = "L1 read"
    L2_READ = "L2 read"
    L3_READ = "L3 read"


LINKS_OF_CLAIM: Final[dict[Claim, tuple[Link, ...]]] = {
    Claim.L1_READ: (Link.BORN, Link.RESIDENT_L1, Link.USED),
    Claim.L2_READ: (Link.BORN, Link.BACKED_UP, Link.LEFT_L1, Link.RESIDENT_L2, Link.READ, Link.USED),
    Claim.L3_READ: (Link.PREFETCHED, Link.RESIDENT_L2, Link.READ, Link.USED),
}
"""The links that rest on hooks; that the record is complete and the witnesses agree is seen in a run only."""


class SetupSupport(msgspec.Struct, frozen=True):
    """What every link needs: the recorder is opened, the cache's set-up and resets are seen."""

    provable: bool
    hooks: tuple[str, ...]
    reason: str = ""


class LinkSupport(msgspec.Struct, frozen=True):
    """One link on one tree."""

    link: Link
    provable: bool
    hooks: tuple[str, ...]
    """Names of the hooks that it rests on."""
    reason: str = ""
    """Why it cannot be proven: which hook, and what is wrong with it."""


class ClaimSupport(msgspec.Struct, frozen=True):
    """One claim on one tree."""

    claim: Claim
    confirmable: bool
    missing: tuple[Link, ...] = ()


class TreeSupport(msgspec.Struct, frozen=True):
    """What can be proven when the server builds this tree."""

    tree: str
    family: str
    """The family of hooks that serves it best; "" when there is none."""
    setup: SetupSupport
    links: tuple[LinkSupport, ...]
    claims: tuple[ClaimSupport, ...]
    conditions: tuple[str, ...] = ()
    """What else has to be so, in words."""

    def confirms(self, claim: Claim) -> bool:
        """Whether the claim can be confirmed."""
        return any(item.claim is claim and item.confirmable for item in self.claims)


class ReleaseSupport(msgspec.Struct, frozen=True):
    """What can be proven on one release."""

    version: str
    default_tree: str
    default_from: str
    loads_plugins: bool
    trees: tuple[TreeSupport, ...]

    @property
    def default(self) -> TreeSupport:
        """The tree of a plain model; one without anything proven where the release has none that is known."""
        for tree in self.trees:
            if tree.tree == self.default_tree:
                return tree
        return _unserved("", "which tree this release builds for HiCache could not be told from its source")


def hook_links(link: Link) -> tuple[str, ...]:
    """What hooks declare, of which each must be served for the link to be proven."""
    names: str | tuple[str, ...] = HOOK_OF_LINK[link]
    return (names,) if isinstance(names, str) else names


def prove(facts: ReleaseFacts, checks: Sequence[HookCheck]) -> ReleaseSupport:
    """What the checks of one release add up to, for each tree that it ships."""
    return ReleaseSupport(
        version=facts.version,
        default_tree=facts.default_tree,
        default_from=facts.default_from,
        loads_plugins=facts.loads_plugins,
        trees=tuple(_best(tree, facts, checks) for tree in facts.trees),
    )


def _best(tree: str, facts: ReleaseFacts, checks: Sequence[HookCheck]) -> TreeSupport:
    """Which family a tree belongs to is what its hooks say: one of them is a method of the tree itself."""
    families = dict.fromkeys(check.family for check in checks if check.owner == tree and check.family != COMMON)
    if not families:
        return _unserved(tree, f"kvwitness has no hooks for {tree}")
    served = [_of_family(tree, family, facts, checks) for family in families]
    # Families of one tree are generations of its interface: at most one fits a release.
    return max(served, key=lambda item: (_count(item.claims), sum(link.provable for link in item.links)))


def _count(claims: Iterable[ClaimSupport]) -> int:
    return sum(claim.confirmable for claim in claims)


def _unserved(tree: str, reason: str) -> TreeSupport:
    links = tuple(LinkSupport(link, False, (), reason) for link in HOOK_OF_LINK)
    return TreeSupport(tree, "", SetupSupport(False, (), reason), links, _claims(links))


def _of_family(tree: str, family: str, facts: ReleaseFacts, checks: Sequence[HookCheck]) -> TreeSupport:
    others = TREES.keys() - {tree}
    relevant = _alternatives(c for c in checks if c.family in (COMMON, family) and c.owner not in others)
    basis = [check for check in relevant if set(check.links) & set(SETUP)]
    setup = SetupSupport(all(check.fits for check in basis), _names(basis), _wrong(basis))
    silent = pathless(family, facts)
    links = tuple(_link(link, relevant, setup, silent if link in REST_ON_PATHS else "") for link in HOOK_OF_LINK)
    return TreeSupport(tree, family, setup, links, _claims(links), conditions(family, facts))


def _alternatives(checks: Iterable[HookCheck]) -> list[HookCheck]:
    """One check per hook name: one that fits if any does, else one that came closest."""
    closeness = {Fit.INSTALLABLE: 2, Fit.UNKNOWN_SIGNATURE: 1, Fit.MISSING: 0}
    best: dict[str, HookCheck] = {}
    for check in checks:
        known = best.get(check.name)
        if known is None or closeness[check.fit] > closeness[known.fit]:
            best[check.name] = check
    return list(best.values())


def _link(link: Link, relevant: list[HookCheck], setup: SetupSupport, silent: str) -> LinkSupport:
    names = hook_links(link)
    serving = [check for check in relevant if set(check.links) & set(names)]
    if {name for check in serving for name in check.links}.issuperset(names):
        reason = _wrong(serving) or (silent if setup.provable else _NO_SETUP)
    else:
        reason = "no hook serves this link"
    return LinkSupport(link, not reason, _names(serving), reason)


def _names(checks: Iterable[HookCheck]) -> tuple[str, ...]:
    return tuple(check.name for check in checks)


def _wrong(checks: Iterable[HookCheck]) -> str:
    return "; ".join(f"{check.name}: {check.detail}" for check in checks if not check.fits)


def _claims(links: Sequence[LinkSupport]) -> tuple[ClaimSupport, ...]:
    proven = {link.link for link in links if link.provable}
    missing = {claim: tuple(x for x in needed if x not in proven) for claim, needed in LINKS_OF_CLAIM.items()}
    return tuple(ClaimSupport(claim, not lost, lost) for claim, lost in missing.items())
