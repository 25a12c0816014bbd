"""``kvwitness explain``: one request, its claim, and every link that the claim rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvwitness.tracer.cli.evidence import find_request, load_evidence
from kvwitness.tracer.cli.output import console, display, json_option, print_json
from kvwitness.tracer.cli.table import GRADE_STYLE, grade_text
from kvwitness.tracer.cli.why import find_why, why_parts
from kvwitness.tracer.event_names import event_names
from kvwitness.tracer.model import CrossCheck, LinkEvidence, LoadBack, RangeVerdict, RequestVerdict
from kvwitness.tracer.verdicts.why import Why

_ANSWER = {True: ("agrees", "green"), False: ("DISAGREES", "bold red"), None: ("not comparable", "dim")}


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("request", required=False)
@click.option("--rid", help="The same as REQUEST.")
@json_option
@click.pass_context
def explain(ctx: click.Context, path: Path, request: str | None, rid: str | None, as_json: bool) -> None:
    """Explain the verdict about one request in PATH, a bundle or a folder of journals.

    REQUEST is a request id, the unique beginning of one, or a series (A, B, C).

    Shows the claim for each token range; why a prefix that an earlier request had was not in L1, and why not in L2,
    with the request whose allocation displaced it; what was seen for each link of the chain of evidence with the
    numbers of the recorded events, what is missing and how to obtain it, and what other witnesses say.
    The exit code is 1 for a bundle that does not verify, and the sentence then says so.

    \b
    Example:
      kvwitness explain bundle C
    """
    if (wanted := request or rid) is None or (request and rid):
        raise click.UsageError("name one request: kvwitness explain PATH REQUEST")
    evidence = load_evidence(path)
    verdict = find_request(evidence, wanted)
    why = find_why(path, verdict)
    if as_json:
        print_json({"path": evidence.path, "intact": evidence.intact, "verdict": verdict, "why": why})
    else:
        display(console(), *_parts(verdict, why, evidence.doubt))
    ctx.exit(1 if evidence.intact is False else 0)


def _parts(verdict: RequestVerdict, why: Why | None, doubt: str) -> Iterator[RenderableType]:
    yield Text.assemble((doubt, "bold red"), (verdict.sentence, f"bold {GRADE_STYLE[verdict.grade]}"))
    yield Text(_about(verdict), style="dim")
    yield _range_table(verdict.ranges)
    if why is not None:
        yield from why_parts(why)
    for piece in verdict.ranges:
        if piece.links:
            yield Text(f"tokens {piece.start} to {piece.end}", style="bold")
            yield Padding(_link_table(piece.links, verdict.instance), (0, 0, 0, 2))
    yield from (*_load_backs(verdict), *_missing(verdict), *_checks(verdict.checks))
    for text in verdict.notes:
        yield Text(f"note: {text}")


def _about(verdict: RequestVerdict) -> str:
    parts = [
        f"request {verdict.rid}",
        f"{verdict.prompt_tokens} prompt tokens",
        f"instance {verdict.instance}",
        f"cache epoch {verdict.epoch} (since the last flush or start)",
    ]
    if verdict.attempt > 1:
        parts.append(f"attempt {verdict.attempt}")
    if not verdict.finished:
        parts.append("not seen to finish")
    if verdict.queued_ns is not None and verdict.first_token_ns is not None:
        parts.append(f"first token after {(verdict.first_token_ns - verdict.queued_ns) / 1e6:.1f} ms")
    return ", ".join(parts)


def _range_table(ranges: Sequence[RangeVerdict]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("tokens")
    table.add_column("count", justify="right")
    for name in ("tier", "grade", "reason"):
        table.add_column(name)
    detailed = any(piece.detail for piece in ranges)
    if detailed:
        table.add_column("detail", ratio=1, overflow="fold")
    for piece in ranges:
        table.add_row(
            f"{piece.start} to {piece.end}",
            str(piece.tokens),
            piece.tier.value,
            grade_text(piece.grade),
            piece.reason.value,
            *([Text(piece.detail)] if detailed else []),
        )
    return table


def _link_table(links: Sequence[LinkEvidence], instance: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column()
    table.add_column(ratio=1, overflow="fold")
    for link in links:
        mark = Text("seen", style="green") if link.holds else Text("MISSING", style="bold red")
        text = Text(link.detail)
        if link.events:
            text.append(f"  [{event_names(link.events, instance)}]", style="dim")
        table.add_row(mark, link.link.value, text)
    return table


def _load_backs(verdict: RequestVerdict) -> Iterator[RenderableType]:
    for load in verdict.load_backs:
        yield Text(f"{_load_words(load)}  [{event_names(load.events, verdict.instance)}]")


def _load_words(load: LoadBack) -> str:
    queued = f" queued by event {load.events[0].seq}" if load.events else ""
    words = f"load{queued}: {load.tokens} tokens from L2"
    if load.transfer_tokens != load.tokens:
        words += f" of {load.transfer_tokens} in the transfer"
    words += f", {load.bytes} bytes"
    words += (
        ", completion not seen"
        if load.done_ns is None
        else f", done {(load.done_ns - load.queued_ns) / 1e6:.2f} ms later"
    )
    if load.device_duration_ns is not None:
        words += f" ({load.device_duration_ns / 1e6:.2f} ms on the device)"
    return words


def _missing(verdict: RequestVerdict) -> Iterator[RenderableType]:
    remedies = dict.fromkeys(
        (link.link.value, link.remedy) for piece in verdict.ranges for link in piece.missing if link.remedy
    )
    for link, remedy in remedies:
        yield Text.assemble(("to obtain ", "bold"), (link, "bold"), f": {remedy}")


def _checks(checks: Sequence[CrossCheck]) -> Iterator[RenderableType]:
    if not checks:
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("witness", "answer", "ours", "theirs"):
        table.add_column(name)
    table.add_column("explanation", ratio=1, overflow="fold")
    for check in checks:
        word, style = _ANSWER[check.agrees]
        texts = (check.ours, check.theirs, check.explanation)
        table.add_row(Text(check.witness), Text(word, style=style), *(Text(text) for text in texts))
    yield table
