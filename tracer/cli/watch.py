"""``kvwitness watch``: a running server, live."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.live import Live

from kvwitness.collectors.environment import locate_kvwitness_dir
from kvwitness.collectors.journal import find_journals
from kvwitness.tracer.bundle.places import is_bundle_folder
from kvwitness.tracer.bundle.rows import rows_of
from kvwitness.tracer.cli.address import web_address
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.output import console, json_option, note, until_told
from kvwitness.tracer.cli.outside import given_sources, recorder_errors
from kvwitness.tracer.cli.show import is_health_check
from kvwitness.tracer.model import CrossCheck
from kvwitness.tracer.outside.recorder import INTERVAL_S, Stop, Wanted
from kvwitness.tracer.outside.records import Counted, Server, Unanswered
from kvwitness.tracer.spans.live import stop_on_signal
from kvwitness.tracer.watch import loop
from kvwitness.tracer.watch.exporter import LOOPBACK, PORT, CannotListen, Exporter, Listening
from kvwitness.tracer.watch.reported import Reported
from kvwitness.tracer.watch.screen import Screen
from kvwitness.tracer.watch.tallies import News, disagreements

OFF: Final = "off"


@click.command()
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Where the server records.")
@click.option("--url", metavar="URL", help="The server: what it says of itself is watched as well, or alone.")
@click.option("--outside", is_flag=True, help="With --url: do not look for its journals.")
@click.option(
    "--listen",
    metavar="[HOST:]PORT",
    help=f"Where to offer Prometheus metrics, or {OFF}.  [default: {LOOPBACK}:{PORT}, or a free port]",
)
@click.option(
    "--interval", "interval_s", type=float, default=INTERVAL_S, show_default=True, help="Between looks, in s."
)
@click.option("--for", "seconds", type=float, help="End after so many seconds.")
@click.option("--kv-events", metavar="ENDPOINT", help="Where the server publishes KV events, if not as it says.")
@click.option("--kv-replay", metavar="ENDPOINT", help="Where it repeats them.")
@click.option("--api-key", envvar="KVWITNESS_API_KEY", help="Also from KVWITNESS_API_KEY.")
@json_option
def watch(
    directory: Path | None,
    url: str | None,
    outside: bool,
    listen: str | None,
    interval_s: float,
    seconds: float | None,
    kv_events: str | None,
    kv_replay: str | None,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Show a running server's requests by tier, its evictions and load-backs, and where witnesses disagree.

    Reads the journals in --dir, or those of the server at --url. With --outside only what the server itself says is
    watched; then every number is reported and nothing is confirmed. With --json each request, eviction, load-back,
    gap and interval is one line. What is watched is also offered as Prometheus metrics.

    \b
    Example:
      kvwitness watch --dir kvwitness-data/20260102-030405
      kvwitness watch --url http://127.0.0.1:30000 --outside --json
    """
    source = _source(directory, url, outside, given_sources(kv_events, kv_replay), interval_s, api_key)
    exporter = Exporter()
    with _listening(exporter, listen) as address, recorder_errors(url or ""), stop_on_signal(None) as stop:
        watched = " and ".join(str(one) for one in (source.directory, url) if one is not None)
        note(f"watching {watched} {until_told(seconds)}{f'; metrics at {address}' if address else ''}")
        if source.directory is not None and not find_journals(source.directory):
            note(f"no journals in {source.directory} yet: nothing has recorded there")
        until = _Until(stop, seconds)
        show = _JsonLines(exporter) if as_json else _Terminal(exporter, f"kvwitness watch {watched}")
        watcher = loop.Watcher(source, show)
        with show, _closed_pipe():
            loop.watch(watcher, until, interval_s, show.shown)


def _source(
    directory: Path | None, url: str | None, outside: bool, sources: Any, interval_s: float, api_key: str | None
) -> loop.Source:
    if directory is None and url is None:
        raise UserError("give --dir or --url", "kvwitness watch", "the folder that `kvwitness serve` printed, or a URL")
    if directory is not None and outside:
        raise UserError("--outside and --dir exclude each other", "kvwitness watch", "leave one out")
    if directory is not None and not directory.is_dir():
        raise UserError("there is no such folder", str(directory), "name the folder that `kvwitness serve` printed")
    if directory is not None and is_bundle_folder(directory):
        raise UserError("it is a bundle, not a server's folder", str(directory), "`kvwitness show` reads it")
    if url is None:
        return loop.Source(directory, None)
    web_address("http://127.0.0.1:30000")(click.get_current_context(), click.Option(["--url"]), url)
    if directory is None and not outside:
        found = locate_kvwitness_dir(url)
        directory = found.path
        if directory is None:
            note(f"from outside only, so nothing can be confirmed: {found.reason}")
    return loop.Source(directory, Wanted(url, interval_s, sources, api_key=api_key, directory=directory))


@contextmanager
def _listening(exporter: Exporter, listen: str | None) -> Iterator[str]:
    if listen == OFF:
        yield ""
        return
    host, port = (LOOPBACK, PORT) if listen is None else _address(listen)
    try:
        listening = Listening(exporter, host, port, any_port=listen is None)
    except CannotListen as error:
        raise UserError(
            f"cannot listen there: {error}", f"{host}:{port}", f"name another --listen, or {OFF}"
        ) from error
    with listening:
        yield listening.address


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UserError("it is no address to listen on", f"--listen {text}", f"write {LOOPBACK}:{PORT}, or {PORT}")
    return host.strip("[]") or LOOPBACK, int(port)


class _Until:
    """Set by a signal, or when the time is up."""

    def __init__(self, stop: Stop, seconds: float | None) -> None:
        self._stop = stop
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def is_set(self) -> bool:
        return self._stop.is_set() or self._left() <= 0

    def wait(self, timeout: float | None = None) -> bool:
        self._stop.wait(max(0.0, min(self._left(), timeout if timeout is not None else 3600.0)))
        return self.is_set()

    def _left(self) -> float:
        return float("inf") if self._deadline is None else self._deadline - time.monotonic()


@contextmanager
def _closed_pipe() -> Iterator[None]:
    """Whoever read the lines has gone: end without a complaint."""
    try:
        yield
    except BrokenPipeError:
        # Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Shown(contextlib.AbstractContextManager[None]):
    """What every way of showing does: the metrics, and the sum of what the server reported."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._reported = Reported()

    def __exit__(self, *_: object) -> None:
        return None

    def server(self, line: Server) -> None:
        self._reported.server(line)

    def _count(self, line: Counted) -> CrossCheck | None:
        """Take an interval; what does not fit in the server's own numbers."""
        self._exporter.counted(line)
        self._reported.take(line)
        check = self._reported.disagreement(line)
        if check is not None:
            self._exporter.disagreed(check)
        return check


class _JsonLines(_Shown):
    """One line for each thing, for pipes."""

    def news(self, news: News, now_s: float) -> None:
        self._exporter.take(news, time.time())
        for row, verdict in zip(rows_of(news.requests), news.requests, strict=True):
            self._line("request", {**msgspec.to_builtins(row), "instance": verdict.instance})
            for check in disagreements(verdict):
                self._line("disagreement", {"request": verdict.rid, **msgspec.to_builtins(check)})
        for kind, items in (("eviction", news.evictions), ("load_back", news.loads), ("lost", news.lost)):
            for item in items:
                self._line(kind, msgspec.to_builtins(item))
        for text in news.gaps:
            self.gap(text)

    def counted(self, line: Counted) -> None:
        check = self._count(line)
        self._line("interval", {**msgspec.to_builtins(line), "sentence": self._reported.sentence})
        if check is not None:
            self._line("disagreement", {"request": "", **msgspec.to_builtins(check)})

    def unanswered(self, line: Unanswered) -> None:
        self._exporter.unanswered()
        self._line("unanswered", msgspec.to_builtins(line))

    def gap(self, text: str) -> None:
        self._line("gap", {"at_ns": time.time_ns(), "what": text})

    def shown(self, now_s: float) -> None:
        sys.stdout.flush()

    def _line(self, kind: str, fields: dict[str, Any]) -> None:
        fields.pop("type", None)
        sys.stdout.write(msgspec.json.encode({"type": kind, **fields}).decode() + "\n")


class _Terminal(_Shown):
    """A table that is drawn again and again; lines where the output is no terminal."""

    def __init__(self, exporter: Exporter, title: str) -> None:
        super().__init__(exporter)
        self._screen = Screen(title)
        self._live = Live(console=console(), auto_refresh=False, screen=False) if sys.stdout.isatty() else None

    def __enter__(self) -> None:
        if self._live is not None:
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def news(self, news: News, now_s: float) -> None:
        self._exporter.take(news, time.time())
        rows = zip(rows_of(news.requests), news.requests, strict=True)
        shown = tuple(verdict for row, verdict in rows if not is_health_check(row))
        news = msgspec.structs.replace(news, requests=shown)
        self._screen.take(news, now_s)
        if self._live is None:
            for row in rows_of(news.requests):
                tiers = f"L1 {row.l1}, L2 {row.l2}, L3 {row.l3}, recomputed {row.recomputed}, unknown {row.unknown}"
                click.echo(f"{row.request}: {row.sentence} ({tiers} of {row.prompt})")
            for lost in news.lost:
                click.echo(f"gap: {lost.instance}: {lost.records} records lost ({lost.what})")
            for text in news.gaps:
                click.echo(f"gap: {text}")

    def counted(self, line: Counted) -> None:
        before = self._reported.by_tier
        check = self._count(line)
        self._screen.outside(self._reported.sentence, self._reported.tokens, line)
        if check is not None:
            self._screen.disagreement("the server", check)
        if self._live is None and self._reported.by_tier != before:
            click.echo(f"the server's own counters: {self._reported.sentence}")
        if self._live is None and check is not None:
            told = f"{check.ours}, {check.theirs}"
            click.echo(f"disagrees: {check.witness}: {told} ({check.explanation})")

    def unanswered(self, line: Unanswered) -> None:
        self._exporter.unanswered()

    def gap(self, text: str) -> None:
        self._screen.gap(text)
        if self._live is None:
            click.echo(f"gap: {text}")

    def shown(self, now_s: float) -> None:
        if self._live is not None:
            self._live.update(self._screen.render(now_s), refresh=True)
