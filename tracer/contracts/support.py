"""The page that says which links can be proven on which release, and why the others cannot."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvwitness.patches.contract import Hook
from kvwitness.tracer.contracts.check import check
from kvwitness.tracer.contracts.facts import ReleaseFacts, read_facts
from kvwitness.tracer.contracts.prove import Claim, ReleaseSupport, TreeSupport, prove
from kvwitness.tracer.contracts.releases import version_key
from kvwitness.tracer.contracts.trees import TREES
from kvwitness.tracer.verdicts.links import HOOK_OF_LINK

_HEAD = """\
# SGLang releases

What kvwitness can prove on each release, for the tree that HiCache builds for a plain (not hybrid) model.
Made by `make support` from the published wheels; do not edit.

A *yes* says that every hook that the link rests on exists in the release with a signature that the hook
knows, which is what kvwitness checks again in the server when it installs them. It does not say that
kvwitness has been run against that release. What a run could not observe lowers its verdicts, whatever this
page says. Releases that are not listed, and changed installations: `kvwitness doctor`.

The tree is read off SGLang's own code, with HiCache on and every other switch off. *Set-up* stands for
what every link needs: the start of the process, the set-up and the resets of the cache. *Plugin* says
whether SGLang itself loads plugins, so that a kvwitness that is installed next to it is found. The links are
those of the evidence model.
"""


def examine(facts: ReleaseFacts, hooks: Sequence[Hook]) -> ReleaseSupport:
    """What can be proven on a release, from its facts."""
    return prove(facts, check(hooks, facts))


def read_all(folder: Path) -> list[ReleaseFacts]:
    """The facts of every release kept in ``folder``, newest first."""
    facts = [read_facts(path) for path in folder.glob("*.json")]
    return sorted(facts, key=lambda item: version_key(item.version), reverse=True)


def support_page(releases: Sequence[ReleaseSupport]) -> str:
    """The page, for releases in the given order."""
    parts = [_HEAD, _main_table(releases)]
    reasons = _reasons(releases)
    if reasons:
        parts += ["## Why not\n", *reasons]
    only = _conditions(releases)
    if only:
        parts += ["## Only if\n", _ONLY, *only]
    others = _others(releases)
    if others:
        parts += ["## Other trees\n", _OTHERS, others]
    return "\n".join(parts)


_ONLY = """\
Conditions under which the answers above and below hold, where a release has one.
"""

_OTHERS = """\
Trees that a release ships and builds for other models or settings (hybrid models; an environment variable of
SGLang). A tree that is shipped may also be one that nothing builds any more.
"""


def _main_table(releases: Sequence[ReleaseSupport]) -> str:
    claims, links = list(Claim), list(HOOK_OF_LINK)
    rows = [["SGLang", "tree", *claims, "set-up", *(f"`{link}`" for link in links), "plugin"]]
    for release in releases:
        tree = release.default
        row = [release.version, release.default_tree or "?", *(_yes(tree.confirms(claim)) for claim in claims)]
        row += [_yes(tree.setup.provable), *(_yes(link.provable) for link in tree.links), _yes(release.loads_plugins)]
        rows.append(row)
    return _table(rows)


def _reasons(releases: Sequence[ReleaseSupport]) -> list[str]:
    """Neighbouring releases with the same gaps share a section."""
    sections: list[str] = []
    for gaps, group in itertools.groupby(releases, key=lambda release: _gaps(release.default)):
        if gaps:
            title = _span([release.version for release in group])
            sections.append("\n".join([f"### {title}\n", *gaps, ""]))
    return sections


def _conditions(releases: Sequence[ReleaseSupport]) -> list[str]:
    """Neighbouring releases with the same condition on a tree share a line."""
    found: dict[tuple[str, str], list[int]] = {}
    for position, release in enumerate(releases):
        for tree in release.trees:
            for text in tree.conditions if any(tree.confirms(claim) for claim in Claim) else ():
                found.setdefault((tree.tree, text), []).append(position)
    lines = []
    for (tree_name, text), positions in found.items():
        versions = [releases[position].version for position in positions]
        lines.append(f"- {tree_name}, {_span(versions)}: {_plain(text)}.")
    return ["\n".join([*lines, ""])] if lines else []


def _gaps(tree: TreeSupport) -> tuple[str, ...]:
    reasons: dict[str, list[str]] = {}
    if tree.setup.reason:
        reasons.setdefault(tree.setup.reason, []).append("set-up")
    for link in tree.links:
        if not link.provable:
            reasons.setdefault(link.reason, []).append(f"`{link.link}`")
    if len(reasons) == 1 and not tree.family:
        return (f"- {_plain(next(iter(reasons)))}.",)
    return tuple(f"- {', '.join(names)}: {_plain(reason)}" for reason, names in reasons.items())


def _plain(text: str) -> str:
    """``text`` without what Markdown would take for emphasis (``*args``, a leading ``_``)."""
    return re.sub(r"(?<!\w)[_*]+", lambda match: "".join(f"\\{mark}" for mark in match[0]), text)


def _others(releases: Sequence[ReleaseSupport]) -> str:
    """A line for each other tree and each run of releases with the same answer."""
    rows = [["tree", "SGLang", *Claim]]
    for name in TREES:
        with_tree = [
            (release.version, [_yes(tree.confirms(claim)) for claim in Claim])
            for release in releases
            for tree in release.trees
            if tree.tree == name != release.default_tree
        ]
        for answers, group in itertools.groupby(with_tree, key=lambda item: item[1]):
            rows.append([name, _span([version for version, _ in group]), *answers])
    return _table(rows) if len(rows) > 1 else ""


def _span(versions: Sequence[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[-1]} to {versions[0]}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(rows: list[list[str]]) -> str:
    lines = [_row(rows[0]), _row("---" for _ in rows[0]), *(_row(row) for row in rows[1:])]
    return "\n".join([*lines, ""])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
