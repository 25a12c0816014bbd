"""``kvwitness demo``: the whole job on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvwitness.tracer.bundle.rows import one_of_series, rows_of
from kvwitness.tracer.bundle.write import check_destination
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.digest import digest_option
from kvwitness.tracer.cli.errors import INTERRUPTED, UserError, with_log
from kvwitness.tracer.cli.expect import unmet_expectations
from kvwitness.tracer.cli.findings import note_findings
from kvwitness.tracer.cli.output import json_option, note, print_json
from kvwitness.tracer.cli.program import program
from kvwitness.tracer.cli.table import print_requests
from kvwitness.tracer.demo.run import DemoOptions, DemoResult, run_demo
from kvwitness.tracer.demo.variants import PLAIN, VARIANTS, wrong_about_c
from kvwitness.tracer.protocol.client import ServerUnavailable
from kvwitness.tracer.stand.building import StandBuildError
from kvwitness.tracer.stand.progress import reporting
from kvwitness.tracer.stand.releases import NEWEST, RELEASES, UnsupportedError
from kvwitness.tracer.stand.server import StandServerError


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), help="Bundle to write.  [default: out/demo, with a fault out/demo-FAULT]"
)
@click.option(
    "--fault",
    type=click.Choice(list(VARIANTS)),
    default=PLAIN.name,
    show_default=True,
    help="Let something go wrong on purpose; exit 0 when the verdict about C says so.",
)
@click.option(
    "--sglang", "release", type=click.Choice(list(RELEASES)), default=NEWEST, show_default=True, help="Release to run."
)
@click.option(
    "--write-policy",
    type=click.Choice(["write_through", "write_through_selective", "write_back"]),
    default="write_through",
    show_default=True,
)
@click.option("--tree-core", type=click.Choice(["rust", "python"]), help="[default: SGLang's own]")
@click.option("--page-size", type=int, default=16, show_default=True)
@click.option("--tp", "tp_size", type=int, default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--overlap", is_flag=True, help="With SGLang's overlap schedule.")
@digest_option
@click.option("--second-hit", is_flag=True, help="Send A twice (write_through_selective needs it).")
@json_option
@click.pass_context
def demo(ctx: click.Context, /, out: Path | None, fault: str, as_json: bool, **options: Any) -> None:
    """Start a real SGLang server with HiCache on the CPU, prove where A, B and C came from, keep the evidence.

    \b
    Example:
      kvwitness demo --out out/demo
      kvwitness demo --fault load-too-short
    """
    variant = VARIANTS[fault]
    if out is None:
        out = Path("out", "demo" if variant is PLAIN else f"demo-{fault}")
    with bundle_errors():
        check_destination(out, replace=True)
    try:
        with reporting() as progress, bundle_errors():
            result = run_demo(DemoOptions(variant=variant, **options), out, progress)
    except (StandBuildError, StandServerError) as error:
        raise with_log(error, "kvwitness demo") from error
    except UnsupportedError as error:
        raise UserError(str(error), "kvwitness demo", "choose another release or option") from error
    except ServerUnavailable as error:
        raise UserError(str(error), "kvwitness demo", "look at the server's log") from error
    wrong = _wrong(result, fault, **options)
    _report(result, fault, wrong, as_json)
    if result.run.interrupted:
        ctx.exit(INTERRUPTED)
    ctx.exit(1 if wrong else 0)


def _wrong(result: DemoResult, fault: str, **options: Any) -> list[str]:
    """What is not as it should be, one line each."""
    records, verdicts = result.run.records, result.bundle.verdicts
    variant = VARIANTS[fault]
    if result.run.interrupted:
        return [f"the run stopped: {result.run.stopped}"]
    if variant is PLAIN and not _selective(**options):
        lines = list(unmet_expectations(verdicts, records))
        if result.run.stopped:
            lines.append(f"the run stopped: {result.run.stopped}")
        return lines
    latest = {verdict.rid: verdict for verdict in verdicts}
    record = one_of_series(records, "C")
    verdict = latest.get(record.rid) if record is not None else None
    if variant is PLAIN:
        # Without a second hit the selective policy backs nothing up: the sentence has to say so.
        ok = verdict is not None and "never backed up" in verdict.sentence
        return [] if ok else [f"C: {verdict.sentence if verdict else 'no verdict'}"]
    line = wrong_about_c(variant, verdict)
    return [] if line is None else [line]


def _selective(write_policy: str, second_hit: bool, **_: Any) -> bool:
    return write_policy == "write_through_selective" and not second_hit


def _report(result: DemoResult, fault: str, wrong: list[str], as_json: bool) -> None:
    rows = rows_of(result.bundle.verdicts, result.run.records)
    shown = [row for row in rows if row.series]
    if as_json:
        print_json({"bundle": str(result.bundle.path), "not_as_expected": wrong, "requests": shown})
    else:
        print_requests(shown)
        click.echo(f"bundle: {result.bundle.path}")
        click.echo(f"next:   {program()} explain {result.bundle.path} --rid C")
    note_findings(result.run.findings)
    for line in wrong:
        note(f"not as expected: {line}")
    if not wrong:
        note(f"as expected (fault: {fault})")
