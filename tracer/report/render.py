"""From the page as data to one file: HTML that loads nothing, or Markdown."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Final

import jinja2
from markupsafe import Markup, escape

from kvwitness.tracer.bundle.summary import markdown_cell
from kvwitness.tracer.report.figures import residency_chart, sweep_chart, ttft_chart
from kvwitness.tracer.report.messages import Words
from kvwitness.tracer.report.page import Page, Quoted
from kvwitness.tracer.report.statistics import Contrast, Interval, Summary

FORMATS: Final = ("html", "md")


def render_html(page: Page, words: Words) -> str:
    """One HTML page with its styles, its script and its charts in it."""
    style, script = _resource("report.css"), _resource("report.js")
    return _html().render(
        page=page,
        t=words,
        quoted=_quoted_for(words),
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        residency=Markup(residency_chart(page.residencies, words)) if page.residencies else None,
        sweep=Markup(sweep_chart(page.sweep.breakeven, words)) if page.sweep else None,
        ttft=Markup(ttft_chart(page.timing.summaries, words)) if page.timing.summaries else None,
    )


def render_markdown(page: Page, words: Words) -> str:
    """The same in Markdown, for issues and wikis; the charts are their tables."""
    return _markdown().render(page=page, t=words, quoted=lambda text: text.text + text.recorded)


def _quoted_for(words: Words) -> object:
    def quoted(text: Quoted) -> Markup:
        """What was recorded is English, and marked as such for screen readers on pages of another language."""
        if not text.recorded or words.language == "en":
            return escape(text.text + text.recorded)
        return Markup('{}<span lang="en">{}</span>').format(text.text, text.recorded)

    return quoted


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _interval(value: Interval | None, none: str) -> str:
    return none if value is None else f"{value.low:.1f} .. {value.high:.1f}"


def _median(value: Summary | None) -> str:
    """A median with its interval, where there is one."""
    if value is None:
        return "-"
    interval = "" if value.interval is None else f" ({value.interval.low:.1f} .. {value.interval.high:.1f})"
    return f"{value.median:.1f}{interval}"


def _contrast(value: Contrast | None) -> str:
    """A difference with its interval, where there is one."""
    if value is None:
        return "-"
    interval = "" if value.interval is None else f" ({value.interval.low:+.1f} .. {value.interval.high:+.1f})"
    return f"{value.difference:+.1f}{interval}"


def _resource(name: str) -> str:
    return (resources.files("kvwitness.tracer.report") / name).read_text("utf-8")


@cache
def _html() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(number=_number, count=_count, interval=_interval, median=_median, contrast=_contrast)
    return environment.from_string(_resource("report.html.j2"))


@cache
def _markdown() -> jinja2.Template:
    # Markdown, not HTML: the `cell` filter does the escaping.
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(
        number=_number, count=_count, interval=_interval, median=_median, contrast=_contrast, cell=markdown_cell
    )
    return environment.from_string(_resource("report.md.j2"))
