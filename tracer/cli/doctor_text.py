"""What ``kvwitness doctor`` prints for people."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.table import Table

from kvwitness.collectors.live.preflight import REMOTE_EXEC, GdbFound
from kvwitness.patches.contract import COMMON
from kvwitness.tracer.cli.output import console, display
from kvwitness.tracer.contracts.check import HookCheck
from kvwitness.tracer.contracts.environment import JournalRoom, PythonFacts
from kvwitness.tracer.contracts.prove import SETUP, Claim, ClaimSupport, ReleaseSupport, TreeSupport, hook_links
from kvwitness.tracer.verdicts.links import HOOK_OF_LINK


def print_environment(python: PythonFacts, room: JournalRoom, gdb: GdbFound | None) -> None:
    """The Python, the place for the journals, and what goes into a server that was started without kvwitness."""
    click.echo(f"Python {python.python}: {python.executable}")
    if python.plugin_visible:
        plugin = "installed, SGLang can load it"
    elif python.announced:
        plugin = "announced to SGLang, but kvwitness.patches cannot be imported there: install kvwitness again"
    else:
        plugin = "not installed there; kvwitness serve brings it along"
    click.echo(f"kvwitness plugin: {plugin}")
    click.echo(f"journals: {_journals(room)}")
    click.echo(f"attach --live: {_way_in(gdb)}")


def _way_in(gdb: GdbFound | None) -> str:
    if gdb is None:
        return f"by this Python's own {REMOTE_EXEC}"
    return f"{gdb.problem}: {gdb.what_to_do}" if gdb.problem else f"by {gdb.gdb}"


def _journals(room: JournalRoom) -> str:
    if room.directory is None:
        return "KVWITNESS_DIR is not set, nothing is recorded; kvwitness serve sets it"
    where = f"KVWITNESS_DIR={room.directory}"
    if room.problem:
        return f"{where}: {room.problem}"
    free, quota = room.free_bytes / 1e9, room.quota_bytes >> 20
    return f"{where}, {free:.1f} GB free: {room.journals} journals of {quota} MiB fit, one for each process"


def print_package(source: str, support: ReleaseSupport, checks: Sequence[HookCheck]) -> None:
    """The table of links, then a line for each claim."""
    click.echo(f"\nsglang {support.version}: {source}")
    tree = support.default
    if support.default_tree:
        click.echo(f"HiCache builds {support.default_tree} for a plain model ({support.default_from})")
    if not support.loads_plugins:
        click.echo("This release does not load plugins: an installed kvwitness is not enough, use kvwitness serve")
    display(console(), _table(tree))
    for item in tree.claims:
        click.echo(_claim(item))
    for condition in tree.conditions:
        click.echo(f"only if: {condition}")
    for other in support.trees:
        if other.tree != support.default_tree:
            claims = [claim for claim in Claim if other.confirms(claim)]
            able = f"{', '.join(claims)} can be confirmed" if claims else "nothing can be confirmed"
            click.echo(f"with {other.tree}, if the server builds that instead: {able}")
    extra = _beside(tree, checks)
    if extra:
        click.echo(f"not installed, and no link needs them: {', '.join(extra)}")


def _table(tree: TreeSupport) -> Table:
    table = Table()
    for name in ("link", "can be proven", "hooks", "reason if not"):
        table.add_column(name, overflow="fold")
    table.add_row("(set-up)", _yes(tree.setup.provable), _lines(tree.setup.hooks), _reasons(tree.setup.reason))
    for link in tree.links:
        table.add_row(link.link, _yes(link.provable), _lines(link.hooks), _reasons(link.reason))
    return table


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _lines(names: Sequence[str]) -> str:
    return "\n".join(names)


def _reasons(reason: str) -> str:
    return reason.replace("; ", "\n")


def _claim(item: ClaimSupport) -> str:
    if item.confirmable:
        return f"{item.claim}: can be confirmed"
    return f"{item.claim}: cannot be confirmed (no proof of {', '.join(item.missing)})"


def _beside(tree: TreeSupport, checks: Sequence[HookCheck]) -> list[str]:
    """Hooks of this tree that do not fit, although every link can do without them."""
    needed = {*SETUP, *(name for link in HOOK_OF_LINK for name in hook_links(link))}
    own = [check for check in checks if check.family in (COMMON, tree.family)]
    fitting = {check.name for check in own if check.fits}
    return sorted({check.name for check in own if check.name not in fitting and not set(check.links) & needed})
