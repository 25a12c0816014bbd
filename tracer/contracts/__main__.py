"""``python -m kvwitness.tracer.contracts``: what ``make wheels`` and ``make support`` run."""

from __future__ import annotations

from pathlib import Path

import click

from kvwitness.patches.hooks import all_hooks
from kvwitness.tracer.contracts.facts import extract, write_facts
from kvwitness.tracer.contracts.releases import RELEASES, download, find_wheel, wheel_cache
from kvwitness.tracer.contracts.source import open_wheel
from kvwitness.tracer.contracts.support import examine, read_all, support_page

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group()
def contracts() -> None:
    """Wheels of SGLang releases, and the page that is made from them."""


@contracts.command()
@click.option("--dir", "folder", type=_FOLDER, default=wheel_cache, help="Where the wheels are kept.")
def wheels(folder: Path) -> None:
    """Download the wheels that are not there yet (about 300 MB)."""
    for version in RELEASES:
        if find_wheel(version, folder) is None:
            click.echo(f"sglang {version}")
            download(version, folder)


@contracts.command()
@click.option("--dir", "folder", type=_FOLDER, default=wheel_cache, help="Where the wheels are kept.")
@click.option("--signatures", type=_FOLDER, required=True, help="Where the extracted facts are kept.")
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The page to write.")
def support(folder: Path, signatures: Path, page: Path) -> None:
    """Take the facts of every release from its wheel, and write the page."""
    hooks = all_hooks()
    for version in RELEASES:
        wheel = find_wheel(version, folder)
        if wheel is None:
            raise click.ClickException(f"no wheel of sglang {version} in {folder}; run make wheels")
        with open_wheel(wheel) as source:
            write_facts(extract(source, hooks), signatures)
    releases = [examine(facts, hooks) for facts in read_all(signatures)]
    page.write_text(support_page(releases), encoding="utf-8")
    click.echo(f"{page}: {len(releases)} releases")


if __name__ == "__main__":
    contracts()
