"""``summary.md``: the bundle for people. The same inputs give the same text, so that it can be checked too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

import jinja2
import msgspec

from kvwitness.tracer.bundle.layout import SkippedJournal
from kvwitness.tracer.bundle.rows import rows_of
from kvwitness.tracer.bundle.witnesses import Outside
from kvwitness.tracer.model import CrossCheck, Link, RequestVerdict
from kvwitness.tracer.protocol.record import RequestRecord

STORY: Final = ("A", "B", "C")
"""The series that are told in words; the rest of a run (warm-up, eviction) only stands in the table."""

RAW: Final = "raw"
PROCESSES: Final = "processes"
"""Sections of ``environment.json`` (answers as they came, command lines) that are too long for the summary."""

_PER_SECTION: Final = 60
_VALUE_CHARS: Final = 200


class Finding(msgspec.Struct, frozen=True):
    """A verdict told in words, under the name that the text gives the request."""

    name: str
    verdict: RequestVerdict


class MissingLink(msgspec.Struct, frozen=True):
    """A link that is missing from the chains of ``names``, and one way for all of them to obtain it."""

    link: Link
    remedy: str
    detail: str
    names: tuple[str, ...]


class NamedCheck(msgspec.Struct, frozen=True):
    """A comparison of two witnesses about one request."""

    name: str
    check: CrossCheck

    @property
    def answer(self) -> str:
        return {True: "agrees", False: "DISAGREES", None: "could not be compared"}[self.check.agrees]


def render_summary(
    *,
    created: str,
    version: str,
    verdicts: Sequence[RequestVerdict],
    records: Sequence[RequestRecord],
    environment: Mapping[str, Any],
    skipped: Sequence[SkippedJournal] = (),
    outside: Outside | None = None,
) -> str:
    """The text of ``summary.md``."""
    rows = rows_of(verdicts, records)
    findings = findings_of(verdicts, records)
    return _template().render(
        created=created,
        version=version,
        rows=rows,
        show_unknown=any(row.unknown for row in rows),
        findings=findings,
        gaps=missing_links(findings),
        skipped=skipped,
        checks=[NamedCheck(finding.name, check) for finding in findings for check in finding.verdict.checks],
        settings=settings_of(environment),
        outside=outside,
        outside_checks=[NamedCheck("the server", check) for check in outside.statement.checks] if outside else [],
    )


def findings_of(verdicts: Sequence[RequestVerdict], records: Sequence[RequestRecord]) -> tuple[Finding, ...]:
    """The verdicts to tell in words: those of series A, B and C; all of them when no series is known."""
    latest = {verdict.rid: verdict for verdict in verdicts}
    told = sorted((record for record in records if record.series in STORY), key=lambda record: record.order)
    if told:
        return tuple(Finding(f"{r.series} ({r.rid})", latest[r.rid]) for r in told if r.rid in latest)
    return tuple(Finding(verdict.rid, verdict) for verdict in verdicts)


def missing_links(findings: Sequence[Finding]) -> tuple[MissingLink, ...]:
    """What is missing, once per link and remedy, with the first request's words for it."""
    found: dict[tuple[Link, str], MissingLink] = {}
    for finding in findings:
        for link in (link for piece in finding.verdict.ranges for link in piece.missing):
            key = (link.link, link.remedy)
            one = found.get(key) or MissingLink(link.link, link.remedy, link.detail, ())
            if finding.name not in one.names:
                one = msgspec.structs.replace(one, names=(*one.names, finding.name))
            found[key] = one
    return tuple(found.values())


def settings_of(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``environment.json`` as dotted names and short values, so many per section; the file has them all."""
    settings: list[tuple[str, str]] = []
    for name, value in environment.items():
        if name in (RAW, PROCESSES):
            continue
        pairs = list(_flat(name, value))
        settings.extend(pairs[:_PER_SECTION])
        if len(pairs) > _PER_SECTION:
            settings.append((name, f"{len(pairs) - _PER_SECTION} more in environment.json"))
    return settings


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
        return
    text = _words(value)
    yield name, text if len(text) <= _VALUE_CHARS else text[:_VALUE_CHARS] + "…"


def _words(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "; ".join(value) or "none"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def markdown_cell(value: object) -> str:
    """Text from outside, made harmless within a line of Markdown."""
    text = " ".join(str(value).split())
    for char in "\\`*[]<>|":
        text = text.replace(char, f"\\{char}")
    return text


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


@cache
def _template() -> jinja2.Template:
    text = (resources.files("kvwitness.tracer.bundle") / "summary.md.j2").read_text("utf-8")
    # Markdown, not HTML: the `cell` filter does the escaping, and autoescaping would only add entities.
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(cell=markdown_cell, count=_count)
    return environment.from_string(text)
