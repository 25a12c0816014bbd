"""The watched server on a terminal: requests with bars of their tiers, rates, what disagrees and what is missing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvwitness.tracer.cli.table import grade_text
from kvwitness.tracer.model import CrossCheck, RequestVerdict, Tier
from kvwitness.tracer.outside.counting import EVICTED, LOADED
from kvwitness.tracer.outside.records import Counted
from kvwitness.tracer.watch.tallies import News, disagreements, tokens_by_tier

BAR: Final = 24
ROWS: Final = 15
_GAPS: Final = 6
_WINDOW_S: Final = 10.0
"""Rates are those of the last so many seconds."""

_LOOK: Final = {
    Tier.L1: ("█", "green"),
    Tier.L2: ("▓", "blue"),
    Tier.L3: ("▒", "magenta"),
    Tier.RECOMPUTED: ("░", "cyan"),
    Tier.UNKNOWN: ("·", "dim"),
}
"""Told apart by their shade as well as by their colour."""


class Rates(msgspec.Struct, frozen=True):
    """Tokens per second over the last seconds."""

    evicted: float
    left_l2: float
    loaded: float
    requests: float


def bar(tokens: dict[Tier, int], width: int = BAR) -> Text:
    """A request's prompt, by tier, in the order of the prompt's tiers. Every tier that is there shows."""
    total = sum(tokens.values())
    text = Text()
    if not total:
        return text
    shown = {tier: count for tier, count in tokens.items() if count}
    widths = {tier: max(1, round(width * count / total)) for tier, count in shown.items()}
    while sum(widths.values()) > width and max(widths.values()) > 1:
        widest = max(widths, key=widths.__getitem__)
        widths[widest] -= 1
    for tier, cells in widths.items():
        mark, style = _LOOK[tier]
        text.append(mark * cells, style=style)
    return text


class Screen:
    """What is on the terminal. Used by one thread."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._rows: deque[RequestVerdict] = deque(maxlen=ROWS)
        self._gaps: deque[str] = deque(maxlen=_GAPS)
        self._checks: deque[tuple[str, CrossCheck]] = deque(maxlen=_GAPS)
        self._moves: deque[tuple[float, float, float, float, int]] = deque()
        self._lost = 0
        self._outside: Text | None = None
        self._began: float | None = None

    def take(self, news: News, now_s: float) -> None:
        """Show the news of a round."""
        self._began = now_s if self._began is None else self._began
        self._rows.extend(news.requests)
        self._gaps.extend(news.gaps)
        self._gaps.extend(f"{lost.instance}: {lost.records} records lost ({lost.what})" for lost in news.lost)
        self._lost += sum(lost.records for lost in news.lost)
        for verdict in news.requests:
            self._checks.extend((verdict.rid, check) for check in disagreements(verdict))
        evicted = sum(one.tokens for one in news.evictions if one.tier == "L1")
        left = sum(one.tokens for one in news.evictions if one.tier == "L2")
        loaded = sum(one.tokens for one in news.loads)
        self._moves.append((now_s, evicted, left, loaded, len(news.requests)))
        while self._moves and now_s - self._moves[0][0] > _WINDOW_S:
            self._moves.popleft()

    def gap(self, text: str) -> None:
        """Show that something is missing."""
        self._gaps.append(text)

    def disagreement(self, who: str, check: CrossCheck) -> None:
        """Show two witnesses that contradict each other."""
        self._checks.append((who, check))

    def outside(self, sentence: str, tokens: dict[Tier, int], line: Counted) -> None:
        """What the server itself reports: a sentence, prompt tokens by tier so far, and the last interval."""
        seconds = max((line.at_ns - line.from_ns) / 1e9, 1e-3)
        loaded, evicted = (line.gained.get(name, 0.0) / seconds for name in (LOADED, EVICTED))
        self._outside = Text("the server's own counters: ").append_text(bar(tokens))
        self._outside.append(f" {sentence}; {loaded:.0f} tokens/s loaded back, {evicted:.0f} tokens/s left L1")

    def rates(self, now_s: float) -> Rates:
        """Over the last seconds, or since the beginning."""
        span = max(min(_WINDOW_S, now_s - (self._began if self._began is not None else now_s)), 1.0)
        sums = [sum(float(move[index]) for move in self._moves) / span for index in range(1, 5)]
        return Rates(*sums)

    def render(self, now_s: float) -> RenderableType:
        """All of it."""
        return Group(*self._parts(now_s))

    def _parts(self, now_s: float) -> Iterator[RenderableType]:
        rates = self.rates(now_s)
        yield Text(self._title, style="bold")
        yield Text(
            f"{rates.requests:.1f} requests/s, {rates.loaded:.0f} tokens/s loaded back, "
            f"{rates.evicted:.0f} tokens/s left L1, {rates.left_l2:.0f} tokens/s left L2, {self._lost} records lost"
        )
        if self._outside is not None:
            yield self._outside
        if self._rows:
            yield self._table()
        elif self._outside is None:
            yield Text("no request has been judged yet", style="dim")
        if self._rows or self._outside is not None:
            yield _legend()
        for rid, check in self._checks:
            words = f"{rid}: {check.witness}: {check.ours} against {check.theirs}"
            why = f" ({check.explanation})" if check.explanation else ""
            yield Text.assemble(("DISAGREES ", "bold red"), words + why)
        for gap in self._gaps:
            yield Text.assemble(("gap ", "bold yellow"), gap)

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
        table.add_column("request", overflow="ellipsis", no_wrap=True, min_width=12, max_width=28)
        table.add_column("prompt", justify="right", no_wrap=True, min_width=6)
        table.add_column("tiers", no_wrap=True, min_width=BAR)
        for name in ("L1", "L2", "L3"):
            table.add_column(name, justify="right", no_wrap=True, min_width=5)
        table.add_column("grade", no_wrap=True, min_width=11)
        table.add_column("sentence", overflow="ellipsis", no_wrap=True, ratio=1)
        for verdict in reversed(self._rows):
            tokens = verdict.tokens
            counts = (str(tokens.l1), str(tokens.l2), str(tokens.l3))
            shown = bar(tokens_by_tier(verdict))
            prompt = str(verdict.prompt_tokens)
            table.add_row(verdict.rid, prompt, shown, *counts, grade_text(verdict.grade), verdict.sentence)
        return table


def _legend() -> Text:
    text = Text()
    for tier, (mark, style) in _LOOK.items():
        text.append(f"{mark} ", style=style).append(f"{tier.value}  ", style="dim")
    return text
